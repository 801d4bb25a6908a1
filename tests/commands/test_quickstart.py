"""The main job, on a target that needs no training."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import specdec.embedded
import specdec.embedded.corpus
from specdec.cli import main
from specdec.commands.quickstart import acceptance_reading, speed_reading
from specdec.embedded import RECORD
from specdec.embedded.corpus import Corpus, CorpusFile
from specdec.utils.files import write_json
from tests.conftest import TEXT


@pytest.fixture
def small_world(target_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random target in place of the embedded one, eight lines of training, three prompts."""
    target = shutil.copytree(target_directory, tmp_path / "target")
    write_json(target / RECORD, {"parameters": 12345, "held_out_loss": 5.0})
    monkeypatch.setattr("specdec.target.source.embedded_target", lambda: target)
    longer = TEXT.replace("    return", "    if a > b:\n        return b\n    return")
    files = Corpus([CorpusFile("a.py", longer)], [CorpusFile("b.py", longer[:400])])
    monkeypatch.setattr(specdec.embedded.corpus, "corpus", lambda seed: files)
    rows = [
        {"prompt_id": f"b.py:{n}", "prompt": TEXT[n * 40 : n * 40 + 30], "category": "b.py"}
        for n in range(3)
    ]
    monkeypatch.setattr(specdec.embedded, "held_out_prompts", lambda *args: rows)
    monkeypatch.setattr(specdec.commands.quickstart, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(specdec.commands.quickstart, "PROMPTS", 3)
    monkeypatch.setattr(specdec.commands.quickstart, "NEW_TOKENS", 16)
    config = yaml.safe_load((Path(__file__).parents[2] / "conf" / "quickstart.yaml").read_text())
    config["trainer"] |= {"max_steps": 4, "val_check_interval": 2, "accelerator": "cpu"}
    config["data"]["init_args"] = {"seq_len": 32, "batch_size": 2}
    config["acceptance"] = {**config.get("acceptance", {}), "max_new_tokens": 8, "count": 2}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(specdec.commands.quickstart, "CONFIG", str(tmp_path / "small.yaml"))
    monkeypatch.setattr(sys, "argv", ["specdec"])
    return tmp_path


def test_everything_is_kept_used_again_and_made_by_commands(
    small_world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = small_world / "run"
    assert main(["quickstart", "--out", str(out)]) == 0
    metrics = json.loads((out / "evaluation" / "metrics.json").read_text())
    assert [result["shape"] for result in metrics["results"]] == ["chain of 4"]
    for result in metrics["results"]:
        assert result["prompts"] == result["compared_outputs"] == result["identical_outputs"] == 3
        assert result["tokens"] == 3 * 16
        assert result["acceptance_length"]["low"] <= result["acceptance_length"]["mean"]
        joint = result["accepted_per_position"]["joint"]
        assert result["acceptance_length"]["mean"] == pytest.approx(1 + sum(joint))
        assert set(result["tokens_per_second"]) == {"speculative", "plain"}
    kept = {path.name for path in out.iterdir()}
    assert kept >= {"drafter", "evaluation", "config.yaml", "commands.sh"}
    assert kept >= {"provenance.json", "prompts.jsonl", "DONE.json"}
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("  acceptance length ")
    assert "of 3 answers repeat themselves" in printed
    assert [line.split()[0] for line in printed.splitlines() if re.match(r"\d/\d ", line)] == [
        "1/4",
        "2/4",
        "3/4",
        "4/4",
    ]
    assert "2/4 training the drafter, EAGLE-3.1: 2 to 10 minutes" in printed
    answer = (
        printed.partition("Accepted drafts are in brackets.\n\n")[2].partition("─")[0].strip("\n")
    )
    assert answer.startswith(TEXT[:30])  # the prompt, then what is decoded after it

    before = {
        path: path.stat().st_mtime_ns
        for path in (out / "evaluation" / "metrics.json", out / "drafter" / "config.json")
    }
    assert main(["quickstart", "--out", str(out)]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    printed = capsys.readouterr().out
    assert (
        printed.splitlines()[-1].startswith("  acceptance length ")
        and "2/4 training the drafter, EAGLE-3.1: already done" in printed
    )

    # the commands that it stands for do the same
    fit, evaluate = ([*line.split()] for line in (out / "commands.sh").read_text().splitlines())
    again = small_world / "again"
    assert main([str(again) if word == str(out) else word for word in fit[1:]]) == 0
    assert (again / "drafter" / "model.safetensors").read_bytes() == (
        out / "drafter" / "model.safetensors"
    ).read_bytes()
    evaluation = str(out / "evaluation")
    assert (
        main([str(again / "evaluation") if word == evaluation else word for word in evaluate[1:]])
        == 0
    )
    lengths = [
        [
            result["acceptance_length"]
            for result in json.loads((path / "evaluation" / "metrics.json").read_text())["results"]
        ]
        for path in (out, again)
    ]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.8, 1.2, "0.99 [0.80, 1.20]: these prompts are too few to tell it from plain decoding"),
        (None, None, "0.99: these prompts are too few to tell it from plain decoding"),
        (1.1, 1.3, "0.99 [1.10, 1.30]: faster than plain decoding"),
        (0.7, 0.9, "0.99 [0.70, 0.90]: slower than plain decoding"),
    ],
)
def test_a_speed_up_is_read_by_its_interval(
    low: float | None, high: float | None, verdict: str
) -> None:
    interval = None if low is None else {"low": low, "high": high}
    reading = speed_reading({"speedup": 0.99, "speedup_interval": interval})
    assert reading.startswith(f"speed-up {verdict}; ")


