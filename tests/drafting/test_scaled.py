"""Recurrences that hold the size of the state that is fed back."""

import pytest
import torch

from specdec.drafter import FixedSize, Leaky, Recurrence
from tests.tiny import HIDDEN, presets, tiny_config

GENERATOR = torch.Generator().manual_seed(0)
RAW_BTH = 7 * torch.randn(2, 3, HIDDEN, generator=GENERATOR, dtype=torch.float64)
CONFIG = tiny_config(presets()["eagle3"])


def fed_back(recurrence: Recurrence) -> torch.Tensor:
    state_BTH: torch.Tensor = recurrence.build(CONFIG)(RAW_BTH, torch.full_like(RAW_BTH, torch.nan))
    return state_BTH


@pytest.mark.parametrize("rms", [1.0, 2.5])
def test_every_token_s_state_has_the_size_and_keeps_its_direction(rms: float) -> None:
    state_BTH = fed_back(FixedSize(rms))
    sizes_BT = state_BTH.square().mean(-1).sqrt()
    torch.testing.assert_close(sizes_BT, torch.full_like(sizes_BT, rms), rtol=1e-6, atol=0)
    cosine_BT = torch.cosine_similarity(state_BTH, RAW_BTH, dim=-1)
    torch.testing.assert_close(cosine_BT, torch.ones_like(cosine_BT))


def test_a_share_of_the_raw_state_is_fed_back() -> None:
    torch.testing.assert_close(fed_back(Leaky(0.25)), 0.25 * RAW_BTH)


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_that_fades_nothing_or_all_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        Leaky(share)


@pytest.mark.parametrize("rms", [0.0, -1.0, float("nan")])
def test_a_size_that_is_not_positive_is_refused(rms: float) -> None:
    with pytest.raises(ValueError, match="rms must be positive"):
        FixedSize(rms)
