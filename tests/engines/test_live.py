"""``specdec live``: two servers compared over the same time."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from specdec.cli import main
from specdec.engines.live import PairedWindows, comparison, widest
from specdec.engines.scrape import Counters
from specdec.report.statistics import less
from tests.engines.test_watch import BAD, Server, running

Served = tuple[Server, Server]


@pytest.fixture
def servers() -> Iterator[Served]:
    with ExitStack() as stack:
        yield stack.enter_context(running()), stack.enter_context(running())


def counters(passes: float, accepted: float) -> Counters:
    return Counters("vLLM", passes, accepted, ())


def test_both_are_counted_over_the_same_time(
    servers: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    b.shares = BAD
    assert main(["live", a.url, b.url, "--every", "0.01", "--passes", "2000"]) == 0
    text = capsys.readouterr().out
    assert f"A  {a.url}\nB  {b.url}\n" in text
    assert "A 2.80, B 1.06 tokens per pass; 2,000 of 2,000 passes" in text
    assert "acceptance length  A 2.800, B 1.056; 2,000 and 2,000 passes" in text
    assert "by position, %     A 90 60 30, B 5 1 0" in text
    assert "B - A              -1.744 [-1.744, -1.744]" in text


def test_a_restarted_server_ends_the_comparison(
    servers: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    b.swap = 12
    assert main(["live", a.url, b.url, "--every", "0.01", "--passes", "5000"]) == 0
    text = capsys.readouterr().out
    assert "a server was restarted, and its drafter may be another" in text
    assert "2,500 and 2,500 passes" in text


def test_a_server_that_is_away_for_a_moment_is_asked_again(
    servers: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    b.bare = 4
    assert main(["live", a.url, b.url, "--every", "0.01", "--passes", "2000"]) == 0
    text = capsys.readouterr().out
    assert "no counters of speculative decoding" in text and "2,000 of 2,000 passes" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--passes", "1000"], "less than 8 windows of --window 250"),
        (["--seconds", "0.1", "--every", "0.05"], "an interval takes at least 8"),
    ],
)
def test_mistakes_are_one_line(
    servers: Served, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    assert main(["live", a.url, b.url, *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_window_ends_when_both_servers_have_its_passes() -> None:
    watched = PairedWindows(100, (counters(10, 5), counters(0, 0)))
    assert not watched.look((counters(210, 105), counters(99, 0)))
    assert watched.look((counters(310, 155), counters(150, 30)))
    assert watched.windows == [(counters(300, 150), counters(150, 30))]
    assert not watched.look((counters(310, 155), counters(150, 30)))
    assert watched.passes == (300, 150)


def test_an_hour_that_is_hard_for_both_leaves_the_difference_alone() -> None:
    """The difference is of windows of the same time: what both have in common is no error."""
    random = np.random.default_rng(0)
    common = random.normal(400, 60, 40)
    own = random.normal(0, 4, (40, 2))
    pairs = [
        (counters(250, hour + noise[0]), counters(250, hour - 20 + noise[1]))
        for hour, noise in zip(common, own, strict=True)
    ]
    assert "B - A              -0.0" in comparison(pairs)
    sums = np.array([(250 + b.accepted, 250, 250 + a.accepted, 250) for a, b in pairs])
    figure = widest(sums, less)
    assert figure.low is not None and figure.high is not None
    assert figure.high - figure.low < 0.02 and figure.high < -0.06


@pytest.mark.parametrize("persistence", [0.0, 0.5])
def test_equal_servers_seldom_seem_to_differ(persistence: float) -> None:
    """Also where neighboring windows are alike, as of answers that span them: with single windows 27 % would miss."""
    random = np.random.default_rng(1)
    passes = np.full(80, 250.0)
    misses = 0
    for _ in range(600):
        noise = random.normal(0, 25, (2, 80))
        for window in range(1, 80):
            noise[:, window] += persistence * noise[:, window - 1]
        a, b = 300 + noise
        figure = widest(np.stack([passes + b, passes, passes + a, passes], axis=1), less)
        assert figure.low is not None and figure.high is not None
        misses += not figure.low <= 0 <= figure.high
    assert misses / 600 < 0.08
