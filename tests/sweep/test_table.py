"""What is seen of a sweep."""

import io
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from specdec.sweep.following import Far, Follower
from specdec.sweep.job import Job
from specdec.sweep.local import Local
from specdec.sweep.run import Entry, Phase, run
from specdec.sweep.state import Folder
from specdec.sweep.table import Shown
from tests.sweep.conftest import WAY

Make = Callable[..., Job]


def test_how_far_a_log_says_a_command_is(tmp_path: Path) -> None:
    log, now = tmp_path / "log", [100.0]
    follower = Follower(log, lambda: now[0])
    assert follower.look() is None
    log.write_text("x" * 9000 + "\nstep 10/40, train_loss 4.2, mfu 38 %, 0:30 left\n")
    assert follower.look() == Far(10, 40, "steps", None)
    now[0] = 110.0
    log.write_text(log.read_text() + "step 30/40, train_loss 4.2, mfu 38 %\n")
    far = follower.look()
    assert far == Far(30, 40, "steps", 2.0) and far.seconds_left == 5.0
    now[0] = 115.0
    assert follower.look() == far  # nothing new is said
    log.write_text(log.read_text() + "--- attempt 2, now, here: specdec fit\n")
    assert follower.look() is None
    log.write_text(log.read_text() + "step 21/40\n")
    assert follower.look() == Far(21, 40, "steps", None)
    log.write_text("features: 12.5 % of 8,000 tokens, 200 a second, 35 s left\n")
    assert follower.look() == Far(12.5, 100, "%", None)


@pytest.fixture
def entries(study: Path, job: Make, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Two runs done, one that trains, one that failed, one that somebody else has, one whose turn comes."""

    monkeypatch.setattr("specdec.sweep.table.time", SimpleNamespace(monotonic=lambda: 1000.0))

    def entry(arm: str, seed: int, kind: str, phase: Phase, took: float | None = None, message: str = "") -> Entry:
        one = job(f"{arm}-{seed}-{kind}", label=f"fc_norm={arm} seed={seed}: {kind}", kind=kind)
        return Entry(one, Folder.of(study, one), phase, message, 980.0, took=took)

    took = {"fit": 40.0, "evaluate": 9.0}
    out = [
        *(entry("off", seed, kind, Phase.DONE, took[kind]) for seed in (0, 1) for kind in took),
        entry("off", 2, "fit", Phase.FAILED, 3, "specdec fit: error: the data is wrong"),
        entry("off", 2, "evaluate", Phase.NOT_RUN),
        entry("on", 0, "fit", Phase.RUNNING),
        entry("on", 0, "evaluate", Phase.WAITING),
        entry("on", 1, "fit", Phase.ELSEWHERE),
        entry("on", 2, "drift", Phase.WAITING),
    ]  # fmt: skip
    (out[6].folder.log).write_text("step 15/60, train_loss 4.2\n")
    return out


def text(shown: Shown, entries: list[Entry], height: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), width=110, height=height)
    shown.console = console
    console.print(shown.picture(entries))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_row_for_every_run_those_that_matter_first(entries: list[Entry]) -> None:
    shown = Shown(Console(file=io.StringIO()))
    lines = text(shown, entries)
    assert lines[0].split() == ["arm", "seed", "job", "state", "done", "rate", "elapsed", "left"]
    assert lines[1].split()[:3] == ["fc_norm=off", "2", "fit"]
    assert lines[-2] == "fc_norm=off seed=2: fit: specdec fit: error: the data is wrong"
    assert lines[2].split() == ["fc_norm=on", "0", "fit", "running", "15/60", "0:00:20", "0:00:20"]
    assert [line.split()[3] for line in lines[3:7]] == ["elsewhere", "waiting", "done", "done"]
    # 20 and 40 s of fits, 9 of an evaluation; a drift was never measured
    assert lines[-1] == "4 of 10 jobs done, 1 failed, 1 not run, 4 left, at least 0:01:09 more"
    entries.pop()
    shown.watch(entries, True)
    assert shown.eta(entries) == (pytest.approx(69), True)
    shown._at_once = 2
    assert shown.eta(entries)[0] == pytest.approx(40)  # the longest
    small = text(shown, entries, height=7)
    assert small[-3] == "and 3 more runs" and len(small) == 6


def test_a_live_table_on_a_terminal(entries: list[Entry]) -> None:
    console = Console(file=io.StringIO(), width=110, height=30, force_terminal=True)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    before = handler.stream
    try:
        with Shown(console) as shown:
            shown.watch(entries, False)
            assert handler.stream is not before  # above the table
            once = console.file.getvalue()
            shown.watch(entries, False)
            assert console.file.getvalue() == once  # two seconds have not passed
            shown.watch(entries, True)
            assert len(console.file.getvalue()) > len(once)
        assert type(handler.stream) is type(before)
    finally:
        logging.getLogger().removeHandler(handler)


def test_lines_where_there_is_no_terminal(study: Path, job: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specdec.sweep")
    jobs = [job("a"), job("b", "fail"), job("c", needs=("b",))]
    with Shown(Console(file=io.StringIO())) as shown:
        run(study, jobs, Local(workers=1), way=WAY, watch=shown.watch)
    said = caplog.messages
    assert said[0].startswith("3 jobs, 0 of them done, on this machine, ")
    assert said[1] == "arm=a seed=0: fit: begins" and said[2].startswith("arm=a seed=0: fit: done: 0:0")
    assert any("b seed=0: fit: failed: " in line and "the data is wrong" in line for line in said)
    assert "c seed=0: fit: not run: needs arm=b seed=0: fit, which failed" in said[-1]
    assert said[-1].endswith("(1 of 3 jobs done, 1 failed, 1 not run)")
