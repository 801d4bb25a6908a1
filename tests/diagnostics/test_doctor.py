"""``specdec doctor`` from its command line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaForCausalLM

from specdec.cli import main
from specdec.diagnostics.doctor import CHECKS
from specdec.drafter import DrafterSpec, save_drafter
from specdec.target import Target
from specdec.target.attention import Tape
from tests.data.tiny import CHATML, tiny_tokenizer
from tests.export.made import made_drafter
from tests.tiny import llama_config

# of text, which has no template
ALL = [name for name in CHECKS if name not in ("overfit", "template")]


@pytest.fixture
def base(
    target_directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """A run's config, as for specdec fit; its ``out`` is not the doctor's."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    (text_file.parent / "other.txt").write_text(text_file.read_text()[:1000])
    texts = {
        "train": str(text_file),
        "val": str(text_file.parent / "other.txt"),
        "seq_len": 48,
        "batch_size": 2,
    }
    config = {
        "model": {
            "target": {"source": str(target_directory)},
            "drafter": {"draft_vocab_size": 200},
            "ttt_steps": 2,
        },
        "data": {"class_path": "TextData", "init_args": texts},
        "trainer": {"accelerator": "cpu", "max_steps": 2, "strategy": "ddp", "devices": 2},
        "out": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(tmp_path / "run.yaml")]


def doctor(*args: Any) -> int:
    return main(["doctor", *map(str, args)])


def test_a_sound_set_up(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table, and no trace in the run's directory."""
    assert doctor(*base, "--only", *ALL) == 0
    shown = capsys.readouterr().out
    assert "no fault was found" in shown and "FAULTY" not in shown
    assert all(f"│ {name} " in shown for name in ALL)
    assert not (tmp_path / "run").exists()


def test_a_saved_drafter(
    base: list[str], target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own design, whatever the config says; what is trained of it already is not held against it."""
    target = Target.load(target_directory)
    save_drafter(
        made_drafter(DrafterSpec(draft_vocab_size="all", num_layers=2), target),
        tmp_path / "drafter",
    )
    assert doctor(*base, "--drafter", tmp_path / "drafter", "--only", *ALL) == 0
    assert (
        "taps: not checked: the saved drafter drafts best from its stated boundaries"
        in capsys.readouterr().out
    )


def test_a_target_whose_taps_are_off(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hooks keep each state as that of the boundary before: the target's own proof finds it, as in fit."""
    own = Tape._enter

    def off(self: Tape, boundary: int, place: int | None, *rest: Any) -> Any:
        if place is None:  # the final norm
            return own(self, boundary, place, *rest)
        out = own(self, max(boundary - 1, 0), place, *rest)
        return own(self, boundary, place, *rest) if boundary == 6 else out

    monkeypatch.setattr(Tape, "_enter", off)
    assert doctor(*base, "--only", "taps") == 2
    assert "boundary" in capsys.readouterr().err


def test_chats_without_an_answer(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    tokenizer = tiny_tokenizer(CHATML)
    LlamaForCausalLM(llama_config(vocab_size=len(tokenizer))).save_pretrained(target)
    tokenizer.save_pretrained(target)
    rows = [{"messages": [{"role": "user", "content": f"what is {n}?"}]} for n in range(4)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [
        "--data",
        "ChatData",
        "--data.train",
        tmp_path / "chats.jsonl",
        "--trainer.accelerator",
        "cpu",
    ]
    assert doctor("--target", target, *data, "--only", "masks") == 2
    assert "they need assistant turns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seconds", "0"], "--seconds is 0"),
        (["--model.drafter.aux_layers=[9]"], "aux_layers [9]"),
        # with masks alone nothing is trained
        (["--model.optimizer.lr=-0.5"], "lr"),
        (["--drafter", "/nowhere"], "/nowhere: no such drafter directory"),
        (["--target", "/nowhere"], "/nowhere: no such directory"),
        (["--colour", "red"], "colour"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], message: str, base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*base, "--only", "masks", *args) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("specdec doctor: error: ")


def chat_base(target_directory: Path, tmp_path: Path, **drafter: Any) -> list[str]:
    """A run on conversations, for a target whose tokenizer has no chat template."""
    row = {
        "messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
    }
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    config = {
        "model": {
            "target": {"source": str(target_directory)},
            "drafter": {"draft_vocab_size": 200, **drafter},
        },
        "data": {
            "class_path": "ChatData",
            "init_args": {"train": [str(tmp_path / "chats.jsonl")], "seq_len": 48},
        },
        "trainer": {"accelerator": "cpu", "max_steps": 2},
    }
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(tmp_path / "chat.yaml")]


def test_a_missing_chat_template_is_told_before_the_target_is_loaded(
    target_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.setattr(
        "specdec.diagnostics.doctor.set_up", lambda *args: pytest.fail("the target is loaded")
    )
    assert doctor(*chat_base(target_directory, tmp_path)) == 1
    shown = capsys.readouterr().out
    assert (
        "the tokenizer has no chat template" in shown and "doctor did not load the target" in shown
    )
    assert "no chat template writes it: if the model was trained with it" in " ".join(shown.split())


def test_what_no_engine_serves_is_told_by_name(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model.drafter.fusion", "ScalarMix", "--model.drafter.norms.aux", "each"]
    assert doctor(*base, *given, "--only", "setup") == 1
    assert "fusion ScalarMix" in capsys.readouterr().out
    assert doctor(*base, "--only", "setup") == 0


def test_a_shape_that_no_engine_loads_is_refused_as_fit_does(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*base, "--model.drafter.num_attention_heads", 6) == 2
    assert "hidden_size 32 is no multiple of num_attention_heads 6" in capsys.readouterr().err
