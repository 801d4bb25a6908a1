"""Attention, the gated block and the norm against transformers' own and against their formulas; what they keep."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from specdec.nn import layers as module
from specdec.nn.cache import StaticCache, attend
from specdec.nn.layers import GroupedAttention, NormHeads, RMSNorm, SwiGLU
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


def build(
    heads: int, kv_heads: int, head_dim: int
) -> tuple[GroupedAttention, LlamaAttention, Rope, LlamaRotaryEmbedding]:
    torch.manual_seed(0)
    config = llama_config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    config._attn_implementation = "sdpa"  # eager has a float32 softmax
    theirs = LlamaAttention(config, layer_idx=0).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(20)
    ours = GroupedAttention(HIDDEN, heads, kv_heads, head_dim, 0, nn.Identity()).double()
    ours.load_state_dict(joined(theirs))
    rope = Rope(rope_parameters(config), head_dim, config.max_position_embeddings)
    return ours, theirs, rope, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 12), (8, 1, 6)])
def test_equals_llamas(heads: int, kv_heads: int, head_dim: int) -> None:
    ours, theirs, rope, their_rope = build(heads, kv_heads, head_dim)
    view = View.packed(DOCUMENTS)
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    bias = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(
        ~view.visibility.mask_B1TS, -torch.inf
    )
    want, _ = theirs(x, their_rope(x, view.positions_BT), bias)
    assert want.std() > 0.1
    torch.testing.assert_close(
        ours(x, view, rope.tables(view.positions_BT)), want, rtol=1e-12, atol=1e-12
    )


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


def formula(
    w_W2H: Tensor, o_proj: nn.Linear, x: Tensor, view: View, rope: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention of 4 query and 2 key heads of width 12 with one matrix over the whole input, by plain autograd."""
    q, k, v = (x @ w_W2H.T).split([48, 24, 24], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 12)).transpose(1, 2) for part in (q, k, v))
    out = attend(rotated(q, *rope), rotated(k, *rope), v, view.visibility)
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
    attention = GroupedAttention(HIDDEN, 4, 2, 12, 0, nn.Identity()).double()
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
    by_e, by_f, by_on_e, by_on_f = torch.autograd.grad(
        (got * weight).sum(), [e, f, on_e, attention.qkv_proj.weight]
    )
    want_e, want_f, want_wide = torch.autograd.grad((want * weight).sum(), [e, f, wide])
    for ours, plain in (
        (by_e, want_e),
        (by_f, want_f),
        (torch.cat([by_on_e, by_on_f], dim=1), want_wide),
    ):
        assert plain.abs().max() > 0.1
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-11)


def split(
    qkv_BTnd: Tensor, cos: Tensor, sin: Tensor, h: int, g: int
) -> tuple[Tensor, Tensor, Tensor]:
    return module._Lean.apply(
        module._split_heads, module._join_heads, 1, (h, g), qkv_BTnd, cos, sin
    )


def gate(both: Tensor) -> Tensor:
    return module._Lean.apply(module._gate, module._gate_backward, 0, (), both)


@pytest.mark.parametrize("factor", [1.0, 1.4])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(2, 5), (1, 1)], ids=str)
def test_splitting_and_rotating_has_the_gradient_of_its_formula(
    shape: tuple[int, int], partial: float, factor: float
) -> None:
    """Each output by itself and all together; a rotation's gradient is turned the other way, and scaled alike."""
    h, g, d = 4, 2, 12
    rope = Rope(
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}, d, 512
    )
    rope.factor = factor  # as yarn and longrope have it
    tables = rope.tables(torch.arange(7, 7 + shape[0] * shape[1]).view(shape))
    leaf = random(*shape, h + 2 * g, d, seed=0).requires_grad_()
    weights = [
        random(shape[0], heads, shape[1], d, seed=heads + i) for i, heads in enumerate((h, g, g))
    ]

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.transpose(1, 2).split([h, g, g], dim=1)
        return rotated(q, *tables), rotated(k, *tables), v

    ours, theirs = split(leaf, *tables, h, g), plain(leaf)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    for used in ([0], [1], [2], [0, 1, 2]):
        found, wanted = (
            torch.autograd.grad(
                sum((made[i] * weights[i]).sum() for i in used), leaf, retain_graph=True
            )[0]
            for made in (ours, theirs)
        )
        assert wanted.abs().max() > 0.1
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: split(x, *tables, h, g), leaf)


def test_splitting_and_rotating_keeps_nothing_but_the_tables() -> None:
    tables = Rope({"rope_type": "default", "rope_theta": 1e4}, 12, 512).tables(
        torch.arange(5)[None]
    )
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        split(random(1, 5, 8, 12, seed=0).requires_grad_(), *tables, 4, 2)
    assert len(kept) == 2 and all(x is table for x, table in zip(kept, tables, strict=True))


def test_queries_and_keys_are_normed_per_head_before_they_are_rotated() -> None:
    """Against transformers' Qwen3."""
    torch.manual_seed(0)
    dimensions = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    config = Qwen3Config(hidden_size=HIDDEN, rms_norm_eps=1e-3, **dimensions)
    config._attn_implementation = "sdpa"
    theirs = Qwen3Attention(config, layer_idx=0).double()
    ours = GroupedAttention(
        HIDDEN, 4, 2, 12, 0, NormHeads(*(RMSNorm(12, config.rms_norm_eps) for _ in "qk"), 4, 2)
    ).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.ndim == 1 else parameter.mul_(5)
    theirs.q_norm, theirs.k_norm = InDouble(theirs.q_norm), InDouble(theirs.k_norm)
    names = {f"{part}_norm.theirs.weight": f"norm.{part}_norm.weight" for part in "qk"}
    ours.load_state_dict({names.get(name, name): value for name, value in joined(theirs).items()})
    view = View.packed(DOCUMENTS)
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64)
    bias = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(
        ~view.visibility.mask_B1TS, -torch.inf
    )
    want, _ = theirs(x, LlamaRotaryEmbedding(config)(x, view.positions_BT), bias)
    rope = Rope(rope_parameters(config), 12, config.max_position_embeddings).tables(
        view.positions_BT
    )
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


