"""``specdec cache`` on a tiny target, and a run of ``specdec fit`` that reads what it wrote."""

import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from safetensors.torch import load_file

from specdec import DrafterModule, DrafterSpec, TextData
from specdec.cli import main
from specdec.engines import extract
from specdec.engines.extract import cache as cache
from specdec.engines.extract import parse_options
from specdec.features.runners import TransformersEngine
from specdec.features.source import Cached
from specdec.features.store import FeatureIndex, FeatureStore
from specdec.target import Target
from tests.features.test_store import same


@pytest.fixture
def config(
    target_directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """A run's config, trainer and all."""
    said: dict[str, Any] = {
        "model": {
            "target": {"source": str(target_directory)},
            "drafter": {"draft_vocab_size": 200},
            "ttt_steps": 2,
        },
        "data": {
            "class_path": "TextData",
            "init_args": {
                "train": str(text_file),
                "val": str(text_file),
                "seq_len": 32,
                "batch_size": 2,
            },
        },
        "trainer": {
            "max_steps": 4,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "enable_model_summary": False,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(said))
    monkeypatch.setattr(extract, "SHARD_BYTES", 50_000)
    return ["--config", str(tmp_path / "run.yaml")]


@pytest.fixture(autouse=True)
def bare_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])


def losses(run: Path) -> list[str]:
    lines = [
        line.split(",")
        for line in (run / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    ]
    at = lines[0].index("train/loss")
    return [line[at] for line in lines[1:] if line[at]]


def test_a_cache_trains_as_the_target_does(config: list[str], tmp_path: Path) -> None:
    out = tmp_path / "cache"
    assert main(["cache", *config, "--out", str(out)]) == 0
    index = FeatureIndex.read(out / "index.json")
    assert index.contract.layers == (2, 3, 4) and len(index.shards) > 1
    fit = [
        "fit",
        *config[:2],
        "--trainer.limit_val_batches",
        "1",
        "--acceptance.max_new_tokens",
        "8",
    ]
    cached = ["--model.features", "Cached", "--model.features.directory", str(out)]
    assert main([*fit, "--model.features.rows", "1", "--out", str(tmp_path / "fly")]) == 0
    assert main([*fit, *cached, "--out", str(tmp_path / "cached")]) == 0
    assert (
        losses(tmp_path / "fly") == losses(tmp_path / "cached")
        and len(losses(tmp_path / "fly")) == 4
    )
    before = {path: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    assert main(["cache", *config, "--out", str(out)]) == 0  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in out.glob("shard-*")} == before


@pytest.mark.slow
def test_a_cache_may_hold_the_rows_that_a_run_draws(
    config: list[str], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(text_file.read_text()[:200].upper())
    config = [*config, "--data.val", str(held_out)]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert main(["cache", *config, "--first_rows", str(10**6), "--out", str(whole)]) == 0
    assert main(["cache", *config, "--first_rows", "8", "--out", str(part)]) == 0
    all_rows, some = (FeatureIndex.read(out / "index.json") for out in (whole, part))
    assert all_rows.contract.first_rows is None and some.contract.first_rows == 8
    drawn = 8 + sum(entry.rows for entry in all_rows.shards) - trained_rows(config)
    assert sum(entry.rows for entry in some.shards) == drawn
    fit = [
        "fit",
        *config[:2],
        *config[-2:],
        "--model.features",
        "Cached",
        "--model.features.directory",
    ]
    sought: list[FeatureStore] = []  # for a row that is not there, as the one after the last step
    monkeypatch.setattr(FeatureStore, "verify", lambda store: sought.append(store))
    for out in (whole, part):  # 4 steps of 2 rows
        assert main([*fit, str(out), "--out", str(tmp_path / f"run-{out.name}")]) == 0
    assert not sought
    assert losses(tmp_path / "run-whole") == losses(tmp_path / "run-part")
    capsys.readouterr()
    epochs = ["--trainer.max_steps", "-1", "--trainer.max_epochs", "1"]
    for more, hint in (
        (["--trainer.max_steps", "5"], "--first_rows 10"),
        (epochs, "--first_rows "),
    ):
        assert main([*fit, str(part), *more, "--out", str(tmp_path / "more")]) == 2
        said = capsys.readouterr().err
        assert (
            "has the first 8 training rows alone, fewer than this run draws" in said
            and hint in said
        )
    assert main([*fit, str(part), "--data.seed", "1", "--out", str(tmp_path / "seed")]) == 2
    said = capsys.readouterr().err
    assert "seed was 0, is 1; of training the first 8 rows alone" in said


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_cache_of_no_rows_is_refused(
    config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], count: str
) -> None:
    assert main(["cache", *config, "--first_rows", count, "--out", str(tmp_path / "cache")]) == 2
    assert "--first_rows must be at least 1" in capsys.readouterr().err


def test_a_cache_of_few_validation_rows_serves_no_run_that_reads_more(
    config: list[str], target_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(text_file.read_text().upper())
    config = [*config, "--data.val", str(held_out)]
    out = tmp_path / "cache"
    assert (
        main(["cache", *config, "--first_rows", "8", "--first_val_rows", "2", "--out", str(out)])
        == 0
    )
    index = FeatureIndex.read(out / "index.json")
    assert index.contract.first_val_rows == 2
    assert sum(entry.rows for entry in index.shards) == 8 + 2

    def fit(batch_size: int, limit: int | float) -> None:
        module = DrafterModule(
            target=str(target_directory),
            drafter=DrafterSpec(draft_vocab_size=200),
            ttt_steps=2,
            features=Cached(str(out)),
        )
        data = TextData(str(text_file), val=str(held_out), seq_len=32, batch_size=batch_size)
        pl.Trainer(
            max_steps=2, limit_val_batches=limit, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, datamodule=data)  # fmt: skip

    fit(batch_size=2, limit=1)
    refused = r"the first 2 validation rows alone, fewer .* --first_val_rows (\d+), into another"
    for batch_size, limit, needed in ((2, 2, "4"), (4, 1, "4"), (2, 1.0, "\\d\\d+")):
        with pytest.raises(ValueError, match=refused.replace(r"\d+", needed)):
            fit(batch_size, limit)


@pytest.mark.slow
def test_a_cache_holds_the_rows_that_a_mix_draws_first(
    config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = yaml.safe_load((tmp_path / "run.yaml").read_text())
    sources = []
    for name, count, weight in (("many", 60, 1.0), ("few", 3, 9.0)):  # the few come again and again
        path = tmp_path / f"{name}.txt"
        path.write_text(
            "".join(f"def {name}_{n}(a, b):\n    return a + {n}\n" for n in range(count))
        )
        sources.append({"name": name, "source": str(path), "weight": weight})
    said["data"]["init_args"]["train"] = sources
    said["model"]["features"] = {"class_path": "OnTheFly", "init_args": {"rows": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(said))
    out = tmp_path / "cache"
    assert main(["cache", *config, "--first_rows", "8", "--out", str(out)]) == 0
    fit = ["fit", *config]
    cached = ["--model.features", "Cached", "--model.features.directory", str(out)]
    assert main([*fit, "--out", str(tmp_path / "fly")]) == 0
    assert main([*fit, *cached, "--out", str(tmp_path / "cached")]) == 0
    assert (
        losses(tmp_path / "fly") == losses(tmp_path / "cached")
        and len(losses(tmp_path / "fly")) == 4
    )
    sources[1]["weight"] = 1.0
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(said))
    capsys.readouterr()
    assert main([*fit, *cached, "--out", str(tmp_path / "other")]) == 2
    assert "the cache was made from other data (train was" in capsys.readouterr().err


def status(argv: list[str]) -> object:
    """The exit status, however it is given."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


def trained_rows(config: list[str]) -> int:
    """Rows of training that a config's data has."""
    _, model, data = parse_options([*config, "--out", "nowhere"])
    data.prepare(model.target.tokenizer)
    return len(data.splits.train.ids_BT)


def test_rows_may_be_read_together(
    config: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five in a forward; the same rows, whose states are equal but for rounding."""
    at_once: list[int] = []
    forward = Target.forward

    def spy(self: Target, ids_BT: torch.Tensor, *more: Any, **options: Any) -> Any:
        at_once.append(len(ids_BT))
        return forward(self, ids_BT, *more, **options)

    alone, together = tmp_path / "alone", tmp_path / "together"
    assert main(["cache", *config, "--out", str(alone)]) == 0
    monkeypatch.setattr(Target, "forward", spy)
    assert main(["cache", *config, "--rows", "5", "--out", str(together)]) == 0
    assert max(at_once) == 5
    one, other = {}, {}
    for folder, found in ((alone, one), (together, other)):
        for shard in map(load_file, folder.glob("shard-*")):
            states = shard["final_PH"].split(shard["sizes_E"].tolist())
            found |= dict(zip(map(bytes, shard["keys"].numpy()), states, strict=True))
    torch.testing.assert_close(other, one)
    assert main(["cache", *config, "--rows", "0", "--out", str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_parts_make_one_cache(config: list[str], tmp_path: Path) -> None:
    """Whichever ends last; with every row, and the numbers of a whole cache."""
    whole, out = tmp_path / "whole", tmp_path / "parts"
    assert main(["cache", *config, "--out", str(whole)]) == 0
    for part in ("3/3", "1/3"):
        assert main(["cache", *config, "--out", str(out), "--part", part]) == 0
        with pytest.raises(
            ValueError,
            match="not all parts of the cache are finished: run specdec cache for the others",
        ):
            FeatureStore(out, {})
    assert main(["cache", *config, "--out", str(out), "--part", "2/3"]) == 0
    one, other = FeatureStore(whole, {}), FeatureStore(out, {})
    other.verify()
    assert len({entry.file.partition("/")[0] for entry in other.entries}) == 3
    _, model, data = parse_options([*config, "--out", "unused"])
    data.prepare(model.target.tokenizer)
    rows = [*extract.stored_rows(data)]
    assert len(rows) == sum(entry.rows for entry in other.entries) > 6
    for row in rows:
        found = [[torch.zeros(row.tokens, 3, 32), torch.zeros(row.tokens, 32)] for _ in range(2)]
        for store, states in zip((one, other), found, strict=True):
            store.read(row, range(3), *states)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_parts_are_of_one_cache(config: list[str], tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "parts"
    assert main(["cache", *config, "--out", str(whole)]) == 0
    assert main(["cache", *config, "--out", str(out), "--part", "1/2"]) == 0
    for argv, message in (
        (
            ["--out", str(whole), "--part", "1/2"],
            "holds shard-.*, of a cache that was made otherwise",
        ),
        (["--out", str(out)], "holds part-1-of-2, of a cache that was made otherwise"),
        (
            ["--out", str(out), "--part", "1/3"],
            "holds part-1-of-2, of a cache that was made otherwise",
        ),
        (
            ["--out", str(out), "--part", "2/2", "--dtype", "float16"],
            "part-1-of-2 was made for something else: dtype was",
        ),
        (
            ["--out", str(tmp_path / "x"), "--part", "999/999"],
            "there are no more than 998 rows: make fewer parts",
        ),
        (
            ["--out", str(tmp_path / "x"), "--model.target.parts", "true"],
            "specdec cache runs the target's layers",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            cache([*config, *argv])


@pytest.mark.parametrize("given", ["0/2", "3/2", "2", "a/b"])
def test_a_part_that_is_none(given: str, config: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"'{given}' is no part: give it as 2/8"):
        cache([*config, "--out", str(tmp_path / "x"), "--part", given])


def test_further_boundaries_are_stored(config: list[str], tmp_path: Path) -> None:
    out = tmp_path / "cache"
    assert main(["cache", *config, "--layers", "6", "1", "--out", str(out)]) == 0
    assert FeatureIndex.read(out / "index.json").contract.layers == (1, 2, 3, 4, 6)


def test_a_disk_that_cannot_hold_it(
    config: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(extract.shutil, "disk_usage", lambda path: _Usage(free=1000))
    assert main(["cache", *config, "--out", str(tmp_path / "cache")]) == 2
    assert "the disk cannot hold it" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layers", "9"], "no layer boundary 9"),
        (["--dtype", "int8"], "dtype"),
        (["--engine", "other"], "engine"),
        (["--model.drafter.fusion", "os.system"], "was not imported"),
        (["--vllm_args", "{tensor_parallel_size: 2}"], "--vllm_args needs --engine vllm"),
    ],
)
def test_wrong_arguments_are_one_line(
    args: list[str],
    message: str,
    config: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(["cache", *config, "--out", str(tmp_path / "cache"), *args]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error and error.startswith("specdec cache: error: ")


def test_the_target_may_be_named_as_in_other_commands(
    config: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["cache", *config, "--target", str(tmp_path / "none"), "--out", str(tmp_path / "cache")]
        )
        == 2
    )
    assert f"{tmp_path / 'none'}: no such directory" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(
    config: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL as soon as there are some shards, several times."""
    whole, out = tmp_path / "whole", tmp_path / "cache"
    assert cache([*config, "--out", str(whole)]) == 0
    states = TransformersEngine.states

    def slowly(self: Any, rows: Any) -> Any:
        for found in states(self, rows):
            time.sleep(0.02)
            yield found

    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "states", slowly)
        for kill in (1, 3, 4):
            process = multiprocessing.get_context("fork").Process(
                target=cache, args=([*config, "--out", str(out)],)
            )
            process.start()
            end = time.monotonic() + 100
            while len(list(out.glob("shard-*"))) < kill:
                assert time.monotonic() < end and process.is_alive()
                time.sleep(0.002)
            process.kill()
            process.join()
            assert not (out / "index.json").exists()
    assert cache([*config, "--out", str(out)]) == 0
    assert same(out, whole) and len(list(out.glob("shard-*"))) > 5
