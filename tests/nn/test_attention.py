"""Our attention against transformers' own, and its one matrix against the formula."""

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from specdec.nn.attention import Attention, NormHeads, _Part
from specdec.nn.cache import StaticCache, attend
from specdec.nn.norm import RMSNorm
from specdec.nn.rope import Rope, rope_parameters
from specdec.nn.view import View
from tests.tiny import HIDDEN, llama_config

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]])


def joined(theirs: nn.Module) -> dict[str, Tensor]:
    """Their weights under our names: queries, keys and values are one matrix, in this order."""
    w = dict(theirs.state_dict())
    parts = [w.pop(f"{name}_proj.weight") for name in "qkv"]
    return {"qkv_proj.weight": torch.cat(parts)} | w


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(heads: int, kv_heads: int, head_dim: int) -> tuple[Attention, LlamaAttention, Rope, LlamaRotaryEmbedding]:
    torch.manual_seed(0)
    config = llama_config(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    config._attn_implementation = "sdpa"  # eager has a float32 softmax
    theirs = LlamaAttention(config, layer_idx=0).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(20)
    ours = Attention(HIDDEN, heads, kv_heads, head_dim, 0, nn.Identity()).double()
    ours.load_state_dict(joined(theirs))
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
    torch.testing.assert_close(ours(x, view, rope.tables(view.positions_BT)), want, rtol=1e-12, atol=1e-12)


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
    assert bool((cache.keys_BgSd[0] == 0).all()) and bool((cache.keys_BgSd[1][:, :, :6] != 0).all())


def test_one_matrix_for_queries_keys_and_values() -> None:
    attention = Attention(HIDDEN, 4, 2, 12, 0, nn.Identity())
    assert {name: tuple(p.shape) for name, p in attention.named_parameters()} == {
        "qkv_proj.weight": (48 + 24 + 24, 32), "o_proj.weight": (32, 48),
    }  # fmt: skip


def formula(w_W2H: Tensor, o_proj: nn.Linear, x: Tensor, view: View, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of 4 query and 2 key heads of width 12 with one matrix over the whole input, by plain autograd."""
    q, k, v = (x @ w_W2H.T).split([48, 24, 24], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 12)).transpose(1, 2) for part in (q, k, v))
    out = attend(rotated(q, *rope), rotated(k, *rope), v, view.sight)
    return o_proj(out.transpose(1, 2).flatten(2))


def rotated(x_BhTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channel j of the first half and channel j of the second are one complex number."""
    half = cos.shape[-1] // 2
    a, b, rest = x_BhTd[..., :half], x_BhTd[..., half : 2 * half], x_BhTd[..., 2 * half :]
    cos, sin = cos[..., :half].to(x_BhTd.dtype), sin[..., :half].to(x_BhTd.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_what_comes_beside_is_the_other_half_of_a_wide_matrix(partial: float) -> None:
    """Queries, keys and values of [e; f] through one matrix, forward and backward (EAGLE-3)."""
    attention = Attention(HIDDEN, 4, 2, 12, 0, nn.Identity()).double()
    view = View.packed(DOCUMENTS)
    block = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}
    rope = Rope(block, 12, 512).tables(view.positions_BT + 3)
    assert rope[0].shape[-1] == 12 * partial
    e, f = (random(2, 6, HIDDEN, seed=seed).requires_grad_() for seed in (0, 1))
    wide = random(96, 2 * HIDDEN, seed=2).requires_grad_()
    with torch.no_grad():
        attention.qkv_proj.weight.copy_(wide[:, HIDDEN:])
    on_e = wide[:, :HIDDEN].detach().clone().requires_grad_()
    got = attention(f, view, rope, e @ on_e.T)
    want = formula(wide, attention.o_proj, torch.cat([e, f], dim=-1), view, rope)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight = random(2, 6, HIDDEN, seed=3)
    by_e, by_f, by_on_e, by_on_f = torch.autograd.grad((got * weight).sum(), [e, f, on_e, attention.qkv_proj.weight])
    want_e, want_f, want_wide = torch.autograd.grad((want * weight).sum(), [e, f, wide])
    for ours, plain in ((by_e, want_e), (by_f, want_f), (torch.cat([by_on_e, by_on_f], dim=1), want_wide)):
        assert plain.abs().max() > 0.1
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize("factor", [1.0, 1.4])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(2, 5), (1, 1)], ids=str)
def test_splitting_and_rotating_has_the_gradient_of_its_formula(
    shape: tuple[int, int], partial: float, factor: float
) -> None:
    """Each output by itself and all together; a rotation's gradient is turned the other way, and scaled alike."""
    h, g, d = 4, 2, 12
    rope = Rope({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}, d, 512)
    rope.factor = factor  # as yarn and longrope have it
    tables = rope.tables(torch.arange(7, 7 + shape[0] * shape[1]).view(shape))
    leaf = random(*shape, h + 2 * g, d, seed=0).requires_grad_()
    weights = [random(shape[0], heads, shape[1], d, seed=heads + i) for i, heads in enumerate((h, g, g))]

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.transpose(1, 2).split([h, g, g], dim=1)
        return rotated(q, *tables), rotated(k, *tables), v

    ours, theirs = _Part.apply(leaf, *tables, h, g), plain(leaf)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    for used in ([0], [1], [2], [0, 1, 2]):
        found, wanted = (
            torch.autograd.grad(sum((made[i] * weights[i]).sum() for i in used), leaf, retain_graph=True)[0]
            for made in (ours, theirs)
        )
        assert wanted.abs().max() > 0.1
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: _Part.apply(x, *tables, h, g), leaf)


