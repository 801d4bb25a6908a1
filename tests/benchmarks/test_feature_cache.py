"""The feature cache's benchmark: pages that are let go of come back, and what the report says."""

from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.features.command import _report
from benchmarks.features.measure import Steps, Timed, read_files
from benchmarks.features.pages import forget
from benchmarks.machine import machine
from specdec.features import Cached
from specdec.features.cached import CachedSource
from specdec.training.module import DrafterModule
from tests.features.made import LAYERS, Texts, fill, target_of


def test_what_is_let_go_of_is_read_again(target_directory: Path, tmp_path: Path) -> None:
    target, data = target_of(target_directory), Texts()
    cache = fill(tmp_path / "cache", target, data)
    source = Cached(str(cache)).open(target, data, LAYERS, False)
    assert isinstance(source, CachedSource)
    before = source(target, data.splits.train, LAYERS, False)
    timed = Timed(source, source.store)
    timed.announce(data.splits.train)
    timed.ready(data.splits.train)
    forget(source.store)
    after = source(target, data.splits.train, LAYERS, False)
    assert timed.waited > 0 and torch.equal(before.aux_BTNH, after.aux_BTNH)
    assert read_files(cache, cold=True) > 0


def test_the_loader_is_timed_from_the_first_step(target_directory: Path, tmp_path: Path) -> None:
    target, data = target_of(target_directory), Texts()
    module, steps = DrafterModule(), Steps(skip=0, cold=True)
    module.source = Cached(str(fill(tmp_path / "cache", target, data))).open(target, data, LAYERS, False)
    loader = SimpleNamespace(companion=module.source)
    steps.on_train_start(SimpleNamespace(train_dataloader=loader), module)
    assert loader.companion is steps.timed and steps.timed.source is module.source
    assert isinstance(module.source, CachedSource) and steps.timed.cold is module.source.store


def test_the_report_says_when_losses_differ() -> None:
    run = {"steps": [1.0, 1.0], "waits": [0.01, 0.03], "losses": [1.0]}
    found = {
        "runs": {"cached": run}, "mb_per_second": {"rows": [1.0, 2.0]}, "batch": [4, 8], "layers": [2], "tokens": 1,
        "bytes": 1, "shards": 1, "extraction_tokens_per_second": 1.0, "same_losses": False,
    }  # fmt: skip
    said = "\n".join(_report(found, machine(1) | {"load_at_end": [0.0]}))
    assert "NOT the same" in said and "| 2.00 % |" in said