def random_block(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made_block(width: int = 6, inside: int = 10) -> SwiGLU:
    made = SwiGLU(width, inside).double()
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.copy_(random_block(*parameter.shape, seed=seed))
    return made


def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The first half of the rows is the gate."""
    half = len(gate_up) // 2
    gate, up = x @ gate_up[:half].T, x @ gate_up[half:].T
    return (gate / (1 + torch.exp(-gate)) * up) @ down.T


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (1, 1, 6)], ids=str)
def test_it_is_the_formula_and_so_is_its_gradient(shape: tuple[int, ...]) -> None:
    ours, x, weight = (
        made_block(),
        (2 * random_block(*shape, seed=7)).requires_grad_(),
        random_block(*shape, seed=8),
    )
    leaves = [x, *ours.parameters()]
    got, want = ours(x), gated(*leaves)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    found, wanted = (torch.autograd.grad((out * weight).sum(), leaves) for out in (got, want))
    for a, b in zip(found, wanted, strict=True):
        assert b.abs().max() > 0.1
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_gate_alone_passes_the_gradient_check() -> None:
    both = (3 * random_block(2, 3, 8, seed=1)).requires_grad_()
    torch.testing.assert_close(
        gate(both), F.silu(both[..., :4]) * both[..., 4:], rtol=0, atol=1e-15
    )
    assert torch.autograd.gradcheck(gate, both)


def test_large_gates_overflow_neither_way() -> None:
    both = torch.tensor([[-200.0, 0.0, 200.0, 2.0, 3.0, 4.0]], requires_grad=True)
    out = gate(both)
    assert out.tolist() == [[0.0, 0.0, 800.0]]
    (by_both,) = torch.autograd.grad(out.sum(), both)
    assert by_both.tolist() == [[0.0, 1.5, 4.0, 0.0, 0.0, 200.0]]


def test_recomputed_it_is_the_same() -> None:
    """Under gradient checkpointing what is made again is made of what is made again."""
    ours, x = made_block(), random_block(2, 3, 6, seed=7).requires_grad_()
    leaves = [x, *ours.parameters()]
    plain, thrifty = ours(x), checkpoint(ours, x, use_reentrant=False)
    assert torch.equal(plain, thrifty)
    found = [torch.autograd.grad(out.square().sum(), leaves) for out in (thrifty, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_llamas_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = RMSNorm(16, 1e-3).to(dtype), LlamaRMSNorm(16, 1e-3).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.uniform_(0.5, 1.5))
    x = (torch.randn(3, 4, 16) * 0.1).to(dtype)
    got = ours(x)
    assert got.dtype == dtype
    if dtype == torch.float32:  # a square is not a power: the last bit may differ
        torch.testing.assert_close(got, theirs(x), rtol=1e-6, atol=0)
    else:
        assert torch.equal(got, theirs(x))


def test_half_precision_does_not_overflow_inside() -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)  # its square is beyond float16
    torch.testing.assert_close(RMSNorm(8, 1e-6).half()(x), torch.ones(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 4, 8)], ids=str)
def test_the_gradient_is_that_of_the_formula(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    norm = RMSNorm(8, 0.1).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    leaves = [x.requires_grad_(), norm.weight]
    plain = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    found, wanted = (torch.autograd.grad((out * grad).sum(), leaves) for out in (norm(x), plain))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(norm, x)


def test_gradients_have_the_dtypes_of_what_they_are_for() -> None:
    """Under autocast the weight is wider than the states; the sums over them are taken wide."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(500, 8, generator=generator).bfloat16().double().requires_grad_()
    norm, wide = RMSNorm(8, 1e-6), RMSNorm(8, 1e-6).double()
    x = exact.detach().bfloat16().requires_grad_()
    norm(x).float().sum().backward()
    wide(exact).sum().backward()
    assert x.grad is not None and exact.grad is not None and norm.weight.grad is not None
    assert x.grad.dtype == torch.bfloat16 and norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(norm.weight.grad.double(), wide.weight.grad, rtol=1e-5, atol=1e-4)


def floats(function, *args: Tensor) -> tuple[Tensor, int]:  # type: ignore[no-untyped-def]
    """A result, and how many bytes wait for its backward pass."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = function(*args)
    return out, sum(kept.values())


def random_leaf(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_a_gated_block_keeps_no_product() -> None:
    """The widest of a layer: 2 I channels of gate and up wait, and not the I of their product."""
    width, inside = 4, 64
    block = SwiGLU(width, inside).double()
    x = random_leaf(3, 7, width, seed=3)
    out, kept = floats(block, x)
    weights = sum(p.numel() for p in block.parameters())
    assert kept <= 8 * (weights + 21 * (width + 2 * inside))
    gate, up = block.gate_up_proj(x).chunk(2, -1)
    want = block.down_proj(F.silu(gate) * up)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), [x, *block.parameters()]),
        torch.autograd.grad(want.square().sum(), [x, *block.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
