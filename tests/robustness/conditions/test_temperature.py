"""At a temperature."""

import pytest

from specdec.decoding import Sampling
from specdec.robustness.conditions.temperature import Temperature
from tests.robustness.made import CHAT, Pair, asked, clean, setting


def test_only_the_temperature_changes(chat: Pair) -> None:
    assert Temperature(0.6).sampling(Sampling(seed=3)) == Sampling(temperature=0.6, seed=3)
    found = setting(chat.target, [CHAT])
    assert asked(Temperature(0.6), CHAT, found) == clean(CHAT, found)
    assert Temperature(1.0).drafter(chat.drafter, 0) is chat.drafter


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_zero_is_the_clean_run(value: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        Temperature(value)
