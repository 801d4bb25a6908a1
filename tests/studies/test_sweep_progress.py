"""What a sweep shows of the jobs that run."""

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from specdec.studies import sweep_progress
from specdec.studies.sweep_progress import SweepProgress, last_printed

HEADLINE = "study tiny: 1 of 9 jobs done; time: about 25 min for 8 jobs left"


@pytest.fixture
def running(tmp_path: Path) -> dict[str, Path]:
    """One job that has printed lines, one that has not."""
    path = tmp_path / "log.txt"
    path.write_text(
        "--- attempt 1, 2026-11-01: specdec fit\nstep 10/320, 2:58 left\nstep 20/320, 2:52 left\n\n"
    )
    return {"K=1 seed=0: fit": path, "K=2 seed=0: fit": tmp_path / "none.txt"}


def test_a_terminal_shows_the_last_printed_of_every_running_job(running: dict[str, Path]) -> None:
    stream = io.StringIO()
    with SweepProgress(Console(file=stream, force_terminal=True, width=100)) as progress:
        progress.show(HEADLINE, running)
    text = stream.getvalue()
    assert HEADLINE in text and "K=1 seed=0: fit: step 20/320, 2:52 left" in text
    assert "K=2 seed=0: fit: starting" in text and "step 10/320" not in text


def test_elsewhere_lines_come_now_and_then_and_none_twice(
    running: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "specdec")
    monkeypatch.setattr(sweep_progress, "FIRST", 0.0)
    stream = io.StringIO()
    with SweepProgress(Console(file=stream)) as progress:
        progress.show(HEADLINE, running)
        running["K=2 seed=0: fit"].write_text("reading the data\n")
        progress.show(HEADLINE, running)
    assert caplog.messages == [
        HEADLINE,
        "  K=1 seed=0: fit: step 20/320, 2:52 left",
        "  K=2 seed=0: fit: starting",
        HEADLINE,
        "  K=2 seed=0: fit: reading the data",
    ]
    assert not stream.getvalue()


def test_no_line_comes_before_its_time(
    running: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specdec")
    with SweepProgress(Console(file=io.StringIO())) as progress:
        progress.show(HEADLINE, running)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("", "starting"),
        ("--- attempt 2, now: specdec fit\n", "starting"),
        ("one\rtwo", "two"),
        ("x" * 9000 + "\nlast\n", "last"),
        ("a\x1b[31mred\x1b[0m\n", "ared"),
    ],
)
def test_the_last_printed_of_a_log(written: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(written)
    assert last_printed(tmp_path / "log.txt") == shown
