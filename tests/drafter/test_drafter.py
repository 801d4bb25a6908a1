"""The drafter against its formula, its published sizes, and what it starts from."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec.drafter import Concat, Drafter, DrafterConfig, DrafterSpec, Norms, PostNorm, PreNorm, Wide
from specdec.nn.view import View
from tests.published import published
from tests.tiny import (
    HIDDEN,
    LAYERS,
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
    "norm_before_fc": DrafterSpec(norms=Norms(aux="concat"), recurrence=PreNorm(), draft_vocab_size=40),
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
        return (u @ w[f"{at}attention.{name}.weight"].T).view(1, T, n, config.head_dim).transpose(1, 2)

    q, k, v = heads("q_proj", 4), heads("k_proj", 2), heads("v_proj", 2)
    cos, sin = LlamaRotaryEmbedding(llama_config())(q, torch.arange(T)[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = q @ k.mT / config.head_dim**0.5 + torch.full((T, T), -torch.inf).triu(1)
    attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, T, -1) @ w[f"{at}attention.o_proj.weight"].T
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
            aux_normed = torch.cat([rms(aux[:, :, n], w[f"norms.aux.{n}.weight"], eps) for n in range(3)], dim=-1)
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


@pytest.mark.parametrize("recurrence", [PreNorm(), PostNorm()], ids=str)
def test_the_head_reads_the_normed_state_and_the_recurrence_only_chooses_what_returns(
    recurrence: PreNorm | PostNorm,
) -> None:
    drafter = tiny_drafter(dataclasses.replace(presets()["eagle3"], recurrence=recurrence))
    ids, aux = inputs(drafter)
    raw: list[Tensor] = []
    drafter.layers.register_forward_hook(lambda module, args, out: raw.append(out))
    step = drafter.step(ids, drafter.fuse(aux), VIEW)
    normed = drafter.norms.output(raw[0])
    assert torch.equal(step.normed_BTH, normed) and not torch.allclose(raw[0], normed)
    assert torch.equal(step.h_BTH, normed if isinstance(recurrence, PostNorm) else raw[0])
    assert torch.equal(drafter.logits(step.normed_BTH), nn.functional.linear(normed, drafter.lm_head.weight))


def test_post_norm_and_pre_norm_hold_the_same_weights_and_the_same_first_logits() -> None:
    """Everything differs only from the second step on."""
    pre, post = (tiny_drafter(dataclasses.replace(presets()["eagle3"], recurrence=r)) for r in (PreNorm(), PostNorm()))
    post.load_state_dict(pre.state_dict())
    ids, aux = inputs(pre)
    first = [drafter.step(ids, drafter.fuse(aux), VIEW) for drafter in (pre, post)]
    assert torch.equal(first[0].normed_BTH, first[1].normed_BTH)
    second = [drafter.step(ids, step.h_BTH, VIEW).normed_BTH for drafter, step in zip((pre, post), first, strict=True)]
    assert not torch.allclose(second[0], second[1])


def hf(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_theta=1e6,
    )


def trainable(spec: DrafterSpec, hf_config: SimpleNamespace, vocab_size: int, layers: int) -> dict[str, int]:
    """Parameter counts of the real sizes, without their memory."""
    config = DrafterConfig.for_target(
        spec, hf_config, vocab_size=vocab_size, num_target_layers=layers, identity={"source": "sizes"}
    )
    ids = torch.arange(config.draft_vocab_size)
    with torch.device("meta"):
        drafter = Drafter(config, ids)
    counts = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
    assert counts.pop("embed_tokens.weight") == vocab_size * config.hidden_size
    return counts


QWEN3_4B, LLAMA31_8B, LLAMA2_7B = (2560, 9728, 32, 8, 128), (4096, 14336, 32, 8, 128), (4096, 11008, 32, 32, 128)


def test_eagle3_for_qwen3_4b_has_the_published_count() -> None:
    eagle3 = DrafterSpec(norms=Norms(), recurrence=PreNorm())
    assert sum(trainable(eagle3, hf(*QWEN3_4B), 151936, 36).values()) == 218_245_120
    assert sum(trainable(DrafterSpec(), hf(*QWEN3_4B), 151936, 36).values()) == 218_245_120 + 3 * 2560
    concat = DrafterSpec(norms=Norms(aux="concat"), recurrence=PreNorm())
    assert sum(trainable(concat, hf(*QWEN3_4B), 151936, 36).values()) == 218_245_120 + 3 * 2560


@pytest.mark.parametrize("sizes", [QWEN3_4B, LLAMA31_8B], ids=["qwen3_4b", "llama3.1_8b"])
def test_eagle3s_count_follows_the_formula(sizes: tuple[int, int, int, int, int]) -> None:
    H, I, q, kv, d = sizes  # noqa: E741
    want = 3 * H * H + 2 * H * (q + 2 * kv) * d + q * d * H + 3 * H * I + 32000 * H + 4 * H
    counts = trainable(DrafterSpec(norms=Norms(), recurrence=PreNorm()), hf(*sizes), 128256, 32)
    assert sum(counts.values()) == want
    if sizes == LLAMA31_8B:
        assert round(want / 1e6, 1) == 424.7


def test_eagle1_for_a_7b_target_has_the_published_count() -> None:
    counts = trainable(biased(), hf(*LLAMA2_7B), 32000, 32)
    assert counts.pop("lm_head.weight") == 32000 * 4096  # the target's own, frozen
    H, I = 4096, 11008  # noqa: E741
    assert sum(counts.values()) == 2 * H * H + H + 4 * H * H + 3 * H * I + H == 235_937_792


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
    assert not torch.allclose(drafter.advance(drafter.read(others, h.dtype), h, VIEW).normed_BTH, whole.normed_BTH)


@pytest.mark.parametrize("name", presets())
def test_what_is_read_has_the_features_dtype(name: str) -> None:
    """Under autocast the embedding table is wider than the features."""
    drafter = tiny_drafter(presets()[name], dtype=torch.float32)
    ids = torch.arange(T)[None]
    assert drafter.read(ids, torch.float32).dtype == torch.float32
    seen: list[torch.dtype] = []
    drafter.entry.read = lambda e_BTH: seen.append(e_BTH.dtype) or e_BTH  # type: ignore[func-returns-value]
    for dtype in (torch.bfloat16, torch.float32):
        drafter.read(ids, dtype)
    assert seen == [torch.bfloat16, torch.float32]


def test_fresh_weights_are_small_biases_zero_and_norms_one() -> None:
    torch.manual_seed(0)
    for spec in presets().values():
        config = tiny_config(spec)
        for name, parameter in Drafter(config, torch.arange(config.draft_vocab_size)).named_parameters():
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
        drawn = fresh(other, 0)
        shared = [key for key in one if key in drawn and drawn[key].shape == one[key].shape and one[key].ndim > 1]
        assert len(shared) >= 4, name  # of EAGLE-1's too: all but the fusion, and the head by its size
        assert all(torch.equal(one[key], drawn[key]) for key in shared), name
    assert all(torch.equal(one[key], same[key]) for key in one)
    matrices = [key for key in one if one[key].ndim > 1]
    assert not any(torch.equal(one[key], reseeded[key]) for key in matrices)
    assert not any(
        torch.equal(one[a], one[b]) for a in matrices for b in matrices if a < b and one[a].shape == one[b].shape
    )


def test_the_draft_vocabulary_must_have_the_configs_size() -> None:
    with pytest.raises(ValueError, match="39 draft tokens given, the config says 40"):
        Drafter(tiny_config(presets()["eagle3"]), torch.arange(39))


def test_warm_start_takes_embedding_head_rows_and_norm() -> None:
    target, drafter = tiny_target(), tiny_drafter(presets()["eagle3_1"])
    with torch.no_grad():
        target.final_norm.weight.uniform_(0.5, 1.5)
    ids = drafter.vocab.target_ids_D
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    scale = target.final_norm(torch.ones(HIDDEN, dtype=torch.float64))
    drafter.warm_start(target.embedding_weight(), target.head_weight(), scale)
    changed = {name for name, parameter in drafter.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"embed_tokens.weight", "lm_head.weight", "norms.output.weight"}
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
    assert torch.equal(drafter.lm_head.weight, target.head_weight()[ids])
    torch.testing.assert_close(drafter.norms.output.weight, target.final_norm.weight, rtol=1e-5, atol=0)


def test_a_warm_head_on_the_targets_last_state_speaks_as_the_target() -> None:
    """Norm and head together are the target's own, restricted to the draft vocabulary."""
    target, drafter = tiny_target(), tiny_drafter(presets()["eagle3"])
    with torch.no_grad():
        target.final_norm.weight.uniform_(0.5, 1.5)
    scale = target.final_norm(torch.ones(HIDDEN, dtype=torch.float64))
    drafter.warm_start(target.embedding_weight(), target.head_weight(), scale)
    out = target(torch.randint(0, VOCAB, (1, T)), VIEW, [LAYERS])
    want = target.logits(out.final_BTH)[..., drafter.vocab.target_ids_D]
    torch.testing.assert_close(drafter.logits(drafter.norms.output(out.aux_BTNH[:, :, 0])), want, rtol=1e-5, atol=1e-5)


def test_warm_start_of_eagle1_has_no_norm_to_fill() -> None:
    target, drafter = tiny_target(), tiny_drafter(presets()["eagle1"])
    drafter.warm_start(target.embedding_weight(), target.head_weight(), torch.ones(HIDDEN))
    assert torch.equal(drafter.lm_head.weight, target.head_weight())


def test_another_width_stays_random() -> None:
    config = tiny_config(DrafterSpec(Concat(), Wide(), hidden_size=20, draft_vocab_size=40))
    drafter, target = Drafter(config, torch.arange(40)), tiny_target()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.warm_start(target.embedding_weight(), target.head_weight(), torch.ones(HIDDEN))
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
