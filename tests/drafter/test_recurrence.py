import pytest
import torch

from specdec.drafter import DrafterSpec, PostNorm, PreNorm, Recurrence
from tests.tiny import tiny_config

CONFIG = tiny_config(DrafterSpec())


def test_what_returns() -> None:
    out, normed = torch.ones(1), torch.zeros(1)
    assert PreNorm().build(CONFIG)(out, normed) is out
    assert PostNorm().build(CONFIG)(out, normed) is normed


@pytest.mark.parametrize("recurrence", [PreNorm(), PostNorm()], ids=str)
def test_neither_has_parameters(recurrence: Recurrence) -> None:
    assert not list(recurrence.build(CONFIG).parameters())


def test_an_unfinished_recurrence_says_so() -> None:
    with pytest.raises(TypeError, match="Recurrence must build"):
        Recurrence().build(CONFIG)
