"""What is told of long work, on a terminal and elsewhere."""

import io
import logging

import pytest

from specdec.utils import progress as module
from specdec.utils.progress import progress


class Clock:
    """A second whenever it is read."""

    now = 0.0

    def perf_counter(self) -> float:
        """Seconds."""
        self.now += 1
        return self.now


def test_elsewhere_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    monkeypatch.setattr(module, "time", Clock())
    with progress("tokenizing", "conversation", 1140, done=40) as advance:
        for n in range(16):
            advance(1, "the first file" if n == 5 else "")
    assert [record.getMessage() for record in caplog.records] == [
        "tokenizing: 1,140 conversations, 40 of them done",
        "tokenizing: 45 of 1,140 conversations",  # too few for a rate
        "tokenizing, the first file: 54 of 1,140 conversations, 1.0 a second, 18 min left",
    ]
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    out, console = io.StringIO(), module.Console
    monkeypatch.setattr(
        module, "Console", lambda stderr: console(file=out, force_terminal=True, width=100)
    )
    with progress("features", "token", 4, done=1) as advance:
        advance(2, "shard 2")
    assert "features, shard 2" in out.getvalue() and "3/4" in out.getvalue()
    assert not caplog.records
