"""Drift measured while a drafter is trained."""

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.data import TextData
from specdec.drafter import load
from specdec.drift.callback import AttentionDrift
from specdec.drift.measure import Sums, measure
from specdec.drift.results import document, sums_of
from specdec.drift.settings import Settings
from specdec.drift.summary import summary
from specdec.drift.texts import own_texts
from specdec.evaluation.beginnings import beginnings
from specdec.fit import run
from specdec.target import Target
from tests.drift.made import PROMPTS, drafter, target
from tests.short_run import short_run

CALLBACK = {"max_new_tokens": 12, "count": 3, "depths": 4, "anchors": 3}


@pytest.fixture(scope="module")
def base(target_directory: Path, text_file: Path) -> list[str]:
    """Arguments of a run on the CPU that is validated twice."""
    return short_run(
        target_directory, text_file,
        trainer__max_steps=4,
        trainer__val_check_interval=2,
        trainer__limit_val_batches=1,
        trainer__log_every_n_steps=1,
        acceptance__every_n_validations=0,
    )  # fmt: skip


def with_callback(**more: Any) -> list[str]:
    words = ["--trainer.callbacks+=AttentionDrift"]
    return words + [f"--trainer.callbacks.{name}={value}" for name, value in (CALLBACK | more).items()]


@pytest.fixture(scope="module")
def runs(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """One with the callback, one without."""
    out = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specdec"])
        for drifts in (False, True):
            out[drifts] = tmp_path_factory.mktemp("run") / "out"
            average = ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]
            more = [*average, *(with_callback() if drifts else [])]
            assert run("fit", [*base, *more, "--out", str(out[drifts])]) == 0
    return out


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_training_is_left_alone_to_the_last_bit(runs: dict[bool, Path]) -> None:
    plain, watched = (rows(runs[drifts]) for drifts in (False, True))
    names = [name for name in plain[0] if name.endswith("loss")]
    assert {"train/loss", "val/loss"} <= set(names)
    for name in names:
        column = [row[name] for row in plain if row[name]]
        assert column and column == [row[name] for row in watched if row[name]]
    states = [torch.load(runs[drifts] / "checkpoints" / "last.ckpt", weights_only=True) for drifts in (False, True)]
    for one, two in zip(*(state["state_dict"].values() for state in states), strict=True):
        assert torch.equal(one, two)


def test_what_is_written_is_of_the_drafter_that_is_kept(
    runs: dict[bool, Path], target_directory: Path, text_file: Path
) -> None:
    out = runs[True]
    found = json.loads((out / "drift.json").read_text())
    assert (out / "drift.png").exists() and (out / "drift.pdf").exists()
    assert not (runs[False] / "drift.json").exists()
    assert found["trained_depth"] == 2 and found["depths"] == 4 and found["settings"]["steps"] == 4
    loaded = Target.load(target_directory)
    data = TextData(str(text_file), str(text_file), seq_len=32)
    data.prepare(loaded.tokenizer)
    asked = [(f"validation-{n}", ids) for n, ids in enumerate(beginnings(data.splits.validation, 3, 64, 200))]
    kept = load(out / "drafter")
    texts = own_texts(loaded, asked, 12)
    sums = [measure(loaded, kept, text, Settings(4, 3)) for text in texts]
    wanted = document(kept.config, [name for name, _ in asked], sums, 2, 4)
    assert found["prompts"] == wanted["prompts"]
    left_out = [one["prompt_id"] for one in found["skipped"]]
    assert sorted([*found["prompts"], *left_out]) == [name for name, _ in asked]
    for name in wanted["series"]:
        np.testing.assert_allclose(sums_of(found, name), sums_of(wanted, name), rtol=1e-5, atol=1e-5, err_msg=name)
    logged = {name: [float(row[name]) for row in rows(out) if row[name]] for name in rows(out)[0] if "drift/" in name}
    told = summary(wanted)
    assert {f"drift/{name}" for name in told} >= set(logged) >= {"drift/state_rms_growth", "drift/sink_mass_last"}
    assert all(len(values) == 2 for values in logged.values())  # of two validations, the last with the kept weights
    for name, values in logged.items():
        assert values[-1] == pytest.approx(told[name.removeprefix("drift/")]["mean"], rel=1e-4)
    assert logged["drift/kl_first"][0] != logged["drift/kl_first"][1]


def test_processes_share_the_prompts() -> None:
    """What each of two finds, zero for the other's prompts, adds up to what one finds."""
    callback: dict[str, Any] = {"prompts": "validation", "max_new_tokens": 12, "depths": 3, "anchors": 4}

    def found(rank: int, world: int, others: torch.Tensor | float = 0.0) -> Sequence[Sums]:
        one = AttentionDrift(**callback)
        one._asked = list(PROMPTS)
        strategy = SimpleNamespace(reduce=lambda flat, reduce_op: flat + others if reduce_op == "sum" else None)
        trainer: Any = SimpleNamespace(global_rank=rank, world_size=world, strategy=strategy)
        module: Any = SimpleNamespace(target=target(), device=torch.device("cpu"))
        return one._measured(trainer, module, drafter())[2]

    whole = found(0, 1)
    shares = [found(rank, 2) for rank in range(2)]
    assert [one.chains for one in shares[0]] == [4, 0, 4] and [one.chains for one in shares[1]] == [0, 4, 0]
    flat = torch.stack([torch.cat([part.flatten() for part in one]) for one in shares[1]])
    for one, two in zip(whole, found(0, 2, flat), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depths": 12}, "max_new_tokens is 12: chains of 12"),
        ({"anchors": 0}, "must be at least 1"),
        ({"prompt_tokens": 4}, "prompt_tokens 4"),
        ({"every_n_validations": -1}, "every_n_validations -1"),
        ({"prompts": "/nowhere.txt"}, "/nowhere.txt"),
        ({"max_new_tokens": 250}, "no validation document can be made a prompt.*or leave AttentionDrift out"),
    ],
)
def test_wrong_input_is_told_before_training(
    base: list[str], tmp_path: Path, wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    with pytest.raises(ValueError, match=message):
        run("fit", [*base, *with_callback(**wrong), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
