"""Rates under a clock that only moves when the test says so."""

import logging
import mmap
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from specdec.data import Batch
from specdec.training import throughput
from specdec.training.throughput import Counted, PeakMemory, Throughput
from specdec.training.work import Peak, Work

B, T = 2, 8
STEP, FETCH, VALIDATION, CHECKPOINT, COMPILATION = 1.0, 0.25, 100.0, 50.0, 1000.0
PEAK = Peak(1e4, "a test")


class Clock:
    def __init__(self) -> None:
        self.now = 17.0

    def __call__(self) -> float:
        return self.now


class Batches(Dataset[Batch]):
    """Rows whose last three tokens are answers; each batch takes a while to come."""

    def __init__(self, clock: Clock, sizes: list[int]) -> None:
        self.clock, self.sizes = clock, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Batch:
        self.clock.now += FETCH
        rows = self.sizes[index]
        mask = torch.zeros(rows, T, dtype=torch.bool)
        mask[:, -3:] = True
        return Batch(torch.zeros(rows, T, dtype=torch.int64), mask, torch.zeros(rows, T, dtype=torch.int64))


class Trained(pl.LightningModule):
    ttt_steps = 2

    def __init__(self, clock: Clock, sizes: list[int], compilation: float = COMPILATION) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.clock, self.sizes, self.compilation = clock, sizes, compilation
        self.reports: dict[int, dict[str, float]] = {}

    def train_dataloader(self) -> Any:
        return DataLoader(Batches(self.clock, self.sizes), batch_size=None)

    def val_dataloader(self) -> Any:
        return DataLoader(Batches(self.clock, [B]), batch_size=None)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.clock.now += STEP + (self.compilation if batch_idx < 2 else 0)
        return self.weight * batch.ids_BT.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.clock.now += VALIDATION

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        self.reports[self.trainer.global_step] = dict(dictionary)
        super().log_dict(dictionary, *args, **kwargs)


class Working(Trained):
    def work(self, B: int, T: int, kept: int, rows: int, teacher_rows: int) -> Work:
        return Work(target=100 * B * T, teacher=7 * teacher_rows, fuse=0, unroll=5 * kept, head=3 * rows, backward=0)


class SlowFiles(TorchCheckpointIO):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self.clock.now += CHECKPOINT


def fit(
    module: Trained,
    callbacks: list[pl.Callback],
    late: list[pl.Callback] | None = None,
    plugins: Any = None,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> dict[int, dict[str, float]]:
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "callbacks": callbacks,
            "max_steps": 8,
            "log_every_n_steps": 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
            "logger": False,
            "limit_val_batches": 0,
            "plugins": plugins,
            **kwargs,
        }
    )
    trainer.callbacks += late or []
    trainer.fit(module, ckpt_path=ckpt_path)
    return module.reports


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(throughput, "peak", lambda device, dtype: PEAK)
    return Clock()


def check_plain(report: dict[str, float], B: int = B) -> None:
    """The rates of steps that nothing disturbs."""
    each = STEP + FETCH
    assert report["speed/tokens_per_second"] == pytest.approx(B * T / each)
    assert report["speed/supervised_tokens_per_second"] == pytest.approx(B * 3 / each)
    assert report["speed/step_seconds"] == pytest.approx(each)


def test_rates_of_whole_steps(clock: Clock) -> None:
    reports = fit(Trained(clock, [B] * 8), [Throughput(clock=clock)])
    assert sorted(reports) == [4, 6, 8]  # the first two steps compile
    for report in reports.values():
        check_plain(report)
        assert report["speed/data_wait_share"] == pytest.approx(FETCH / (STEP + FETCH))
        assert report["memory/peak_mb"] > 10 and "speed/mfu" not in report


def test_without_skipping_compilation_counts(clock: Clock) -> None:
    reports = fit(Trained(clock, [B] * 8), [Throughput(skip=0, clock=clock)])
    assert sorted(reports) == [2, 4, 6, 8]
    assert reports[2]["speed/step_seconds"] > COMPILATION / 2
    check_plain(reports[4])


