"""The drafter against small references of the published designs that share no code with it.

Each reference walks one document token by token, with its keys and values in lists, as the papers write the
recursion: slot i reads token i + 1 and its feature and predicts token i + 2; a draft step reads the next token and
what the step before handed back.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.drafter import Drafter, DrafterSpec
from specdec.training.ttt import ttt_unroll
from tests.published import published
from tests.tiny import HIDDEN, VOCAB, presets, tiny_config, tiny_drafter, variants

T, STEPS, HEADS, GROUPS, WIDTH = 24, 3, 4, 2, 12
Weights = dict[str, Tensor]
Cache = list[tuple[Tensor, Tensor]]
Node = Callable[[Weights, int, Tensor, int, Cache], tuple[Tensor, Tensor]]  # token, feature, position: feature, logits


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * weight / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5


def turn(x: Tensor, position: int) -> Tensor:
    """Channel j and channel j + WIDTH / 2 are one complex number, turned by the position times its frequency."""
    inverse = 1.0 / (10000.0 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
    angle = torch.tensor(float(position)) * inverse  # single precision, as every published model has it
    z = torch.complex(x[..., : WIDTH // 2], x[..., WIDTH // 2 :])
    z = z * torch.complex(angle.cos().double(), angle.sin().double())
    return torch.cat([z.real, z.imag], -1)


def attend(w: Weights, at: str, u: Tensor, position: int, past: Cache, window: int | None = None) -> Tensor:
    """One node's attention; its own key and value are added to ``past``."""
    q = (w[f"{at}.q_proj.weight"] @ u).view(HEADS, WIDTH)
    k = (w[f"{at}.k_proj.weight"] @ u).view(GROUPS, WIDTH)
    v = (w[f"{at}.v_proj.weight"] @ u).view(GROUPS, WIDTH)
    if f"{at}.q_norm.weight" in w:
        q, k = rms(q, w[f"{at}.q_norm.weight"]), rms(k, w[f"{at}.k_norm.weight"])
    past.append((turn(k, position), v))
    q, seen = turn(q, position), past[-window:] if window else past  # one key at every position of a chain
    out = []
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        scores = torch.stack([key[group] @ q[head] for key, _ in seen]) / WIDTH**0.5
        shares = torch.exp(scores - scores.max())
        out.append(sum(s * value[group] for s, (_, value) in zip(shares, seen, strict=True)) / shares.sum())
    return w[f"{at}.o_proj.weight"] @ torch.cat(out)


