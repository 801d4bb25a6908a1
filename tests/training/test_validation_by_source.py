"""Validation of a mix is logged by source, and that of all together is as it was."""

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from specdec import DrafterModule, DrafterSpec, TextData
from specdec.cli import main
from specdec.data import MixSource
from specdec.export.card import trained, training_text
from specdec.training.stage_metrics import BY_SOURCE
from specdec.utils.files import write_json
from specdec.utils.reading import read_json
from tests.data.tiny import write_jsonl
from tests.two_processes import launch

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0,
}  # fmt: skip


def texts(path: Path, words: str, count: int) -> str:
    return str(
        write_jsonl(
            path, [{"text": f"def {words}_{i}(a, b):\n    return a + {i}\n"} for i in range(count)]
        )
    )


def validated(target: Path, data: TextData, **more: Any) -> dict[str, float]:
    """The figures of validation of the drafter that training begins with."""
    torch.manual_seed(0)
    module = DrafterModule(
        target=str(target), drafter=DrafterSpec(draft_vocab_size=100), ttt_steps=2
    )
    trainer = pl.Trainer(max_steps=1, limit_train_batches=1, val_check_interval=1, **(QUIET | more))
    # a rate of zero: the weights stay as they start
    module.make_optimizer = lambda named: torch.optim.SGD([p for _, p in named], lr=0.0)
    trainer.fit(module, datamodule=data)
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if name.startswith("val/")
    }


def test_figures_by_source_are_those_of_the_source_alone(
    target_directory: Path, tmp_path: Path
) -> None:
    train = texts(tmp_path / "train.jsonl", "add", 60)
    files = [
        texts(tmp_path / "one.jsonl", "first", 30),
        texts(tmp_path / "two.v1.jsonl", "other", 11),
    ]
    size: dict[str, Any] = {"seq_len": 32, "batch_size": 3}
    mixed = validated(
        target_directory, TextData(train, [MixSource(file) for file in files], **size)
    )
    alone = [validated(target_directory, TextData(train, file, **size)) for file in files]
    for figure in BY_SOURCE:
        for name, found in zip(("one", "two.v1"), alone, strict=True):
            assert mixed[f"val/{figure}/{name}"] == pytest.approx(found[f"val/{figure}"], rel=1e-5)
    assert mixed["val/loss/one"] != mixed["val/loss/two.v1"]
    low, high = sorted(mixed[f"val/loss/{name}"] for name in ("one", "two.v1"))
    assert low < mixed["val/loss"] < high
    assert not any("/" in name.removeprefix("val/") for name in alone[0])
    cut = validated(
        target_directory,
        TextData(train, [MixSource(file) for file in files], **size),
        limit_val_batches=1,
    )
    assert "val/loss/one" in cut and "val/loss/two.v1" not in cut


def mixed(folder: Path, target: Path, **more: Any) -> dict[str, float]:
    files = [str(folder / name) for name in ("one.jsonl", "two.jsonl")]
    data = TextData([MixSource(file) for file in files], val_fraction=0.4, seq_len=32, batch_size=3)
    return validated(target, data, **more)


def program(folder: Path) -> None:
    """The figures of a process of two."""
    target = Path((folder / "target.txt").read_text())
    figures = mixed(folder, target, devices=2, strategy="ddp")
    write_json(folder / f"{os.environ['RANK']}.json", figures)


@pytest.mark.slow
def test_two_processes_have_the_figures_of_one(target_directory: Path, tmp_path: Path) -> None:
    texts(tmp_path / "one.jsonl", "first", 30)
    texts(tmp_path / "two.jsonl", "other", 11)
    (tmp_path / "target.txt").write_text(str(target_directory))
    launch("tests.training.test_validation_by_source", tmp_path, 2)
    one = mixed(tmp_path, target_directory)
    for rank in range(2):
        two = read_json(tmp_path / f"{rank}.json")
        assert {"val/loss/one", "val/loss/two"} <= one.keys() == two.keys()
        assert all(two[name] == pytest.approx(one[name], rel=1e-4) for name in one)


def test_a_run_and_its_card_say_the_shares(
    target_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    sources = [
        {"name": "code", "source": texts(tmp_path / "one.jsonl", "first", 60), "weight": 3},
        {"name": "more", "source": [texts(tmp_path / "two.jsonl", "other", 60)], "weight": 1},
    ]
    run = tmp_path / "run"
    config = {
        "model": {
            "target": {"source": str(target_directory)},
            "drafter": {"draft_vocab_size": 100},
            "ttt_steps": 2,
        },
        "data": {
            "class_path": "TextData",
            "init_args": {"train": sources, "seq_len": 32, "batch_size": 2},
        },
        "trainer": {
            "max_steps": 2,
            "accelerator": "cpu",
            "val_check_interval": 2,
            "log_every_n_steps": 1,
        },
        "acceptance": {"every_n_validations": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", str(tmp_path / "run.yaml"), "--out", str(run)]) == 0
    told = read_json(run / "provenance.json")["mix"]
    assert [(part["name"], part["weight"]) for part in told] == [("code", 3.0), ("more", 1.0)]
    assert abs(told[0]["share_of_rows"] - 0.75) < 0.05
    assert {"val/loss", "val/loss/code", "val/loss/more"} <= read_json(run / "DONE.json")[
        "metrics"
    ].keys()
    record = trained(run / "drafter")
    assert record is not None and [Path(path).name for path in record["data"]] == [
        "one.jsonl",
        "two.jsonl",
    ]
    text = training_text(record)
    assert f"on one.jsonl, two.jsonl (code {told[0]['share_of_rows']:.1%} of the rows and" in text
    again = [
        "fit",
        "--config",
        str(tmp_path / "run.yaml"),
        "--out",
        str(run),
        "--ckpt_path",
        "auto",
    ]
    assert main([*again, "--trainer.max_steps", "3", "--data.val_fraction", "0.05"]) == 0
    sources[0]["weight"] = 2
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main([*again, "--trainer.max_steps", "4"]) != 0
    assert "data.train was" in caplog.text


if __name__ == "__main__":
    program(Path(sys.argv[1]))
