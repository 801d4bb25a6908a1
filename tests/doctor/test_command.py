"""``specdec doctor`` from its command line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from specdec.cli import main
from specdec.doctor.checks import CHECKS
from specdec.drafter import DrafterSpec, save
from specdec.export import export_drafter
from specdec.target import Target
from specdec.target.capture import Tape
from tests.data.tiny import CHATML, tiny_tokenizer
from tests.export.made import made_drafter
from tests.tiny import llama_config

QUICK = ("taps", "masks", "vocabulary")
Lines = list[str]


@pytest.fixture
def base(target_directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lines:
    """A run's config, as for specdec fit; its ``out`` is not the doctor's."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    (text_file.parent / "other.txt").write_text(text_file.read_text()[:1000])
    texts = {"train": str(text_file), "val": str(text_file.parent / "other.txt"), "seq_len": 48, "batch_size": 2}
    config = {
        "model": {"target": {"source": str(target_directory)}, "drafter": {"draft_vocab_size": 200}, "ttt_steps": 2},
        "data": {"class_path": "TextData", "init_args": texts},
        "trainer": {"accelerator": "cpu", "max_steps": 2, "strategy": "ddp", "devices": 2},
        "out": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(tmp_path / "run.yaml")]


def doctor(*args: Any) -> int:
    return main(["doctor", *map(str, args)])


def test_a_sound_set_up(base: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table, the report, and no trace in the run's directory; a second report is refused."""
    names = [name for name in CHECKS if name != "overfit"]
    assert doctor(*base, "--only", *names, "--out", tmp_path / "report") == 0
    shown = capsys.readouterr().out
    assert "no fault was found" in shown and "FAULTY" not in shown
    report = json.loads((tmp_path / "report" / "doctor.json").read_text())
    assert report["sound"] and {row["check"] for row in report["findings"]} == set(names)
    assert report["target"]["num_layers"] == 7 and set(report["seconds"]) == {"set-up", *names}
    assert report["provenance"]["command"].startswith("specdec doctor --config")
    assert all(row["verdict"] in ("sound", "cannot be checked") for row in report["findings"])
    assert not (tmp_path / "run").exists()
    assert doctor(*base, "--only", "masks", "--out", tmp_path / "report") == 2
    assert "holds a report or a run already" in capsys.readouterr().err


def test_a_saved_drafter(base: Lines, target_directory: Path, tmp_path: Path) -> None:
    """Its own design, whatever the config says; what is trained of it already is not held against it."""
    target = Target.load(target_directory)
    save(made_drafter(DrafterSpec(draft_vocab_size="all", num_layers=2), target), tmp_path / "drafter")
    names = [name for name in CHECKS if name != "overfit"]
    assert doctor(*base, "--drafter", tmp_path / "drafter", "--only", *names, "--out", tmp_path / "report") == 0
    rows = json.loads((tmp_path / "report" / "doctor.json").read_text())["findings"]
    untold = {row["what"] for row in rows if row["verdict"] == "cannot be checked"}
    assert any("drafts best from its stated boundaries" in what for what in untold)
    assert any("trained rows" in what for what in untold)


@pytest.mark.parametrize("absolute", [False, True])
def test_an_exported_drafter(
    absolute: bool, base: Lines, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of which a converter may have written d2t as target ids."""
    target = Target.load(target_directory)
    export_drafter(made_drafter(DrafterSpec(draft_vocab_size=200), target), target, tmp_path / "served")
    for name in ("specdec.json", "SHA256SUMS"):
        (tmp_path / "served" / name).unlink()
    if absolute:
        file = tmp_path / "served" / "model.safetensors"
        tensors = load_file(file)
        save_file(tensors | {"d2t": tensors["d2t"] + torch.arange(200)}, file, metadata={"format": "pt"})
    status = doctor(*base, "--drafter", tmp_path / "served", "--only", "vocabulary", "rope")
    shown = " ".join(capsys.readouterr().out.split())
    assert ("d2t holds target ids" in shown) == absolute
    if absolute:
        assert status == 1 and "mend that first" in shown
    else:
        assert "the checkpoint's d2t and t2d" in shown


def test_a_target_whose_taps_are_off(
    base: Lines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hooks keep each state as that of the boundary before: the proof finds it, and nothing else can be said."""
    own = Tape._enter_layer

    def off(self: Tape, boundary: int, *rest: Any) -> Any:
        out = own(self, max(boundary - 1, 0), *rest)
        return own(self, boundary, *rest) if boundary == 6 else out

    monkeypatch.setattr(Tape, "_enter_layer", off)
    assert doctor(*base, "--only", *QUICK) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "taps: FAULTY" in shown and "boundary" in shown
    assert all(f"{name}: not checked: all" in shown for name in QUICK)


def test_chats_without_an_answer(base: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by the data, told as a fault of the masks."""
    target = tmp_path / "target"
    tokenizer = tiny_tokenizer(CHATML)
    LlamaForCausalLM(llama_config(vocab_size=len(tokenizer))).save_pretrained(target)
    tokenizer.save_pretrained(target)
    rows = [{"messages": [{"role": "user", "content": f"what is {n}?"}]} for n in range(4)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chats.yaml").write_text(
        f"model: {{target: {{source: {target}}}}}\ntrainer: {{accelerator: cpu}}\n"
        f"data: {{class_path: ChatData, init_args: {{train: {tmp_path / 'chats.jsonl'}}}}}\n"
    )
    assert doctor("--config", tmp_path / "chats.yaml", "--only", "masks") == 1
    assert "masks: FAULTY" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seconds", "0"], "--seconds is 0"),
        (["--model.ttt_steps=0"], "ttt_steps"),
        (["--model.drafter.aux_layers=[9]"], "aux_layers [9]"),
        (["--drafter", "/nowhere"], "/nowhere: no such directory"),
        (["--target", "/nowhere"], "/nowhere: no such directory"),
        (["--colour", "red"], "colour"),
    ],
)
def test_what_fit_would_refuse_is_one_line(
    args: Lines, message: str, base: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(*base, "--only", "masks", *args) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("specdec doctor: error: ")
