"""An arm is trained again from its card: equal to the last bit, or told apart."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli import main
from specdec.studies.card import write_card
from specdec.studies.reproduce import unpack_losses
from specdec.training.losses_file import with_checksum
from specdec.utils.files import claimed


@pytest.fixture(scope="module")
def study(
    target_directory: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A study of one arm and one seed, trained and evaluated."""
    directory = tmp_path_factory.mktemp("real")
    config = {
        "seed_everything": 5,
        "model": {"target": {"source": str(target_directory)}, "drafter": {"draft_vocab_size": 200}, "ttt_steps": 2},
        "data": {
            "class_path": "TextData",
            "init_args": {"train": str(text_file), "val": str(text_file), "seq_len": 32, "batch_size": 2},
        },
        "trainer": {
            "max_steps": 4, "log_every_n_steps": 2, "accelerator": "cpu", "enable_model_summary": False,
            "limit_val_batches": 0, "accumulate_grad_batches": 2, "logger": False, "enable_progress_bar": False,
        },
        "checkpoint": {"every_n_train_steps": 3},
    }  # fmt: skip
    (directory / "fit.yaml").write_text(yaml.safe_dump(config))
    (directory / "prompts.jsonl").write_text(
        '{"prompt": "def add_3(a, b):"}\n{"prompt": "def add_7("}\n'
    )
    asked = {
        "target": {"source": str(target_directory)}, "prompts": [str(directory / "prompts.jsonl")],
        "shape": ["chain:depth=3"], "max_new_tokens": 8, "compile": False, "plain": False,
    }  # fmt: skip
    (directory / "jobs" / "e").mkdir(parents=True)
    evaluate = directory / "jobs" / "e" / "config.yaml"
    evaluate.write_text(yaml.safe_dump(asked))
    drafter = str(directory / "fits" / "f" / "drafter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specdec"])
        assert (
            main(
                [
                    "fit",
                    "--config",
                    str(directory / "fit.yaml"),
                    "--out",
                    str(directory / "fits" / "f"),
                ]
            )
            == 0
        )
        given = [
            "--config",
            str(evaluate),
            "--drafter",
            drafter,
            "--out",
            str(directory / "measures" / "e"),
        ]
        assert main(["evaluate", *given]) == 0
    arm = {"name": "only", "levels": {"a": "0"}, "is_baseline": True, "differences": [], "trained_parameters": 1000,
           "trained_depth": 2, "tokens": None,
           "runs": [{"seed": 5, "fit": "f", "evaluate": "e", "drift": None, "robustness": None}]}  # fmt: skip
    plan = {"version": 3, "name": "real", "design": "grid", "axes": {"a": ["0"]}, "baseline": {"a": "0"}, "seeds": [5],
            "primary": [], "primary_changed": False, "unequal": [], "arms": [arm]}  # fmt: skip
    (directory / "plan.json").write_text(json.dumps(plan))
    write_card(directory)
    return directory


def card_of(study: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((study / "card" / "card.json").read_text())
    return found


def reproduce(card: Path, out: Path) -> int:
    return main(["sweep", str(card), "--reproduce", "only", "--seed", "5", "--out", str(out)])


@pytest.mark.slow
def test_the_same_arm_is_equal_to_the_last_bit(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(study / "card", tmp_path / "again") == 0
    told = capsys.readouterr().out
    assert "losses: equal, 8 of 8, bit by bit" in told
    record = json.loads((tmp_path / "again" / "reproduction.json").read_text())
    assert [(check["what"], check["equal"]) for check in record["checks"]] == [
        ("losses", True), ("weights", True), ("prompts", True), ("accepted drafts, chain of 3", True),
    ]  # fmt: skip
    assert reproduce(study / "card", tmp_path / "again") == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_two_reproductions_do_not_share_a_directory(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claimed(tmp_path / "again"):
        assert reproduce(study / "card", tmp_path / "again") == 2
    assert (
        "is claimed by another run" in capsys.readouterr().err and not (tmp_path / "again").exists()
    )


@pytest.mark.slow
def test_another_config_is_found_at_its_first_loss(
    study: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    card = card_of(study)
    known = card["manifest"]["runs"]["only"]["5"]["fit"]
    known["config"]["model"]["optimizer"]["init_args"]["lr"] *= 1.001
    known["provenance"]["versions"]["torch"] = "0.1"
    card["manifest"]["runs"]["only"]["5"]["evaluate"] = None
    (tmp_path / "card.json").write_text(json.dumps(card))
    assert reproduce(tmp_path / "card.json", tmp_path / "again") == 1
    losses, weights = capsys.readouterr().out.splitlines()
    assert losses.startswith("losses: differs, first at optimizer step 1 (batch 0), of 8")
    assert weights.startswith("weights: differs") and "versions.torch: 0.1 then" in caplog.text


def test_losses_are_kept_exactly(study: Path) -> None:
    lines = unpack_losses(card_of(study)["manifest"]["runs"]["only"]["5"]["fit"]["losses"])
    assert "".join(map(with_checksum, lines)) == (study / "fits" / "f" / "losses.txt").read_text()
    assert [tuple(map(int, line.split()[:2])) for line in lines] == [
        (step, part) for step in range(4) for part in (0, 1)
    ]
    assert all(0 < float.fromhex(line.split()[2]) < 10 for line in lines)


def test_what_a_card_does_not_have_is_said(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = str(study / "card")
    assert main(["sweep", card, "--reproduce", "other", "--seed", "5"]) == 2
    assert (
        "no finished fit of an arm 'other' with seed 5; there are: only, seeds 5"
        in capsys.readouterr().err
    )
    assert main(["sweep", card, "--reproduce", "only", "--seed", "1"]) == 2
    assert "no finished fit of an arm 'only' with seed 1" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("{}")
    assert main(["sweep", str(tmp_path / "x.json"), "--reproduce", "only", "--seed", "1"]) == 2
    assert "not a study card" in capsys.readouterr().err
