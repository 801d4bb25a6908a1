"""The drafter against transformers' own layers and its formula; its weights, their names and their number."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specdec.drafter import (
    Concat,
    Drafter,
    DrafterConfig,
    DrafterSpec,
    Norms,
    PostNorm,
    PreNorm,
    Wide,
)
from specdec.drafter.entry import Entered
from specdec.nn.layers import RMSNorm
from specdec.nn.view import View
from tests.published import fill, published
from tests.tiny import (
    HIDDEN,
    VOCAB,
    biased,
    llama_config,
    presets,
    tiny_config,
    tiny_drafter,
    tiny_target,
    variants,
)

T = 5
VIEW = View.packed(torch.zeros(1, T, dtype=torch.int64))
WIDE_SPECS = {
    "eagle3": presets()["eagle3"],
    "eagle3_1": presets()["eagle3_1"],
    "norm_before_fc": DrafterSpec(
        norms=Norms(aux="concat"), recurrence=PreNorm(), draft_vocab_size=40
    ),
    "norm_before_residual": DrafterSpec(norms=Norms(residual="normed"), draft_vocab_size=40),
}


def inputs(drafter: Drafter, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = len(drafter.config.aux_layers)
    aux = torch.randn(1, T, n, HIDDEN, dtype=torch.float64, generator=generator)
    return torch.randint(0, VOCAB, (1, T), generator=generator), aux


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def formula(drafter: Drafter, ids: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """One EAGLE-3 step over a causal sequence as the paper's code writes it: out and normed out."""
    w = published(drafter)
    eps, config = drafter.config.rms_norm_eps, drafter.config
    e = rms(w["embed_tokens.weight"][ids], w["norms.embed.weight"], eps)
    f = rms(h, w["norms.hidden.weight"], eps)
    u = torch.cat([e, f], dim=-1)
    at = "layers.layers.0."

    def heads(name: str, n: int) -> Tensor:
        return (
            (u @ w[f"{at}attention.{name}.weight"].T).view(1, T, n, config.head_dim).transpose(1, 2)
        )

    q, k, v = heads("q_proj", 4), heads("k_proj", 2), heads("v_proj", 2)
    cos, sin = LlamaRotaryEmbedding(llama_config())(q, torch.arange(T)[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = q @ k.mT / config.head_dim**0.5 + torch.full((T, T), -torch.inf).triu(1)
    attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, T, -1) @ w[
        f"{at}attention.o_proj.weight"
    ].T
    r = (f if config.norms.residual == "normed" else h) + attended
    x = rms(r, w[f"{at}post_attention_norm.weight"], eps)
    gate, up = x @ w[f"{at}mlp.gate_proj.weight"].T, x @ w[f"{at}mlp.up_proj.weight"].T
    out = r + (gate / (1 + torch.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].T
    return out, rms(out, w["norms.output.weight"], eps)


@pytest.mark.parametrize("name", WIDE_SPECS)
def test_a_step_is_the_formula(name: str) -> None:
    drafter = tiny_drafter(WIDE_SPECS[name])
    ids, aux = inputs(drafter)
    w, eps = dict(drafter.named_parameters()), drafter.config.rms_norm_eps
    match drafter.config.norms.aux:
        case "each":
            aux_normed = torch.cat(
                [rms(aux[:, :, n], w[f"norms.aux.{n}.weight"], eps) for n in range(3)], dim=-1
            )
        case "concat":
            aux_normed = rms(aux.flatten(2), w["norms.aux.weight"], eps)
        case _:
            aux_normed = aux.flatten(2)
    g = aux_normed @ w["fusion.fc.weight"].T
    torch.testing.assert_close(drafter.fuse(aux), g, rtol=0, atol=1e-11)
    out, normed = formula(drafter, ids, g)
    step = drafter.step(ids, g, VIEW)
    torch.testing.assert_close(step.normed_BTH, normed, rtol=0, atol=1e-10)
    feedback = normed if isinstance(drafter.config.recurrence, PostNorm) else out
    torch.testing.assert_close(step.h_BTH, feedback, rtol=0, atol=1e-10)
    logits = normed @ w["lm_head.weight"].T
    torch.testing.assert_close(drafter.logits(step.normed_BTH), logits, rtol=0, atol=1e-9)


def test_post_norm_and_pre_norm_hold_the_same_weights_and_the_same_first_logits() -> None:
    """Everything differs only from the second step on."""
    pre, post = (
        tiny_drafter(dataclasses.replace(presets()["eagle3"], recurrence=r))
        for r in (PreNorm(), PostNorm())
    )
    post.load_state_dict(pre.state_dict())
    ids, aux = inputs(pre)
    first = [drafter.step(ids, drafter.fuse(aux), VIEW) for drafter in (pre, post)]
    assert torch.equal(first[0].normed_BTH, first[1].normed_BTH)
    second = [
        drafter.step(ids, step.h_BTH, VIEW).normed_BTH
        for drafter, step in zip((pre, post), first, strict=True)
    ]
    assert not torch.allclose(second[0], second[1])


@pytest.mark.parametrize("name", presets())
def test_a_step_is_reading_and_advancing(name: str) -> None:
    """Tokens can be read together, early and once, and shifted; every node's share is its own token's."""
    drafter = tiny_drafter(presets()[name])
    ids, aux = inputs(drafter)
    h = drafter.fuse(aux)
    whole = drafter.step(ids, h, VIEW)
    read = drafter.read(ids, h.dtype)
    for got, want in zip(drafter.advance(read, h, VIEW), whole, strict=True):
        assert torch.equal(got, want)
    longer = drafter.read(torch.cat([torch.ones_like(ids), ids], dim=1), h.dtype)
    assert longer.shape[:2] == (1, 2 * T)
    torch.testing.assert_close(longer[:, T:], read, rtol=0, atol=1e-13)
    others = (ids + 1) % VOCAB
    assert not torch.allclose(
        drafter.advance(drafter.read(others, h.dtype), h, VIEW).normed_BTH, whole.normed_BTH
    )


def test_fresh_weights_are_small_biases_zero_and_norms_one() -> None:
    torch.manual_seed(0)
    for spec in presets().values():
        config = tiny_config(spec)
        for name, parameter in Drafter(
            config, torch.arange(config.draft_vocab_size)
        ).named_parameters():
            if "norm" in name:
                assert bool((parameter == 1).all()), name
            elif parameter.ndim == 1:
                assert bool((parameter == 0).all()), name
            else:
                assert 0.015 < float(parameter.detach().std()) < 0.025, name


def test_designs_begin_alike_in_the_weights_they_share() -> None:
    def fresh(spec: DrafterSpec, seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        config = tiny_config(spec)
        return dict(Drafter(config, torch.arange(config.draft_vocab_size)).named_parameters())

    one, same, reseeded = (fresh(presets()["eagle3_1"], seed) for seed in (0, 0, 1))
    for name, other in {**presets(), **variants()}.items():
        if name == "mtp":  # whose layer has other names
            continue
        drawn = fresh(other, 0)
        shared = [
            key
            for key in one
            if key in drawn and drawn[key].shape == one[key].shape and one[key].ndim > 1
        ]
        # of EAGLE-1's too: all but the fusion, and the head by its size
        assert len(shared) >= 4, name
        assert all(torch.equal(one[key], drawn[key]) for key in shared), name
    assert all(torch.equal(one[key], same[key]) for key in one)
    matrices = [key for key in one if one[key].ndim > 1]
    assert not any(torch.equal(one[key], reseeded[key]) for key in matrices)
    assert not any(
        torch.equal(one[a], one[b])
        for a in matrices
        for b in matrices
        if a < b and one[a].shape == one[b].shape
    )


def test_the_draft_vocabulary_must_have_the_configs_size() -> None:
    with pytest.raises(ValueError, match="39 draft tokens given, the config says 40"):
        Drafter(tiny_config(presets()["eagle3"]), torch.arange(39))


@pytest.mark.parametrize("size", [0.05, 20.0])
def test_warm_start_takes_embedding_and_head_rows_and_a_norm_of_one_number(size: float) -> None:
    """A unit-RMS state that is random has logits of a standard deviation of at most one."""
    target, drafter = tiny_target(), tiny_drafter(presets()["eagle3_1"])
    with torch.no_grad():
        target.final_norm.weight.uniform_(0.5, 1.5)
        target.head_weight().mul_(size / 20)
    ids = drafter.vocab.target_ids_D
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    drafter.warm_start(target.embedding_weight(), target.head_weight())
    changed = {
        name
        for name, parameter in drafter.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert changed == {"embed_tokens.weight", "lm_head.weight", "norms.output.weight"}
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
    assert torch.equal(drafter.lm_head.weight, target.head_weight()[ids])
    state = torch.randn(4000, HIDDEN, dtype=torch.float64, generator=torch.manual_seed(0))
    spread = float(drafter.logits(drafter.norms.output(state)).var(-1, correction=0).mean().sqrt())
    assert drafter.norms.output.weight.unique().numel() == 1
    assert spread == pytest.approx(1, rel=0.05) if size > 1 else spread < 0.05


def test_another_width_stays_random() -> None:
    config = tiny_config(DrafterSpec(Concat(), Wide(), hidden_size=20, draft_vocab_size=40))
    drafter, target = Drafter(config, torch.arange(40)), tiny_target()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.warm_start(target.embedding_weight(), target.head_weight())
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


QKV = (4 + 2 * 2) * 12  # queries, keys and values of all heads
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1]])
LAYER_VIEW = View.packed(DOCUMENTS)


def hugging_face(drafter: Drafter, index: int, input_norm: nn.Module) -> LlamaDecoderLayer:
    """Theirs with the weights of our layer ``index``; their norm computes in float32, so ours stands in for it."""
    config = llama_config()
    config._attn_implementation = "sdpa"
    theirs = LlamaDecoderLayer(config, layer_idx=0).double()
    w = published(drafter)
    for module, at in ((theirs.self_attn, "attention"), (theirs.mlp, "mlp")):
        prefix = f"layers.layers.{index}.{at}."
        module.load_state_dict(
            {k.removeprefix(prefix): x for k, x in w.items() if k.startswith(prefix)}
        )
    theirs.input_layernorm = input_norm
    theirs.post_attention_layernorm = drafter.layers.layers[index].post_attention_norm
    return theirs.requires_grad_(False)


def run_layer(layer: LlamaDecoderLayer, x: Tensor) -> Tensor:
    bias = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(
        ~LAYER_VIEW.visibility.mask_B1TS, -torch.inf
    )
    tables = LlamaRotaryEmbedding(llama_config())(x, LAYER_VIEW.positions_BT)
    out = layer(x, attention_mask=bias, position_embeddings=tables)
    return out[0] if isinstance(out, tuple) else out


def layer_inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (2, 6), generator=generator)
    return ids, torch.randn(2, 6, HIDDEN, dtype=torch.float64, generator=generator)


