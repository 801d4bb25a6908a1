"""Our attention against transformers' own."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from specdec.nn.attention import Attention
from specdec.nn.cache import StaticCache
from specdec.nn.rope import Rope, rope_parameters
from specdec.nn.view import View
from tests.tiny import HIDDEN, llama_config

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]])


def build(heads: int, kv_heads: int, head_dim: int) -> tuple[Attention, LlamaAttention, Rope, LlamaRotaryEmbedding]:
    torch.manual_seed(0)
    config = llama_config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    config._attn_implementation = "sdpa"  # eager has a float32 softmax
    theirs = LlamaAttention(config, layer_idx=0).double()
    ours = Attention(HIDDEN, HIDDEN, heads, kv_heads, head_dim, 0).double()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for mine, own in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.mul_(20)
            own.mul_(20)
    rope = Rope(rope_parameters(config), head_dim, config.max_position_embeddings)
    return ours, theirs, rope, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 12), (8, 1, 6)])
def test_equals_llamas(heads: int, kv_heads: int, head_dim: int) -> None:
    ours, theirs, rope, their_rope = build(heads, kv_heads, head_dim)
    view = View.packed(DOCUMENTS)
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    bias = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~view.mask_B1TS, -torch.inf)
    want, _ = theirs(x, their_rope(x, view.positions_BT), bias)
    assert want.std() > 0.1
    torch.testing.assert_close(ours(x, view, rope.tables(view.positions_BT)), want, rtol=0, atol=1e-12)


def test_uses_the_cache_of_its_own_layer() -> None:
    ours, _, rope, _ = build(4, 2, 12)
    ours.layer = 1
    cache = StaticCache(2, 2, 8, 12, torch.float64)
    x = torch.randn(1, 6, HIDDEN, dtype=torch.float64)

    def run(piece: Tensor, view: View) -> Tensor:
        return ours(piece, view, rope.tables(view.positions_BT))

    whole = run(x, View.packed(torch.zeros(1, 6, dtype=torch.int64)))
    pieces = [run(x[:, :4], View.chain(0, 4, 8, cache)), run(x[:, 4:], View.chain(4, 2, 8, cache))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
    assert bool((cache.keys_LBgSd[0] == 0).all()) and bool((cache.keys_LBgSd[1, :, :, :6] != 0).all())


def test_the_input_may_be_wider_than_the_output() -> None:
    attention = Attention(2 * HIDDEN, HIDDEN, 4, 2, 12, 0)
    assert {name: tuple(p.shape) for name, p in attention.named_parameters()} == {
        "q_proj.weight": (48, 64), "k_proj.weight": (24, 64), "v_proj.weight": (24, 64), "o_proj.weight": (32, 48),
    }  # fmt: skip
