"""The entries against their formulas, which have one matrix over embedding and feature together.

Legend: e normalised embedding, f normalised feature, h the feature as it came.
"""

import pytest
import torch
from torch import nn

from specdec.drafter import Drafter, DrafterSpec, Entry, EntryModule, Narrow, Norms, Wide
from tests.published import published
from tests.tiny import HIDDEN, tiny_config

CONFIG = tiny_config(DrafterSpec(entry=Narrow(), norms=Norms(aux="each", input=True)))
QKV = (4 + 2 * 2) * 12
E, F, H = (torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(3))
PLAIN = Norms().build(CONFIG)


def random(entry: Entry) -> EntryModule:
    torch.manual_seed(0)
    made = entry.build(CONFIG)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.requires_grad_(False)


def test_wide_lets_the_embedding_in_beside_the_feature() -> None:
    entry = random(Wide())
    read = entry.read(E)
    torch.testing.assert_close(read, E @ entry.token_qkv_proj.weight.T, rtol=0, atol=1e-4)
    assert read.shape == (2, 3, QKV) and entry.token_qkv_proj.bias is None
    entered = entry(read, F, H, PLAIN)
    assert entered.block_BTH is F and entered.beside_BTW is read
    assert entered.residual_BTH is H  # the feature as it came, not as normalised


def test_wide_is_one_matrix_over_embedding_then_feature() -> None:
    """Published drafters have [e; f] before queries, keys and values, 2H channels."""
    drafter = Drafter(tiny_config(DrafterSpec(draft_vocab_size=40)), torch.arange(40)).double()
    w, at = published(drafter), "layers.layers.0.attention"
    matrix = torch.cat([w[f"{at}.{part}_proj.weight"] for part in "qkv"])
    e, f, h = E.double(), F.double(), H.double()
    block, beside, _ = drafter.entry(drafter.entry.read(e), f, h, drafter.norms)
    got = drafter.layers.layers[0].attention.qkv_proj(block) + beside
    torch.testing.assert_close(got, torch.cat([e, f], dim=-1) @ matrix.T, rtol=0, atol=1e-13)


def test_wide_can_start_the_residual_at_the_normed_feature() -> None:
    entered = Wide().build(CONFIG)(torch.zeros(2, 3, QKV), F, H, Norms(residual="normed").build(CONFIG))
    assert entered.residual_BTH is F


@pytest.mark.parametrize("bias", [True, False])
def test_narrow_projects_embedding_then_feature(bias: bool) -> None:
    entry = random(Narrow(bias))
    want = E @ entry.token_fc.weight.T + F @ entry.feature_fc.weight.T
    if bias:
        want = want + entry.feature_fc.bias  # once
    assert (entry.feature_fc.bias is not None) == bias and entry.token_fc.bias is None
    read = entry.read(E)
    torch.testing.assert_close(read, E @ entry.token_fc.weight.T, rtol=0, atol=1e-4)
    entered = entry(read, F, H, PLAIN)
    torch.testing.assert_close(entered.block_BTH, want, rtol=0, atol=1e-4)
    assert torch.equal(entered.block_BTH, entered.residual_BTH)  # EAGLE-1: attention reads it as it is
    assert entered.beside_BTW is None


@pytest.mark.parametrize("bias", [True, False])
def test_narrow_is_one_matrix_over_embedding_then_feature(bias: bool) -> None:
    spec = DrafterSpec(entry=Narrow(bias), draft_vocab_size=40)
    drafter = Drafter(tiny_config(spec), torch.arange(40)).double()
    if bias:
        nn.init.normal_(drafter.entry.feature_fc.bias)
    w = published(drafter)
    assert w["entry.fc.weight"].shape == (HIDDEN, 2 * HIDDEN) and ("entry.fc.bias" in w) == bias
    e, f, h = E.double(), F.double(), H.double()
    want = nn.functional.linear(torch.cat([e, f], dim=-1), w["entry.fc.weight"], w.get("entry.fc.bias"))
    got = drafter.entry(drafter.entry.read(e), f, h, drafter.norms).residual_BTH
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_narrow_can_normalise_the_blocks_input_and_not_the_residual() -> None:
    entry, norms = random(Narrow()), CONFIG.norms.build(CONFIG)
    entered = entry(entry.read(E), F, H, norms)
    assert torch.equal(entered.block_BTH, norms.input(entered.residual_BTH))
    torch.testing.assert_close(entered.block_BTH.square().mean(-1), torch.ones(2, 3), rtol=1e-3, atol=0)
    assert not torch.allclose(entered.block_BTH, entered.residual_BTH)


def test_an_unfinished_entry_says_so() -> None:
    with pytest.raises(TypeError, match="Entry must build"):
        Entry().build(CONFIG)
    with pytest.raises(TypeError, match="EntryModule must say what it reads of a token"):
        EntryModule().read(E)
    with pytest.raises(TypeError, match="EntryModule must say what the first layer receives"):
        EntryModule()(E, F, H, PLAIN)
