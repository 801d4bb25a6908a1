"""Rows and prompts that are too long for a mask of all pairs: the same states, and nothing of that size."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from specdec.nn import pieces
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.attention import EAGER
from tests.no_pairs import NoPairs
from tests.target.zoo import FAMILIES, LAYERS, SINGLE, SIZES, make, tokens

ROW = [0] * 17 + [1] * 3 + [2] * 2 + [3] * 12 + [-1] * 6


@pytest.fixture
def all_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST", "PAIRS"):
        monkeypatch.setattr(pieces, name, 0)
    monkeypatch.setattr(pieces, "ROWS", 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same_in_pieces(
    family: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Packed rows, documents and padding; a prompt in a cache, and more of it after that."""
    target, T = Target(make(family)), len(ROW)
    ids_2T = torch.cat([tokens(T, 1), tokens(T, 2)])
    documents_2T = torch.tensor([ROW, [0] * T])
    cut = 30

    def states() -> list[torch.Tensor]:
        packed = target(ids_2T, View.packed(documents_2T), range(LAYERS + 1))
        cache = target.new_cache(T + 4)
        first = target(ids_2T[:1, :cut], View.chain(0, cut, T + 4, cache), [2])
        second = target(ids_2T[:1, cut:], View.chain(cut, T - cut, T + 4, cache), [2])
        return [x for out in (packed, first, second) for x in out]

    masked = states()
    request.getfixturevalue("all_is_long")
    calls, attend = [], pieces.attend_pieces
    monkeypatch.setattr("specdec.target.attention.attend_pieces", lambda *args: calls.append(1) or attend(*args))
    narrow = family in SINGLE or target.config._attn_implementation == EAGER  # whose softmax is float32
    tolerance = 2e-5 if narrow else 1e-10
    for ours, own in zip(states(), masked, strict=True):
        scale = float(own.abs().max())
        torch.testing.assert_close(ours, own, rtol=0, atol=tolerance * scale)
    assert len(calls) == 3 * LAYERS


def small(sliding: int | None) -> PreTrainedModel:
    sizes = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    if sliding is None:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=sliding))


@pytest.mark.parametrize("sliding", [None, 700])
def test_no_tensor_of_all_pairs_is_made(sliding: int | None) -> None:
    torch.manual_seed(0)
    target, T = Target(small(sliding)), 6000
    ids_1T, documents_1T = tokens(T), torch.tensor([[0] * 4000 + [1] * 1500 + [2] * 300 + [-1] * 200])
    with NoPairs(T):
        packed = target(ids_1T, View.packed(documents_1T), [1])
        cache = target.new_cache(T)
        target(ids_1T, View.chain(0, T, T, cache), ())
    alone = target(ids_1T[:, 4000:5500], View.packed(torch.zeros(1, 1500, dtype=torch.int64)), [1])
    torch.testing.assert_close(packed.aux_BTNH[:, 4000:5500], alone.aux_BTNH, rtol=1e-4, atol=1e-5)


def test_the_guard_sees_masks() -> None:
    with pytest.raises(AssertionError, match="elements"), NoPairs(2000):
        Target(small(None))(tokens(2000), View.packed(torch.zeros(1, 2000, dtype=torch.int64)), ())