def test_skipping_ends_inside_an_interval(clock: Clock) -> None:
    reports = fit(Trained(clock, [B] * 8), [Throughput(skip=3, clock=clock)])
    assert sorted(reports) == [4, 6, 8]
    for report in reports.values():
        check_plain(report)


def test_batches_of_several_sizes(clock: Clock) -> None:
    reports = fit(Working(clock, [B, B, B, 5, B, B, B, B]), [Throughput(clock=clock)])
    each = STEP + FETCH
    assert reports[4]["speed/tokens_per_second"] == pytest.approx((B + 5) * T / (2 * each))
    rows = B + 5  # two pairs of answers each: two rows at both steps of the unroll, taught at two positions
    flops = 100 * rows * T + 7 * 2 * rows + 3 * 4 * rows + 5 * 3 * rows
    assert reports[4]["speed/mfu"] == pytest.approx(flops / (2 * each) / PEAK.flops)
    check_plain(reports[6])
    assert reports[6]["speed/mfu"] == pytest.approx((100 * B * T + 41 * B) / each / PEAK.flops)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_validation_does_not_count(clock: Clock, every: int) -> None:
    reports = fit(
        Trained(clock, [B] * 8), [Throughput(clock=clock)], limit_val_batches=1, val_check_interval=every,
        num_sanity_val_steps=1,
    )  # fmt: skip
    assert sorted(reports) == [4, 6, 8]
    for step, report in reports.items():
        seconds = report["speed/step_seconds"]  # after a validation the next batch is not waited for on the clock
        assert 2 * STEP <= 2 * seconds <= 2 * (STEP + FETCH), step
    if every == 2:
        waited = reports[6]["speed/data_wait_share"]
        assert waited == pytest.approx(FETCH / (2 * STEP + FETCH))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_checkpoints_do_not_count(clock: Clock, tmp_path: Path, every: int, late: bool) -> None:
    """Whether the callback comes before the one that writes, as Lightning sorts them, or after it."""
    writer = ModelCheckpoint(tmp_path, every_n_train_steps=every, save_top_k=-1)
    own: list[pl.Callback] = [Throughput(clock=clock)]
    reports = fit(
        Trained(clock, [B] * 8), [writer, *([] if late else own)], own if late else None, SlowFiles(clock)
    )  # fmt: skip
    assert len(list(tmp_path.glob("*.ckpt"))) == 8 // every and sorted(reports) == [4, 6, 8]
    for report in reports.values():
        assert 2 * STEP <= 2 * report["speed/step_seconds"] <= 2 * (STEP + FETCH)
        assert report["speed/data_wait_share"] <= FETCH / (STEP + FETCH) + 1e-9


def test_accumulated_batches_make_one_step(clock: Clock) -> None:
    reports = fit(Trained(clock, [B] * 24, 0.0), [Throughput(clock=clock)], accumulate_grad_batches=3)
    assert sorted(reports) == [4, 6, 8]
    for report in reports.values():
        assert report["speed/step_seconds"] == pytest.approx(3 * (STEP + FETCH))
        assert report["speed/tokens_per_second"] == pytest.approx(B * T / (STEP + FETCH))


@pytest.mark.filterwarnings("ignore:Be aware that when using")  # the writer is gone
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_resumed_run_starts_anew(clock: Clock, tmp_path: Path) -> None:
    writer = ModelCheckpoint(tmp_path, filename="five", every_n_train_steps=5, save_top_k=-1)
    fit(Trained(clock, [B] * 8), [writer, Throughput(clock=clock)])
    state = torch.load(tmp_path / "five.ckpt", weights_only=True)
    assert not any("Throughput" in name for name in state["callbacks"])
    clock.now = 0.0
    module = Trained(clock, [B] * 20)
    reports = fit(module, [Throughput(clock=clock)], ckpt_path=tmp_path / "five.ckpt", max_steps=10)
    assert sorted(reports) == [8, 10]  # steps 6 and 7 compile
    for report in reports.values():
        check_plain(report)