def test_splitting_and_rotating_keeps_nothing_but_the_tables() -> None:
    tables = Rope({"rope_type": "default", "rope_theta": 1e4}, 12, 512).tables(torch.arange(5)[None])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        _Part.apply(random(1, 5, 8, 12, seed=0).requires_grad_(), *tables, 4, 2)
    assert len(kept) == 2 and all(x is table for x, table in zip(kept, tables, strict=True))


def test_queries_and_keys_are_normed_per_head_before_they_are_rotated() -> None:
    """Against transformers' Qwen3."""
    torch.manual_seed(0)
    dimensions = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    config = Qwen3Config(hidden_size=HIDDEN, rms_norm_eps=1e-3, **dimensions)
    config._attn_implementation = "sdpa"
    theirs = Qwen3Attention(config, layer_idx=0).double()
    ours = Attention(HIDDEN, 4, 2, 12, 0, NormHeads(*(RMSNorm(12, config.rms_norm_eps) for _ in "qk"), 4, 2)).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.ndim == 1 else parameter.mul_(5)
    theirs.q_norm, theirs.k_norm = InDouble(theirs.q_norm), InDouble(theirs.k_norm)
    names = {f"{part}_norm.theirs.weight": f"norm.{part}_norm.weight" for part in "qk"}
    ours.load_state_dict({names.get(name, name): value for name, value in joined(theirs).items()})
    view = View.packed(DOCUMENTS)
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    bias = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~view.mask_B1TS, -torch.inf)
    want, _ = theirs(x, LlamaRotaryEmbedding(config)(x, view.positions_BT), bias)
    rope = Rope(rope_parameters(config), 12, config.max_position_embeddings).tables(view.positions_BT)
    torch.testing.assert_close(ours(x, view, rope), want, rtol=0, atol=1e-12)
    for name in ("q_norm", "k_norm"):
        norm = getattr(ours.norm, name)
        setattr(ours.norm, name, nn.Identity())
        assert not torch.allclose(ours(x, view, rope), want, atol=1e-3)
        setattr(ours.norm, name, norm)
    torch.testing.assert_close(ours(x, view, rope), want, rtol=0, atol=1e-12)


class InDouble(nn.Module):
    """Transformers' norm without its float32, which would hide the comparison."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        self.theirs = theirs

    def forward(self, x: Tensor) -> Tensor:
        eps = self.theirs.variance_epsilon
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.theirs.weight


def test_values_are_not_normed() -> None:
    norm = NormHeads(*(RMSNorm(12, 1e-6) for _ in "qk"), 4, 2).double()
    nn.init.constant_(norm.q_norm.weight, 2.0)
    nn.init.constant_(norm.k_norm.weight, 3.0)
    made = norm(7 * random(2, 3, 8, 12, seed=0))
    torch.testing.assert_close(made[:, :, :4].square().mean(-1), torch.full((2, 3, 4), 4.0).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        made[:, :, 4:6].square().mean(-1), torch.full((2, 3, 2), 9.0).double(), rtol=1e-5, atol=0
    )
    assert torch.equal(made[:, :, 6:], 7 * random(2, 3, 8, 12, seed=0)[:, :, 6:])


def test_without_norms_there_are_none() -> None:
    """The identity stands where they would, and only they are called: before the rotation, on all heads together."""
    seen: list[tuple[int, ...]] = []
    attention = Attention(HIDDEN, 4, 2, 12, 0, nn.Identity()).double()
    attention.norm.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    view = View.packed(DOCUMENTS)
    rope = Rope({"rope_type": "default", "rope_theta": 1e4}, 12, 512).tables(view.positions_BT)
    attention(random(2, 6, HIDDEN, seed=0), view, rope)
    assert seen == [(2, 6, 8, 12)] and not list(attention.norm.parameters())