def merged(drafter: Drafter, ids: Tensor, h: Tensor) -> Tensor:
    """EAGLE-1's projection of embedding and feature."""
    w = published(drafter)
    return nn.functional.linear(
        torch.cat([w["embed_tokens.weight"][ids], h], dim=-1),
        w["entry.fc.weight"],
        w.get("entry.fc.bias"),
    )


def test_a_narrow_entry_with_an_input_norm_is_a_llama_layer() -> None:
    norms = Norms(embed=False, hidden=False, input=True, output=False)
    spec = dataclasses.replace(biased(), norms=norms)
    drafter, (ids, h) = tiny_drafter(spec), layer_inputs()
    x = merged(drafter, ids, h)
    want = run_layer(hugging_face(drafter, 0, drafter.norms.input), x)
    torch.testing.assert_close(drafter.step(ids, h, LAYER_VIEW).h_BTH, want, rtol=0, atol=1e-11)
    without = run_layer(hugging_face(drafter, 0, nn.Identity()), x)
    assert not torch.allclose(without, want)


def test_eagle1s_first_layer_has_no_input_norm_and_no_final_norm() -> None:
    drafter, (ids, h) = tiny_drafter(presets()["eagle1"]), layer_inputs()
    norms = [name for name, module in drafter.named_modules() if isinstance(module, RMSNorm)]
    assert norms == ["layers.layers.0.post_attention_norm"]
    want = run_layer(hugging_face(drafter, 0, nn.Identity()), merged(drafter, ids, h))
    step = drafter.step(ids, h, LAYER_VIEW)
    torch.testing.assert_close(step.h_BTH, want, rtol=0, atol=1e-11)
    assert torch.equal(step.h_BTH, step.normed_BTH)


