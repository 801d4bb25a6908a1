"""With noise on the drafter's hidden input."""

import pytest

from specdec.robustness.conditions.noise_hidden import NoiseHidden
from specdec.robustness.noise import NoisyHidden
from tests.robustness.made import CHAT, Pair, asked, clean, setting


def test_only_the_drafter_changes(chat: Pair) -> None:
    found = setting(chat.target, [CHAT])
    assert asked(NoiseHidden(0.5), CHAT, found) == clean(CHAT, found)
    noisy = NoiseHidden(0.5).drafter(chat.drafter, 7)
    assert isinstance(noisy, NoisyHidden) and (noisy.alpha, noisy.seed) == (0.5, 7)
    assert [one.title for one in NoiseHidden.usual()] == ["hidden + 0.1 RMS", "hidden + 0.5 RMS", "hidden + 1 RMS"]


@pytest.mark.parametrize("alpha", [-0.1, float("inf"), float("nan")])
def test_a_strength_that_is_none(alpha: float) -> None:
    with pytest.raises(ValueError, match="noise_hidden: alpha"):
        NoiseHidden(alpha)