def test_an_acceptance_length_is_read_with_its_interval() -> None:
    reading = acceptance_reading({"acceptance_length": {"mean": 2.53, "low": 2.28, "high": 2.79}})
    assert reading.startswith("acceptance length 2.53 [2.28, 2.79]: ") and "2.5 tokens" in reading


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(small_world: Path) -> None:
    out = small_world / "run"
    assert main(["quickstart", "--out", str(out)]) == 0
    drafter = (out / "drafter" / "model.safetensors").read_bytes()
    for name in ("DONE.json", "SHA256SUMS"):
        (out / name).unlink()
    shutil.rmtree(out / "evaluation")
    assert main(["quickstart", "--out", str(out)]) == 0
    assert (out / "drafter" / "model.safetensors").read_bytes() == drafter
    assert (out / "evaluation" / "metrics.json").is_file()


def test_an_interrupted_training_names_the_command_that_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def interrupted(subcommand: str, args: list[str], resume: list[str]) -> int:
        commands.append(resume)
        return 130

    monkeypatch.setattr("specdec.commands.fit.run_fit", interrupted)
    out = tmp_path / "run"
    assert main(["quickstart", "--out", str(out), "--seed", "3"]) == 130
    assert commands == [["specdec", "quickstart", "--out", str(out), "--seed", "3"]]


@pytest.mark.parametrize("held", [{"precious": "work"}, {"quickstart.json": "{}"}])
def test_somebody_elses_directory_is_left_alone(
    small_world: Path, held: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = small_world / "run"
    out.mkdir()
    for name, text in held.items():
        (out / name).write_text(text)
    assert main(["quickstart", "--out", str(out)]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} == set(held)


@pytest.mark.parametrize("name", [".claimed", "target", "checkpoints"])
def test_a_link_in_its_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr("specdec.commands.fit.run_fit", lambda *args: 130)
    out, behind = tmp_path / "run", tmp_path / "behind"
    assert main(["quickstart", "--out", str(out)]) == 130
    (out / ".claimed").unlink(missing_ok=True)
    (out / name).symlink_to(behind)
    assert main(["quickstart", "--out", str(out)]) == 2
    assert f"{out / name}: it is a link out of {out}" in capsys.readouterr().err
    assert not behind.exists()


@pytest.mark.slow
def test_in_full_the_target_is_trained_too_and_decoding_compiled(
    small_world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "specdec.commands.pretraining.pretrain",
        lambda config: shutil.copytree(small_world / "target", config.out) and 0,
    )
    out = small_world / "run"
    assert main(["quickstart", "--full", "--out", str(out)]) == 0
    metrics = json.loads((out / "evaluation" / "metrics.json").read_text())
    assert metrics["settings"]["compile"] and metrics["target"]["source"] == str(out / "target")
    assert "1/4 the target" in capsys.readouterr().out
    assert main(["quickstart", "--out", str(out)]) == 2  # holds another one
