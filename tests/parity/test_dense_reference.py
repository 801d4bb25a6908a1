"""Training against a naive implementation that shares no code with it.

The reference is plain torch, read off the papers: the keys of all steps side by side under one explicit (k+1)T wide
mask, ordinary softmax attention, the full logits of every slot of every step, each loss from its formula, and
autograd for the gradients. It takes the drafter's weights and the target's states, and nothing else of the package.

Legend: B batch, T tokens, N aux layers, H hidden, h query heads, g key heads, d head width, K steps, R rows,
D draft vocabulary, V vocabulary.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.data import Batch
from specdec.drafter import Drafter, MarkovBlock, MaskBlock, MaskConstant, PostNorm
from specdec.drafting.slots import KeptSlots, supervised
from specdec.nn.blocked import Blocked
from specdec.nn.merged import Merged
from specdec.nn.unroll import Dense, UnrollKernel
from specdec.training.confidence import ConfidenceLoss
from specdec.training.divergences import (
    ForwardKL,
    HardCrossEntropy,
    JensenShannon,
    LKAlpha,
    LKLambda,
    ReverseKL,
    TopKCrossEntropy,
    TotalVariation,
)
from specdec.training.losses import Loss, SmoothL1, SoftCrossEntropy, Term, WeightedSum
from specdec.training.step import ObjectiveConfig, TargetOutputs, TrainStep, target_outputs
from specdec.training.step_weights import Decay
from tests.plain_attention import plain_block
from tests.published import published
from tests.tiny import BLOCKS, VOCAB, presets, tiny_drafter, tiny_target, variants

# tests/drafter has that
DESIGNS = {name: spec for name, spec in (presets() | variants()).items() if name != "mtp"}
DESIGNS["dspark_reduced"] = dataclasses.replace(DESIGNS["dspark"], head="own", draft_vocab_size=40)
DESIGNS["sinks"] = dataclasses.replace(DESIGNS["sliding_window"], attention_sinks=3)
KERNELS: dict[str, Callable[[], UnrollKernel]] = {
    "dense": Dense,
    "blocked": Blocked,
    "blocked-1": lambda: Blocked(1),
    "blocked-5": lambda: Blocked(5),
    "merged": lambda: Merged(plain_block),
}
EAGLE1 = WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)])
HASS = WeightedSum([*EAGLE1.terms, Term(TopKCrossEntropy(5))])
SEVERAL = WeightedSum(
    [Term(LKLambda(), 0.7), Term(TotalVariation(), 0.0), Term(HardCrossEntropy(), 0.2)]
)


class Naive:
    """The drafter's layers from their formulas, over the weights of ``drafter``."""

    def __init__(self, drafter: Drafter) -> None:
        self.config, self.w = drafter.config, published(drafter)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """As Llama has it; a norm that the design lacks has no weight."""
        if f"{name}.weight" not in self.w:
            return x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rooted = (wide * wide).mean(-1, keepdim=True) + self.config.rms_norm_eps
        return (wide / rooted**0.5).to(x.dtype) * self.w[f"{name}.weight"].to(x.dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def fuse(self, aux_BTNH: Tensor) -> Tensor:
        n = aux_BTNH.shape[2]
        if "norms.aux.weight" in self.w:
            states = self.norm(aux_BTNH.flatten(2), "norms.aux").unflatten(-1, (n, -1)).unbind(2)
        else:
            states = [self.norm(aux_BTNH[:, :, i], f"norms.aux.{i}") for i in range(n)]
        if "fusion.scores_N" in self.w:
            shares = torch.exp(self.w["fusion.scores_N"])
            states = [sum(s * x for s, x in zip(shares / shares.sum(), states, strict=True))]
        joined = torch.cat(list(states), -1)
        return self.linear(joined, "fusion.fc") if "fusion.fc.weight" in self.w else joined

    def turn(self, x_BThd: Tensor, positions_BT: Tensor) -> Tensor:
        width = x_BThd.shape[-1]
        inverse = 1.0 / (10000.0 ** (torch.arange(0, width, 2).float() / width))
        # single precision, as published models have it
        angle = (positions_BT[..., None].float() * inverse)[:, :, None]
        cos, sin = angle.cos().to(x_BThd.dtype), angle.sin().to(x_BThd.dtype)
        a, b = x_BThd[..., : width // 2], x_BThd[..., width // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def latent(self, x: Tensor, at: str, positions_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of DeepSeek's attention, (B, T, h, their width)."""
        kind = self.config.attention
        n, r = kind.qk_nope_head_dim, kind.qk_rope_head_dim
        q = self.linear(
            self.norm(self.linear(x, f"{at}.q_a_proj"), f"{at}.q_a_layernorm"), f"{at}.q_b_proj"
        )
        both = self.linear(x, f"{at}.kv_a_proj_with_mqa")
        kv = self.linear(
            self.norm(both[..., : kind.kv_lora_rank], f"{at}.kv_a_layernorm"), f"{at}.kv_b_proj"
        )
        q, kv = q.unflatten(-1, (-1, n + r)), kv.unflatten(-1, (-1, n + kind.v_head_dim))
        halves = [*range(0, r, 2), *range(1, r, 2)]
        turned = self.turn(both[..., None, kind.kv_lora_rank :][..., halves], positions_BT)
        q = torch.cat([q[..., :n], self.turn(q[..., n:][..., halves], positions_BT)], -1)
        return q, torch.cat([kv[..., :n], turned.expand(*kv.shape[:-1], -1)], -1), kv[..., n:]

    def attend(self, x: Tensor, at: str, positions_BT: Tensor, past: list, mask: Tensor) -> Tensor:
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        if f"{at}.kv_b_proj.weight" in self.w:
            q, k, v = self.latent(x, at, positions_BT)
        else:
            q, k, v = (
                self.linear(x, f"{at}.{name}_proj").unflatten(-1, (-1, self.config.head_dim))
                for name in "qkv"
            )
            q, k = (
                self.turn(self.norm(q, f"{at}.q_norm"), positions_BT),
                self.turn(self.norm(k, f"{at}.k_norm"), positions_BT),
            )
        past.append((k, v))
        keys, values = (
            torch.cat(list(x), 1).repeat_interleave(heads // groups, 2)
            for x in zip(*past, strict=True)
        )
        scores = torch.einsum("bthd,bshd->bhts", q, keys) / self.config.head_dim**0.5
        shares = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        return self.linear(
            torch.einsum("bhts,bshd->bthd", shares, values).flatten(2), f"{at}.o_proj"
        )

    def gated(self, x: Tensor, at: str) -> Tensor:
        y = self.norm(x, f"{at}.post_attention_norm")
        gate = self.linear(y, f"{at}.mlp.gate_proj")
        return self.linear(
            gate * torch.sigmoid(gate) * self.linear(y, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj"
        )

    def step(
        self, ids_BT: Tensor, h: Tensor, positions_BT: Tensor, pasts: list, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What goes to the next step, and what the head reads."""
        e = self.norm(F.embedding(ids_BT, self.w["embed_tokens.weight"]).to(h.dtype), "norms.embed")
        f = self.norm(h, "norms.hidden")
        if "entry.fc.weight" in self.w:
            x = self.linear(torch.cat([e, f], -1), "entry.fc")
            block = self.norm(x, "norms.input")
        else:
            block, x = torch.cat([e, f], -1), f if self.config.norms.residual == "normed" else h
        for i, past in enumerate(pasts):
            at = f"layers.layers.{i}"
            if i:
                block = self.norm(x, f"layers.input_norms.{i - 1}")
            x = x + self.attend(block, f"{at}.attention", positions_BT, past, mask)
            x = x + self.gated(x, at)
        normed = self.norm(x, "norms.output")
        return (normed if isinstance(self.config.recurrence, PostNorm) else x), normed

    def blocks(self, ids_BT: Tensor, h: Tensor, rows: list[list["Place"]], K: int) -> list[Tensor]:
        """Of a block drafter: what the head reads at every node of every slot's block, the root's and the K masks', one
        block after another."""
        context, B, T = self.norm(h, "norms.hidden"), *ids_BT.shape
        made = [torch.zeros_like(h) for _ in range(1 + K)]
        for b, t in itertools.product(range(B), range(T - 1)):
            before = [s for s in range(t + 1) if rows[b][s].document == rows[b][t].document]
            tokens = torch.tensor([[int(ids_BT[b, t + 1]), *[VOCAB - 1] * K]])
            x = F.embedding(tokens, self.w["embed_tokens.weight"]).to(h.dtype)
            positions = torch.tensor(
                [
                    [rows[b][s].position for s in before]
                    + list(range(len(before), len(before) + K + 1))
                ]
            )
            for i in range(self.config.num_layers):
                block = torch.cat(
                    [context[b, before][None], self.norm(x, f"layers.input_norms.{i}")], 1
                )
                seen = torch.ones(1, block.shape[1], block.shape[1], dtype=torch.bool)
                x = (
                    x
                    + self.attend(block, f"layers.layers.{i}.attention", positions, [], seen)[
                        :, len(before) :
                    ]
                )
                x = x + self.gated(x, f"layers.layers.{i}")
            normed = self.norm(x, "norms.output")
            for k in range(1 + K):
                made[k] = made[k].index_put((torch.tensor(b), torch.tensor(t)), normed[0, k])
        return made


class Place(NamedTuple):
    """A token's document and where in it it stands."""

    document: tuple[int, int]  # its number, and where that run began
    position: int


def places(documents: list[int]) -> list[Place]:
    out: list[Place] = []
    for t, number in enumerate(documents):
        begun = out[-1].document[1] if t and documents[t - 1] == number else t
        out.append(Place((number, begun), t - begun))
    return out


def wide_mask(rows: list[list[Place]], k: int, window: int | str, sinks: int) -> Tensor:
    """(B, T, (k+1)T): of step 0 the document's causal keys within the window or among the sinks, then one's own."""
    B, T = len(rows), len(rows[0])
    mask = torch.zeros(B, T, (k + 1) * T, dtype=torch.bool)
    for b, row in enumerate(rows):
        for t in range(T):
            for s in range(t + 1):
                near = window == "full" or row[t].position + k - row[s].position < window
                mask[b, t, s] = row[t].document == row[s].document and (
                    near or row[s].position < sinks
                )
            for j in range(1, k + 1):
                mask[b, t, j * T + t] = True
    return mask


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def lk_lambda(loss: LKLambda, p: Tensor, q: Tensor, full: Tensor) -> Tensor:
    alpha = torch.minimum(full, q).sum(-1)
    w = loss.scale * torch.exp(-loss.decay * alpha.detach())
    return w * divergence(p, q) + (1 - w) * (1 - alpha)


def jensen_shannon(loss: JensenShannon, p: Tensor, q: Tensor) -> Tensor:
    m = loss.beta * p + (1 - loss.beta) * q
    return loss.beta * divergence(p, m) + (1 - loss.beta) * divergence(q, m)


# loss, p and q on the draft vocabulary (R, D), and what the target's whole distribution has there
FORMULAS: dict[type, Callable[..., Tensor]] = {
    SoftCrossEntropy: lambda loss, p, q, full: -(p * q.log()).sum(-1),
    ForwardKL: lambda loss, p, q, full: divergence(p, q),
    ReverseKL: lambda loss, p, q, full: divergence(q, p),
    JensenShannon: lambda loss, p, q, full: jensen_shannon(loss, p, q),
    TotalVariation: lambda loss, p, q, full: 1 - torch.minimum(full, q).sum(-1),
    HardCrossEntropy: lambda loss, p, q, full: torch.stack(
        [-q[r, i].log() for r, i in enumerate(p.argmax(-1))]
    ),
    TopKCrossEntropy: lambda loss, p, q, full: (
        -(p * q.log() * (p >= p.sort(-1).values[:, [-loss.k]])).sum(-1)
    ),
    LKAlpha: lambda loss, p, q, full: -torch.minimum(full, q).sum(-1).log(),
    LKLambda: lk_lambda,
}


def reference(
    drafter: Drafter, batch: Batch, teacher: TargetOutputs, head_VH: Tensor, recipe: ObjectiveConfig,
    drawn_BT: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The loss by its definition."""
    naive, ids_D = Naive(drafter), drafter.vocab.target_ids_D
    rows = [places(documents) for documents in batch.documents_BT.tolist()]
    masks, T = batch.loss_mask_BT.tolist(), batch.ids_BT.shape[1]
    with torch.autocast("cpu", enabled=False):
        target_BTV = teacher.final_BTH @ head_VH.T
    h = naive.fuse(teacher.aux_BTNH.to(drafter.lm_head.weight.dtype))
    pasts: list[list] = [[] for _ in range(drafter.config.num_layers)]
    factors = recipe.weights.factors(recipe.steps)
    top, bottom = torch.zeros((), dtype=torch.float64), 0.0
    # the confidence head's loss is a mean over all trained slots, whatever the draft vocabulary has
    confidence_top, confidence_bottom = torch.zeros((), dtype=torch.float64), 0.0
    parts = recipe.loss.terms if isinstance(recipe.loss, WeightedSum) else [Term(recipe.loss)]
    recurrence = drafter.config.recurrence
    block = isinstance(recurrence, MaskBlock)
    markov = isinstance(recurrence, MarkovBlock)
    of_blocks = naive.blocks(batch.ids_BT, h, rows, recurrence.masks) if block else []
    of_blocks = of_blocks if markov and recurrence.root_drafts else of_blocks[1:]
    for k in range(recipe.steps):
        ids_BT = F.pad(batch.ids_BT[:, 1 + k :], (0, min(T, 1 + k)))
        positions_BT = torch.tensor([[place.position + k for place in row] for row in rows])
        mask = wide_mask(rows, k, drafter.config.attention_window, drafter.config.attention_sinks)
        if k and isinstance(drafter.config.recurrence, MaskConstant):
            ids_BT = torch.full_like(ids_BT, VOCAB - 1)
            h = naive.fuse(naive.w["recurrence.hidden.weight"].expand(*ids_BT.shape, -1, -1))
        h, normed = (h, of_blocks[k]) if block else naive.step(ids_BT, h, positions_BT, pasts, mask)
        draft_BTD = naive.linear(normed, "lm_head")
        if markov:  # the token before the draft is known to both heads
            embedded = F.embedding(ids_BT, naive.w["recurrence.previous.weight"])
            draft_BTD = draft_BTD + embedded @ naive.w["recurrence.transition.weight"].T
            read = torch.cat([normed, embedded], -1)
            estimate_BT = naive.linear(read, "recurrence.confidence")[..., 0].sigmoid()
        every = [
            (b, t)
            for b, row in enumerate(rows)
            for t in range(T - 2 - k)
            if row[t].document[0] >= 0 and row[t].document == row[t + 2 + k].document
            if masks[b][t + 1 + k] and masks[b][t + 2 + k]
            if drawn_BT is None
            or drawn_BT[b, t] <= (recipe.keep if block else max(recipe.keep**k, 0.2))
        ]
        used = [
            (b, t)
            for b, t in every
            if not recipe.in_vocab or int(target_BTV[b, t + 1 + k].argmax()) in ids_D.tolist()
        ]
        confidence = [part for part in parts if isinstance(part.loss, ConfidenceLoss)]
        if confidence and every:
            b, t = torch.tensor(every).T
            full = target_BTV[b, t + 1 + k].double().softmax(-1)[:, ids_D]
            q = draft_BTD[b, t].detach().double().softmax(-1)
            chance, estimate = torch.minimum(full, q).sum(-1), estimate_BT[b, t]
            loss_R = -(chance * estimate.log() + (1 - chance) * (1 - estimate).log())
            confidence_top = confidence_top + factors[k] * confidence[0].weight * loss_R.sum()
            confidence_bottom += factors[k] * len(every)
        if not used:
            continue
        b, t = torch.tensor(used).T
        target_RV = target_BTV[b, t + 1 + k].double()
        p, full = target_RV[:, ids_D].softmax(-1), target_RV.softmax(-1)[:, ids_D]
        q = draft_BTD[b, t].double().softmax(-1)
        for part in parts:
            if isinstance(part.loss, SmoothL1):
                gap = (h[b, t].double() - teacher.final_BTH[b, t + 1 + k].double()).abs()
                beta = part.loss.beta
                loss_R = torch.where(gap < beta, gap**2 / (2 * beta), gap - beta / 2).mean(-1)
            elif isinstance(part.loss, ConfidenceLoss):
                continue
            else:
                loss_R = FORMULAS[type(part.loss)](part.loss, p, q, full)
            top = top + factors[k] * part.weight * loss_R.sum()
        bottom += factors[k] * len(used)
    return top / bottom + confidence_top / max(confidence_bottom, 1e-30)


class Lesson(NamedTuple):
    drafter: Drafter
    batch: Batch
    teacher: TargetOutputs
    head_VH: Tensor


def lesson(
    name: str,
    recipe: ObjectiveConfig,
    dtype: torch.dtype = torch.float64,
    measure: bool = False,
    plain: bool = False,
) -> Lesson:
    """Packed documents with padding, masked in part, beyond the window where there is one; or plain text, all of it
    supervised, so long that every step runs every slot."""
    T = 48 if plain else 26 if name in ("sliding_window", "sinks") else 13
    target = tiny_target(dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    drafter = tiny_drafter(DESIGNS[name]).to(dtype).requires_grad_()
    drafter.lm_head.requires_grad_(drafter.config.head == "own")
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (3, T), generator=generator)
    mask = torch.rand(3, T, generator=generator) < 0.8
    documents = torch.tensor([[0] * T, [0] * 4 + [1] * (T - 4), [0] * (T - 7) + [1] * 4 + [-1] * 3])
    if plain:
        mask, documents = torch.ones_like(mask), torch.zeros_like(documents)
    batch = Batch(ids, mask & (documents >= 0), documents)
    return Lesson(
        drafter,
        batch,
        target_outputs(target, drafter, batch, recipe, measure),
        target.head_weight(),
    )


def gradients(loss: Tensor, drafter: Drafter) -> dict[str, Tensor]:
    named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def check(
    name: str,
    recipe: ObjectiveConfig,
    measure: bool = False,
    plain: bool = False,
    drawn_BT: Tensor | None = None,
) -> None:
    """Loss and every gradient, to ten digits."""
    drafter, batch, teacher, head_VH = lesson(name, recipe, measure=measure, plain=plain)
    got = TrainStep(drafter, recipe)(batch, teacher, measure, drawn_BT).loss
    want = reference(drafter, batch, teacher, head_VH, recipe, drawn_BT)
    assert math.isclose(float(got.detach()), float(want.detach()), rel_tol=1e-10)
    ours, theirs = gradients(got, drafter), gradients(want, drafter)
    for key, gradient in theirs.items():
        largest = float(gradient.abs().max())
        assert largest > 0, key
        torch.testing.assert_close(
            ours[key], gradient, rtol=0, atol=1e-10 * largest, msg=lambda m, key=key: key + m
        )


DISTRIBUTION_LOSSES = [
    SoftCrossEntropy(),
    ForwardKL(),
    ReverseKL(),
    JensenShannon(),
    JensenShannon(0.3),
    TotalVariation(),
    HardCrossEntropy(),
    TopKCrossEntropy(4),
    LKAlpha(),
    LKLambda(),
    LKLambda(0.5, 1.0),
    SEVERAL,
]


def losses_of(name: str) -> Loss:
    """Several losses, and that of the confidence head where a design has one."""
    confidence = [Term(ConfidenceLoss(), 0.7)] if name.startswith("dspark") else []
    return WeightedSum([*SEVERAL.terms, *confidence])


@pytest.mark.parametrize("loss", DISTRIBUTION_LOSSES, ids=str)
@pytest.mark.parametrize("name", ["eagle3_1", "eagle1"])
def test_every_loss_of_the_distribution(name: str, loss: Loss) -> None:
    check(name, ObjectiveConfig(loss, 3, kernel=Blocked(5)))


@pytest.mark.parametrize(
    "loss", [SmoothL1(), SmoothL1(0.2), EAGLE1, HASS], ids=["one", "narrow", "eagle1", "hass"]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_every_loss_of_the_state(loss: Loss, steps: int) -> None:
    check("eagle1", ObjectiveConfig(loss, steps, kernel=Blocked(5)))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", ["eagle3_1", "sinks"])
def test_every_path_of_the_attention(
    name: str, kernel: Callable[[], UnrollKernel], recompute: bool
) -> None:
    check(name, ObjectiveConfig(steps=4, kernel=kernel(), recompute=recompute))


@pytest.mark.parametrize("kernel", ["dense", "blocked-5", "merged"])
@pytest.mark.parametrize("name", ["eagle1", "eagle3_1", "sliding_window"])
def test_plain_text_of_which_no_slot_is_left_out(name: str, kernel: str) -> None:
    documents = torch.zeros(3, 48, dtype=torch.int64)
    assert (
        KeptSlots.of(torch.stack([supervised(documents == 0, documents, k) for k in range(3)]))
        is None
    )
    check(name, ObjectiveConfig(steps=3, kernel=KERNELS[kernel]()), plain=True)


@pytest.mark.parametrize(
    "name", sorted(set(DESIGNS) - {"eagle1", "eagle3", "eagle3_1", "sliding_window", "sinks"})
)
def test_every_other_design(name: str) -> None:
    check(name, ObjectiveConfig(losses_of(name), 3, kernel=Blocked(5), recompute=True))


@pytest.mark.parametrize(
    ("plain", "recompute", "kernel"),
    [(False, True, "dense"), (False, False, "merged"), (True, False, "blocked-5")],
)
@pytest.mark.parametrize("name", ["peagle_3_1", "two_layer", *BLOCKS])
def test_slots_that_a_step_drops(name: str, plain: bool, kernel: str, recompute: bool) -> None:
    """No later step has them, and their keys of step 0 stay."""
    drawn_BT = torch.rand(3, 48 if plain else 13, generator=torch.Generator().manual_seed(5))
    recipe = ObjectiveConfig(
        losses_of(name), steps=4, kernel=KERNELS[kernel](), recompute=recompute, keep=0.6
    )
    check(name, recipe, measure=True, plain=plain, drawn_BT=drawn_BT)


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("in_vocab", [False, True])
@pytest.mark.parametrize("loss", [SoftCrossEntropy(), SEVERAL], ids=["draft", "whole"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_every_pass_over_the_vocabulary(
    decay: float, loss: Loss, in_vocab: bool, measure: bool
) -> None:
    """Only the draft vocabulary's rows, or all with their mass, or all with the most likely; watched or not."""
    check(
        "eagle3",
        ObjectiveConfig(loss, 3, Decay(decay), in_vocab, Blocked(5), piece_bytes=1),
        measure,
    )


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Relative distance of two sets of gradients."""
    squares = [
        ((one[key].double() - other[key].double()) ** 2).sum() / (other[key].double() ** 2).sum()
        for key in other
    ]
    return float(torch.stack(squares).mean() ** 0.5)


@pytest.mark.parametrize("kernel", ["dense", "blocked", "blocked-5"])
@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "true"])
@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_bfloat16_is_as_good_as_a_plain_bfloat16(name: str, mixed: bool, kernel: str) -> None:
    """The error against float64, of loss and gradients, is not above the naive implementation's in bfloat16."""
    recipe = ObjectiveConfig(EAGLE1 if name == "eagle1" else SEVERAL, 3, kernel=KERNELS[kernel]())
    drafter, batch, teacher, head_VH = lesson(name, recipe, torch.float32)
    if not mixed:
        drafter.bfloat16()
        teacher = teacher._replace(aux_BTNH=teacher.aux_BTNH.bfloat16())
    exact = tiny_drafter(DESIGNS[name])
    exact.load_state_dict(drafter.state_dict())
    exact.requires_grad_().lm_head.requires_grad_(drafter.lm_head.weight.requires_grad)
    true = reference(exact, batch, teacher, head_VH, recipe)
    with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
        ours = TrainStep(drafter, recipe)(batch, teacher, measure=False).loss
        plain = reference(drafter, batch, teacher, head_VH, recipe)
    by_true, by_ours, by_plain = (
        gradients(true, exact),
        gradients(ours, drafter),
        gradients(plain, drafter),
    )
    assert all(
        by_ours[key].dtype == p.dtype for key, p in drafter.named_parameters() if p.requires_grad
    )
    rounding = torch.finfo(torch.bfloat16).eps * float(true.detach())
    off, plainly_off = (abs(float((loss - true).detach())) for loss in (ours, plain))
    assert 0 < off < plainly_off + rounding
    assert 0 < apart(by_ours, by_true) < 1.3 * apart(by_plain, by_true) < 0.02