def test_loggers_get_the_figures(clock: Clock, tmp_path: Path) -> None:
    fit(Working(clock, [B] * 8), [Throughput(clock=clock)], logger=CSVLogger(tmp_path, name="", version=""))
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    values = [row[rows[0].index("speed/step_seconds")] for row in rows[1:]]
    assert [float(value) for value in values if value] == [pytest.approx(STEP + FETCH)] * 3
    assert {"speed/mfu", "memory/peak_mb", "speed/data_wait_share"} <= set(rows[0])


def test_it_says_what_utilisation_and_memory_are(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=throughput.__name__):
        fit(Working(clock, [B] * 8), [Throughput(clock=clock)])
        fit(Trained(clock, [B] * 8), [Throughput(clock=clock)])
    with_mfu, without = (r.getMessage() for r in caplog.records if r.name == throughput.__name__)
    assert without.startswith("memory/peak_mb: resident set, most since the ")
    assert with_mfu == f"{without}; speed/mfu: of 1e-08 TFLOP/s, a test"
    assert isinstance(Working(clock, []), Counted) and not isinstance(Trained(clock, []), Counted)


def test_several_ranks(clock: Clock) -> None:
    """Two ranks, the other one with twice the figures: sums of tokens, the mean of times, the greatest memory."""
    callback, module = Throughput(clock=clock), Working(clock, [])
    reduced = {"sum": lambda own: 3 * own, "max": lambda own: 2 * own}
    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda own, reduce_op: reduced[reduce_op](own))
    trainer: Any = SimpleNamespace(
        global_step=0, log_every_n_steps=1, world_size=1, precision="32-true", strategy=strategy, sanity_checking=False
    )
    found: list[dict[str, float]] = []
    module.log_dict = lambda figures, **_: found.append(figures)  # type: ignore[method-assign]
    for ranks in (1, 2):
        trainer.world_size, trainer.global_step = ranks, 0
        callback.skip = 0
        callback.on_train_start(trainer, module)
        callback.memory = SimpleNamespace(read=lambda: 5e6)  # type: ignore[assignment]
        callback._ended = clock.now
        for batch in [Batches(clock, [B])[0]]:
            callback.on_train_batch_start(trainer, module, batch, 0)
            clock.now += STEP
            trainer.global_step = 1
            callback.on_train_batch_end(trainer, module, None, batch, 0)
    one, two = found
    assert one["memory/peak_mb"] == 5 and two["memory/peak_mb"] == 10
    assert two["speed/tokens_per_second"] == pytest.approx(2 * one["speed/tokens_per_second"])
    assert two["speed/step_seconds"] == pytest.approx(1.5 * one["speed/step_seconds"])
    for name in ("speed/mfu", "speed/data_wait_share"):
        assert two[name] == pytest.approx(one[name])


def test_peak_memory_since_the_last_reading() -> None:
    memory = PeakMemory(torch.device("cpu"))
    if "last report" not in memory.source:
        pytest.skip("this system does not let a process reset its high-water mark")
    before = memory.read()
    with mmap.mmap(-1, 100_000_000) as block:  # not the allocator's, which may keep what is freed
        block.write(b"1" * 100_000_000)
        during = memory.read()
    memory.read()
    after = memory.read()
    assert during - before > 80e6 and during - after > 80e6


def test_peak_memory_where_it_cannot_be_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    2000 kB\n")
    (tmp_path / "clear_refs").mkdir()  # writing to it fails
    memory = PeakMemory(torch.device("cpu"), tmp_path)
    assert memory.source == "resident set, most since the process began"
    assert memory.read() == 2000 * 1024
    elsewhere = PeakMemory(torch.device("cpu"), tmp_path / "none")
    assert elsewhere.source == "resident set, most since the process began"
    monkeypatch.setattr(throughput.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3000))
    for platform, size in (("linux", 3000 * 1024), ("darwin", 3000)):
        monkeypatch.setattr(throughput.sys, "platform", platform)
        assert elsewhere.read() == size
    assert resource.RUSAGE_SELF == throughput.resource.RUSAGE_SELF


def test_peak_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[Any] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    memory = PeakMemory(torch.device("cuda"))
    assert memory.source.startswith("allocated on the GPU") and memory.read() == 123 and len(resets) == 1
