"""``specdec live``: two servers compared over the same time."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from specdec.cli import main
from specdec.engines.live import ENGINES, NARROW, Pair, PairedWindows, comparison, widest
from specdec.engines.scrape import Counters
from specdec.report.statistics import interval, less
from tests.engines.test_watch import BAD, Server, running

Served = tuple[Server, Server]
QUICK = ["--every", "0.01", "--window", "250"]


@pytest.fixture
def servers() -> Iterator[Served]:
    with ExitStack() as stack:
        yield stack.enter_context(running()), stack.enter_context(running())


def counters(passes: float, accepted: float, engine: str = "vLLM") -> Counters:
    return Counters(engine, passes, accepted, ())


def test_both_are_counted_over_the_same_time(
    servers: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    b.shares = BAD
    assert main(["live", a.url, b.url, *QUICK, "--passes", "4000"]) == 0
    text = capsys.readouterr().out
    assert f"A  {a.url} (vLLM): 250 passes so far" in text
    assert "A 2.80, B 1.06 tokens per pass; 4,000 of 4,000 passes" in text
    assert "acceptance length  A 2.800, B 1.056; 4,000 and 4,000 passes" in text
    assert "by position of A   90 60 30 %\nby position of B   5 1 0 %\n" in text
    assert "B - A              -1.744 [-1.744, -1.744]" in text
    assert NARROW not in text and ENGINES not in text


def test_a_busy_server_ends_with_enough_windows(
    servers: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page has all of the passes that are asked for."""
    a, b = servers
    assert main(["live", a.url, b.url, "--every", "0.01", "--passes", "80", "--window", "10"]) == 0
    assert "2,000 and 2,000 passes" in capsys.readouterr().out


def test_a_restarted_server_ends_the_comparison(
    servers: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    b.swap = 12
    assert main(["live", a.url, b.url, *QUICK, "--passes", "5000"]) == 0
    text = capsys.readouterr().out
    assert "ended after 2,500 of 5,000 passes, since a server was restarted" in text
    assert "2,500 and 2,500 passes" in text and "B - A" in text


def test_a_server_that_is_away_for_a_moment_is_asked_again(
    servers: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    b.bare = 4
    assert main(["live", a.url, b.url, *QUICK, "--passes", "2000"]) == 0
    text = capsys.readouterr().out
    assert text.index("no counters of speculative") < text.index("both servers answer again")
    assert "2,000 of 2,000 passes" in text


def test_what_was_counted_is_shown_where_time_is_too_short(
    servers: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    assert main(["live", a.url, b.url, "--every", "0.05", "--seconds", "0.18"]) == 0
    text = capsys.readouterr().out
    assert "of 20,000 passes, since --seconds are over" in text
    assert (
        "acceptance length  A 2.800, B 2.800" in text and "no interval: it takes 8 windows" in text
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--passes", "1000"], "less than 8 windows of --window 500"),
        ([], "give two servers by their own addresses"),
    ],
)
def test_mistakes_are_one_line(
    servers: Served, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    assert main(["live", a.url, b.url if words else a.url, *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_window_ends_when_both_servers_have_its_passes() -> None:
    watched = PairedWindows(100, (counters(10, 5), counters(0, 0)))
    assert not watched.look((counters(210, 105), counters(99, 0)))
    assert "A has made 200 and B 99 of its 100 passes" in watched.missing()
    assert watched.look((counters(310, 155), counters(150, 30)))
    assert watched.windows == [(counters(300, 150), counters(150, 30))]
    assert not watched.look((counters(310, 155), counters(150, 30)))
    assert watched.passes == (300, 150)


def test_a_restart_within_a_window_is_seen() -> None:
    """Also if the new server has counted more by the window's end than the old one had at its begin."""
    still = counters(0, 0)
    watched = PairedWindows(250, (still, still))
    for passes in (200, 60, 300):
        watched.look((counters(1000, 500), counters(passes, 0)))
    assert watched.has_restarted and not watched.windows


def uneven(easy: float, hard: float) -> list[Pair]:
    """Two servers alike in every window; when requests are easy, A gets most of them, else B."""
    return [
        (counters(1000, 1000 * easy), counters(250, 250 * easy))
        if window % 2
        else (counters(250, 250 * hard), counters(1000, 1000 * hard))
        for window in range(32)
    ]


def test_a_split_that_follows_the_requests_makes_no_difference() -> None:
    text = comparison(uneven(easy=2.0, hard=1.0))
    assert "acceptance length  A 2.500, B 2.500" in text
    assert "B - A              +0.000 [+0.000, +0.000]" in text
    assert "B / A              1.000 [1.000, 1.000]" in text


def test_what_both_have_in_common_is_no_error() -> None:
    random = np.random.default_rng(0)
    common = random.normal(400, 60, 40)
    own = random.normal(0, 4, (40, 2))
    sums = np.full((40, 4), 250.0)
    sums[:, 0] += common - 20 + own[:, 0]
    sums[:, 2] += common + own[:, 1]
    figure = widest(sums, less).interval
    assert figure.low is not None and figure.high is not None
    assert figure.high - figure.low < 0.02 and figure.high < -0.06


def test_other_engines_and_few_windows_are_said() -> None:
    pairs = [(counters(250, 200), counters(250, 190 + window, "SGLang")) for window in range(9)]
    text = comparison(pairs)
    assert ENGINES in text and NARROW in text and "SGLang does not count it" in text
    assert "no interval: it takes 8 windows, and there are 3" in comparison(pairs[:3])


@pytest.mark.parametrize("persistence", [0.0, 0.5])
def test_equal_servers_seldom_seem_to_differ(persistence: float) -> None:
    """Also where neighboring windows are alike, as of answers that span them, where single windows mislead."""
    random = np.random.default_rng(1)
    passes = np.full(80, 250.0)
    misses = np.zeros(2)
    for _ in range(600):
        noise = random.normal(0, 25, (2, 80))
        noise[:, 0] /= np.sqrt(1 - persistence**2)
        for window in range(1, 80):
            noise[:, window] += persistence * noise[:, window - 1]
        a, b = 300 + noise
        sums = np.stack([passes + b, passes, passes + a, passes], axis=1)
        single = interval(sums, less)
        assert single is not None
        for column, figure in enumerate((widest(sums, less).interval, single)):
            assert figure.low is not None and figure.high is not None
            misses[column] += not figure.low <= 0 <= figure.high
    assert misses[0] / 600 < 0.08
    assert not persistence or misses[1] / 600 > 0.2