def test_further_layers_are_plain_pre_norm_layers() -> None:
    for entry_of in ("eagle1", "eagle3"):
        spec = dataclasses.replace(presets()[entry_of], num_layers=3, recurrence=PreNorm())
        drafter = tiny_drafter(spec)
        layers = drafter.layers
        assert len(layers.layers) == 3 and len(layers.input_norms) == 2
        generator = torch.Generator().manual_seed(1)
        widths = (HIDDEN, QKV, HIDDEN)
        block, beside, residual = (
            torch.randn(2, 6, w, dtype=torch.float64, generator=generator) for w in widths
        )
        entered = Entered(block, beside if entry_of == "eagle3" else None, residual)
        x = layers.layers[0](entered, LAYER_VIEW, layers.rope.tables(LAYER_VIEW.positions_BT))
        for index, norm in enumerate(layers.input_norms, start=1):
            x = run_layer(hugging_face(drafter, index, norm), x)
        torch.testing.assert_close(layers(entered, LAYER_VIEW), x, rtol=0, atol=1e-11)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_window_narrows_every_layer_once(num_layers: int) -> None:
    """As the same layers do under a view that was narrowed outside."""
    spec = DrafterSpec(num_layers=num_layers, norms=Norms())
    full = tiny_drafter(spec).layers
    narrow = tiny_drafter(dataclasses.replace(spec, attention_window=16)).layers
    narrow.load_state_dict(full.state_dict())
    view = View.packed(torch.tensor([[0] * 20 + [1] * 20]))
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 40, HIDDEN), (1, 40, QKV), (1, 40, HIDDEN)]
    entered = Entered(
        *(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    )
    assert torch.equal(narrow(entered, view), full(entered, view.within(16)))
    gap_T = (narrow(entered, view) - full(entered, view)).abs().amax(-1)[0]
    assert (gap_T > 1e-9).nonzero()[:, 0].tolist() == [16, 17, 18, 19, 36, 37, 38, 39]


EAGLE3 = DrafterSpec(norms=Norms(), recurrence=PreNorm())


class Sizes(NamedTuple):
    """Hidden, intermediate, query heads, key heads, head width."""

    H: int
    I: int  # noqa: E741
    q: int
    kv: int
    d: int


QWEN3_4B, LLAMA31_8B = Sizes(2560, 9728, 32, 8, 128), Sizes(4096, 14336, 32, 8, 128)
OTHERS = [Sizes(96, 200, 6, 3, 10), Sizes(64, 72, 8, 1, 24), Sizes(40, 16, 5, 5, 8)]


def count(spec: DrafterSpec, sizes: Sizes, target_width: int | None = None) -> int:
    """Parameters without the embedding, which is the target's own."""
    hf_config = SimpleNamespace(
        hidden_size=target_width or sizes.H,
        intermediate_size=sizes.I,
        num_attention_heads=sizes.q,
        num_key_value_heads=sizes.kv,
        head_dim=sizes.d,
        max_position_embeddings=4096,
        rope_theta=1e6,
    )
    config = DrafterConfig.for_target(
        dataclasses.replace(spec, hidden_size=sizes.H), hf_config,
        vocab_size=128256, num_target_layers=32, identity={"source": "sizes"},
    )  # fmt: skip
    ids_D = torch.arange(config.draft_vocab_size)
    with torch.device("meta"):
        drafter = Drafter(config, ids_D)
    return sum(p.numel() for name, p in drafter.named_parameters() if name != "embed_tokens.weight")


def layer(sizes: Sizes, width_in: int) -> int:
    """Projections, feed-forward and the norm between them."""
    H, I, q, kv, d = sizes  # noqa: E741
    return width_in * (q + 2 * kv) * d + q * d * H + 3 * H * I + H


def eagle3(sizes: Sizes, D: int = 32000, n_aux: int = 3, H_t: int | None = None) -> int:
    """The closed formula: fusion, one wide layer, head, and the norms on embedding, feature and output."""
    return (
        n_aux * (H_t or sizes.H) * sizes.H + layer(sizes, 2 * sizes.H) + D * sizes.H + 3 * sizes.H
    )


def test_qwen3_4b() -> None:
    assert count(EAGLE3, QWEN3_4B) == eagle3(QWEN3_4B) == 218_245_120


def test_llama_3_1_8b() -> None:
    assert round(count(EAGLE3, LLAMA31_8B) / 1e6, 1) == round(eagle3(LLAMA31_8B) / 1e6, 1) == 424.7


@pytest.mark.parametrize("aux", ["none", "each", "concat"])
@pytest.mark.parametrize("layers", [[5], [2, 16, 29], [1, 4, 9, 16, 25]], ids=len)
@pytest.mark.parametrize("H_t", [None, 56])
@pytest.mark.parametrize("sizes", OTHERS, ids=lambda sizes: str(sizes.H))
def test_the_closed_formula(sizes: Sizes, H_t: int | None, layers: list[int], aux: str) -> None:
    """Each of the two aux norms has one weight for every channel of every state."""
    norms = Norms(aux=aux)  # type: ignore[arg-type]
    spec = dataclasses.replace(EAGLE3, norms=norms, aux_layers=layers, draft_vocab_size=77)
    more = 0 if aux == "none" else len(layers) * (H_t or sizes.H)
    assert count(spec, sizes, H_t) == eagle3(sizes, 77, len(layers), H_t) + more


@pytest.mark.parametrize("sizes", OTHERS, ids=lambda sizes: str(sizes.H))
def test_eagle1_has_a_projection_and_a_layer(sizes: Sizes) -> None:
    head = 128256 * sizes.H  # the target's own
    assert count(presets()["eagle1"], sizes) - head == 2 * sizes.H**2 + layer(sizes, sizes.H)


H, I, QKV = HIDDEN, 48, (4 + 2 * 2) * 12  # noqa: E741  of the tiny Llama's drafters
VECTOR, FUSION = (H,), {"fusion.fc.weight": (H, 3 * H)}
BLOCK = {
    "attention.qkv_proj.weight": (QKV, H),
    "attention.o_proj.weight": (H, 48),
    "post_attention_norm.weight": VECTOR,
    "mlp.gate_up_proj.weight": (2 * I, H),
    "mlp.down_proj.weight": (H, I),
}
WIDE = {"entry.token_qkv_proj.weight": (QKV, H)}
NARROW = {"entry.token_fc.weight": (H, H), "entry.feature_fc.weight": (H, H)}
NORMS = {f"norms.{site}.weight": VECTOR for site in ("embed", "hidden", "output")}
EACH = {f"norms.aux.{n}.weight": VECTOR for n in range(3)}
HEAD_NORMS = {f"layers.layers.0.attention.norm.{part}_norm.weight": (12,) for part in "qk"}
SECOND = {f"layers.layers.1.{name}": shape for name, shape in BLOCK.items()} | {
    "layers.input_norms.0.weight": VECTOR
}
DESIGNS = presets() | variants() | {"biased": biased()}
HELD: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle1": NARROW,
    "biased": NARROW | {"entry.feature_fc.bias": VECTOR},
    "eagle3": WIDE | FUSION | NORMS,
    "eagle3_1": WIDE | FUSION | NORMS | EACH,
    "nvidia": WIDE | FUSION | NORMS | {"norms.aux.weight": (3 * H,)},
    "qwen3": WIDE | FUSION | NORMS | EACH | HEAD_NORMS,
    "weighted_sum": WIDE | NORMS | EACH | {"fusion.fc.weight": (H, H), "fusion.scores_N": (3,)},
    "two_layer": WIDE | FUSION | NORMS | EACH | SECOND,
    "narrow_fusion": NARROW | FUSION | NORMS | {"norms.input.weight": VECTOR},
}


