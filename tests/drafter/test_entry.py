import pytest
import torch

from specdec.drafter import DrafterSpec, Entry, Narrow, Norms, Wide
from tests.tiny import HIDDEN, tiny_config

CONFIG = tiny_config(DrafterSpec(entry=Narrow(), norms=Norms(aux="each", input=True)))
E, F, H = (torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(3))


def test_wide_puts_the_embedding_first() -> None:
    norms = Norms().build(CONFIG)
    entered = Wide().build(CONFIG)(E, F, H, norms)
    assert torch.equal(entered.block_BTW, torch.cat([E, F], dim=-1)) and Wide().width(HIDDEN) == 2 * HIDDEN
    assert torch.equal(entered.residual_BTH, H)  # the feature as it came, not as normalised


def test_wide_can_start_the_residual_at_the_normed_feature() -> None:
    entered = Wide().build(CONFIG)(E, F, H, Norms(residual="normed").build(CONFIG))
    assert torch.equal(entered.residual_BTH, F)


@pytest.mark.parametrize("bias", [True, False])
def test_narrow_projects_embedding_then_feature(bias: bool) -> None:
    torch.manual_seed(0)
    entry = Narrow(bias).build(CONFIG)
    on_e, on_f = entry.fc.weight.split(HIDDEN, dim=1)
    want = E @ on_e.T + F @ on_f.T
    if bias:
        want = want + entry.fc.bias
    assert (entry.fc.bias is not None) == bias and Narrow().width(HIDDEN) == HIDDEN
    entered = entry(E, F, H, Norms().build(CONFIG))
    torch.testing.assert_close(entered.block_BTW, want, rtol=0, atol=1e-5)
    assert torch.equal(entered.block_BTW, entered.residual_BTH)  # EAGLE-1: attention reads it as it is


def test_narrow_can_normalise_the_blocks_input_and_not_the_residual() -> None:
    torch.manual_seed(0)
    entry, norms = Narrow().build(CONFIG), CONFIG.norms.build(CONFIG)
    entered = entry(E, F, H, norms)
    assert torch.equal(entered.block_BTW, norms.input(entered.residual_BTH))
    torch.testing.assert_close(entered.block_BTW.square().mean(-1), torch.ones(2, 3), rtol=1e-3, atol=0)
    assert not torch.allclose(entered.block_BTW, entered.residual_BTH)


def test_an_unfinished_entry_says_so() -> None:
    with pytest.raises(TypeError, match="Entry must say how wide"):
        Entry().width(3)
    with pytest.raises(TypeError, match="Entry must build"):
        Entry().build(CONFIG)