def feed_forward(w: Weights, at: str, x: Tensor) -> Tensor:
    gate = w[f"{at}.gate_proj.weight"] @ x
    return w[f"{at}.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * (w[f"{at}.up_proj.weight"] @ x))


def eagle1(w: Weights, token: int, f: Tensor, position: int, past: Cache) -> tuple[Tensor, Tensor]:
    """One projection of embedding and feature, a layer without input norm, the target's head on what comes out."""
    z = w["entry.fc.weight"] @ torch.cat([w["embed_tokens.weight"][token], f])
    r = z + attend(w, "layers.layers.0.attention", z, position, past)
    x = rms(r, w["layers.layers.0.post_attention_norm.weight"])
    out = r + feed_forward(w, "layers.layers.0.mlp", x)
    return out, w["lm_head.weight"] @ out


def eagle3(normed_residual: bool = False, post_norm: bool = False, window: int | None = None) -> Node:
    """Wide queries, keys and values; the switches are norm_before_residual and norm_output."""

    def node(w: Weights, token: int, g: Tensor, position: int, past: Cache) -> tuple[Tensor, Tensor]:
        n = rms(g, w["norms.hidden.weight"])
        u = torch.cat([rms(w["embed_tokens.weight"][token], w["norms.embed.weight"]), n])
        r = (n if normed_residual else g) + attend(w, "layers.layers.0.attention", u, position, past, window)
        y = r + feed_forward(w, "layers.layers.0.mlp", rms(r, w["layers.layers.0.post_attention_norm.weight"]))
        normed = rms(y, w["norms.output.weight"])
        return (normed if post_norm else y), w["lm_head.weight"] @ normed

    return node


def last(w: Weights, states: list[Tensor]) -> Tensor:
    return states[0]


def concat(w: Weights, states: list[Tensor]) -> Tensor:
    return w["fusion.fc.weight"] @ torch.cat(states)


def fc_norm(w: Weights, states: list[Tensor]) -> Tensor:
    return concat(w, [rms(x, w[f"norms.aux.{n}.weight"]) for n, x in enumerate(states)])


def norm_before_fc(w: Weights, states: list[Tensor]) -> Tensor:
    return w["fusion.fc.weight"] @ rms(torch.cat(states), w["norms.aux.weight"])


def weighted_sum(w: Weights, states: list[Tensor]) -> Tensor:
    shares = torch.exp(w["fusion.scores_N"])
    normed = [rms(x, w[f"norms.aux.{n}.weight"]) for n, x in enumerate(states)]
    return w["fusion.fc.weight"] @ (sum(s * x for s, x in zip(shares, normed, strict=True)) / shares.sum())


REFERENCES: dict[str, tuple[Callable[[Weights, list[Tensor]], Tensor], Node]] = {
    "eagle1": (last, eagle1),
    "eagle3": (concat, eagle3()),
    "eagle3_1": (fc_norm, eagle3(post_norm=True)),
    "nvidia": (norm_before_fc, eagle3()),
    "speculators": (norm_before_fc, eagle3(normed_residual=True, post_norm=True)),
    "qwen3": (fc_norm, eagle3(post_norm=True)),
    "weighted_sum": (weighted_sum, eagle3(post_norm=True)),
    "sliding_window": (fc_norm, eagle3(post_norm=True, window=16)),
}
DESIGNS = presets() | variants()


def reference(name: str, w: Weights, ids: list[int], aux: list[list[Tensor]]) -> list[list[Tensor]]:
    """Logits of steps 0 to STEPS - 1 at every anchor; a draft's own keys leave with it."""
    fuse, node = REFERENCES[name]
    past: Cache = []
    made = []
    for t in range(len(ids) - STEPS):
        feature, logits = node(w, ids[t + 1], fuse(w, aux[t]), t, past)
        steps, drafted = [logits], list(past)
        for k in range(1, STEPS):
            feature, logits = node(w, ids[t + 1 + k], feature, t + k, drafted)
            steps.append(logits)
        made.append(steps)
    return made


def spread(drafter: Drafter) -> Weights:
    """The drafter's weights, enlarged until attention has preferences and every part shows in the logits."""
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            parameter.mul_(0.5 if "lm_head" in name else 2.5)
    return published(drafter)


@torch.no_grad()
def both(name: str, spec: DrafterSpec) -> tuple[Tensor, Tensor]:
    """Logits (T - STEPS, STEPS, D) of the drafter's unroll and of the reference called ``name``."""
    drafter = tiny_drafter(spec)
    w = spread(drafter)
    generator = torch.Generator().manual_seed(1)
    shape = (1, T, len(drafter.config.aux_layers), HIDDEN)
    ids, aux = torch.randint(0, VOCAB, (1, T), generator=generator), torch.randn(shape, generator=generator).double()
    unrolled = ttt_unroll(drafter, ids, aux, torch.zeros(1, T, dtype=torch.int64), STEPS)
    ours = torch.stack([drafter.logits(step.normed_BTH)[0] for step in unrolled], dim=1)[: T - STEPS]
    theirs = reference(name, w, ids[0].tolist(), [list(states) for states in aux[0]])
    return ours, torch.stack([torch.stack(steps) for steps in theirs])


@pytest.mark.parametrize("name", REFERENCES)
def test_prefill_and_unroll_are_the_published_ones(name: str) -> None:
    """The first step is the prefill, the further ones draft from its features; the same weights on both sides."""
    ours, theirs = both(name, DESIGNS[name])
    assert 0.3 < theirs.std() < 30
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "changed", "from_step"),
    [
        ("eagle1", {}, None),
        ("eagle1", {"norms": dataclasses.replace(DESIGNS["eagle1"].norms, input=True)}, 0),
        ("eagle1", {"norms": dataclasses.replace(DESIGNS["eagle1"].norms, output=True)}, 0),
        ("eagle3", {"recurrence": DESIGNS["eagle3_1"].recurrence}, 1),
        ("eagle3_1", {"recurrence": DESIGNS["eagle3"].recurrence}, 1),
        ("speculators", {"norms": DESIGNS["nvidia"].norms}, 0),
        ("nvidia", {"norms": DESIGNS["speculators"].norms}, 0),
        ("sliding_window", {"attention_window": "full"}, 0),
        ("sliding_window", {"attention_window": 17}, 0),
    ],
)
def test_a_neighbouring_design_is_told_apart(name: str, changed: dict, from_step: int | None) -> None:
    """Else the references would agree with anything."""
    ours, theirs = both(name, dataclasses.replace(DESIGNS[name], **changed))
    gaps = (ours - theirs).abs().amax((0, 2)).tolist()
    assert [gap > 1e-6 for gap in gaps] == [from_step is not None and k >= from_step for k in range(STEPS)]


def test_the_tests_dimensions_are_the_tiny_targets() -> None:
    config = tiny_config(DESIGNS["eagle3"])
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, GROUPS, WIDTH)
    assert config.rms_norm_eps == 1e-6 and config.rope["rope_theta"] == 10000.0