@pytest.mark.parametrize("name", HELD)
def test_the_names_that_a_checkpoint_holds(name: str) -> None:
    """Exporters and stored drafters rest on these, and on their shapes."""
    drafter = tiny_drafter(DESIGNS[name])
    D = drafter.config.draft_vocab_size
    common = {
        "vocab.target_ids_D": (D,),
        "embed_tokens.weight": (VOCAB, H),
        "lm_head.weight": (D, H),
    }
    want = common | {f"layers.layers.0.{part}": shape for part, shape in BLOCK.items()} | HELD[name]
    assert {part: tuple(value.shape) for part, value in drafter.state_dict().items()} == want


PUBLISHED = {
    f"{part}_proj": shape for part, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))
}


@pytest.mark.parametrize("name", HELD)
def test_the_published_names_and_back(name: str) -> None:
    """One matrix a projection, as papers and other repositories have them, and nothing lost on the way."""
    drafter = tiny_drafter(DESIGNS[name])
    w = {part: value.detach().clone() for part, value in published(drafter).items()}
    assert sum(value.numel() for value in w.values()) == sum(
        p.numel() for p in drafter.parameters()
    )
    assert not any(
        "qkv_proj" in part or "gate_up" in part or "token_fc" in part or "feature" in part
        for part in w
    )
    narrow = name in ("eagle1", "biased", "narrow_fusion")
    for i in range(drafter.config.num_layers):
        wide = 2 * H if i == 0 and not narrow else H
        shapes = {
            "q_proj": (48, wide),
            "k_proj": (24, wide),
            "v_proj": (24, wide),
            "o_proj": (H, 48),
        }
        for part, shape in shapes.items():
            assert w[f"layers.layers.{i}.attention.{part}.weight"].shape == shape
        for part, shape in PUBLISHED.items():
            assert w[f"layers.layers.{i}.mlp.{part}.weight"].shape == shape
    assert ("entry.fc.weight" in w) == narrow and ("entry.fc.bias" in w) == (name == "biased")
    assert not narrow or w["entry.fc.weight"].shape == (H, 2 * H)
    assert ("layers.layers.0.attention.q_norm.weight" in w) == (name == "qwen3")
    other = tiny_drafter(DESIGNS[name], seed=1)
    assert not any(
        torch.equal(a, b) for a, b in zip(other.parameters(), drafter.parameters(), strict=True)
    )
    fill(other, w)
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), drafter.parameters(), strict=True)
    )
