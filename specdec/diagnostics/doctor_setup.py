"""The set-up that the doctor examines, and the checks of what its training gets: the target's states, the masks, the
draft vocabulary.

Legend: B rows, T tokens, N aux layers, H hidden, K unroll steps, D draft vocabulary, V vocabulary, C positions.
"""

import copy
import dataclasses
import math
import operator
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.data import Batch, ChatData, TextData, TokenData
from specdec.data.chat import conversation, encode
from specdec.data.layouts import ChatConversation
from specdec.data.loader import ResumableLoader
from specdec.data.rows import find_sources, read_rows
from specdec.drafter import Drafter, choose, load_drafter
from specdec.embedded.corpus import EmbeddedData
from specdec.evaluation.callback import decoding_copy
from specdec.features.source import CachedSource
from specdec.features.store import DTYPES
from specdec.nn.optimizers import hidden_matrix
from specdec.nn.unroll import unroll_kernel
from specdec.nn.view import View
from specdec.target.rounding import compare_boundary, median_error, own_states
from specdec.training.building import FromDrafter
from specdec.training.module import DrafterModule
from specdec.training.step import target_outputs
from specdec.training.ttt import ORACLE, ttt_unroll
from specdec.utils.text import how_many

ROWS = 4  # of the loader's first batch
SAMPLE = 96  # tokens of the one document on which the drafter itself is examined
RULES = {"<=": operator.le, ">=": operator.ge, ">": operator.gt, "<": operator.lt}
# documents whose states are compared, and tokens of each
DOCUMENTS = 8
LENGTH = 512
CONVERSATIONS = 64  # rendered again, and compared
ALIKE = 0.98  # of the supervised tokens are those found here
SHIFTED = 0.8  # of them, if the mask is moved by a token
COVERED = 0.9  # of what the best draft vocabulary of this size covers


class CheckResult(StrEnum):
    """How a check came out."""

    SOUND = "sound"
    FAULTY = "FAULTY"
    UNCHECKED = "not checked"


class Finding(NamedTuple):
    """One thing that was checked."""

    what: str
    result: CheckResult
    figure: float | None = None
    wanted: str = ""
    # of a fault its likely cause and what to do; of what cannot be checked why; else a remark
    note: str = ""
    check: str = ""  # the name of the check that found it, which whoever runs the check fills in


def judged(
    what: str, figure: float, rule: str, bound: float, fault: str, remark: str = ""
) -> Finding:
    """Sound, with the remark, if the figure keeps its bound, which NaN never does; else faulty."""
    sound = not math.isnan(figure) and RULES[rule](figure, bound)
    result = CheckResult.SOUND if sound else CheckResult.FAULTY
    return Finding(what, result, figure, f"{rule} {bound:.4g}", remark if sound else fault)


def unchecked(what: str, why: str, figure: float | None = None) -> Finding:
    """What cannot be said here."""
    return Finding(what, CheckResult.UNCHECKED, figure, note=why)


class PackedDocument(NamedTuple):
    """One document as a batch has it."""

    row: int
    first: int  # its first token's place in the row
    ids_T: Tensor
    loss_mask_T: Tensor


def documents(batch: Batch) -> Iterator[PackedDocument]:
    """The documents of a batch."""
    for row, (ids_T, mask_T, documents_T) in enumerate(zip(*batch, strict=True)):
        for number in documents_T[documents_T >= 0].unique().tolist():
            (places,) = (documents_T == number).nonzero(as_tuple=True)
            yield PackedDocument(row, int(places[0]), ids_T[places], mask_T[places])


@dataclasses.dataclass
class SetUp:
    """What would be trained.

    Args:
        drafter: as training begins with it, in training's own dtype of weights; no check may change it but the last.
        batch: the first rows that the training loader hands out, on the target's device.
        trainer: the trainer's settings: precision, accelerator and gradient clipping.
        saved: whether the drafter begins with a saved one's weights rather than the target's.
        seconds: for the overfitted sample.
    """

    module: DrafterModule
    data: TokenData
    drafter: Drafter
    batch: Batch
    trainer: Any
    saved: bool
    seconds: float

    def __post_init__(self) -> None:
        self.target = self.module.target
        self.objective = self.module.objective

    def sample(self) -> Batch:
        """A row of one document: real text around where its supervised tokens begin."""
        found = max(
            documents(self.batch), key=lambda one: min(int(one.loss_mask_T.sum()), SAMPLE // 2)
        )
        begin = int(found.loss_mask_T.long().argmax())
        start = max(0, min(begin - SAMPLE // 2, len(found.ids_T) - SAMPLE))
        ids_1T = found.ids_T[None, start : start + SAMPLE]
        return Batch(
            ids_1T, found.loss_mask_T[None, start : start + SAMPLE], torch.zeros_like(ids_1T)
        )

    def aux(self, ids_1T: Tensor) -> Tensor:
        """The target's states of one document, (1, T, N, H) float64, as the drafter asks for them."""
        config = self.drafter.config
        view = View.packed(torch.zeros_like(ids_1T))
        return self.target.forward(
            ids_1T, view, config.aux_layers, config.fusion.final_norm
        ).aux_BTNH.double()

    def precise(self) -> Drafter:
        """The drafter in float64."""
        return copy.deepcopy(self.drafter).to(torch.float64)

    def decoding(self) -> Drafter:
        """The drafter as it decodes, in the target's dtype."""
        return decoding_copy(self.drafter, self.target).eval()

    def lively(self) -> Drafter:
        """The drafter in float64 with norm weights away from one, so that a norm left out shows.

        Hidden matrices that start at random get unit gain, so that a part of a block left out shows.
        """
        drafter = self.precise()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in drafter.named_parameters():
                if weight.ndim == 1:
                    weight.copy_(
                        0.5 + torch.rand(weight.shape, generator=generator, dtype=torch.float64)
                    )
                elif hidden_matrix(name, weight) and not self.saved:
                    weight.div_(weight.square().mean().sqrt() * weight.shape[1] ** 0.5)
        return drafter.requires_grad_(False)


def set_up(
    module: DrafterModule, data: TokenData, trainer: Any, drafter: str | None, seconds: float
) -> SetUp:
    """Build what ``specdec fit`` would train: target, data, drafter and features.

    Args:
        drafter: a directory of a saved drafter, in place of the one that the run would make.

    Raises:
        ValueError: ``specdec fit`` would refuse the set-up, in the same words.
    """
    gpu = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    module.target.to(device)
    if drafter is not None:
        module.spec = load_drafter(drafter).config.design()
        module.objective.loss.check(module.spec)
        module.start = FromDrafter(drafter)
        module.train_head = module.train_head and module.spec.head == "own"
    data.prepare(module.tokenizer)
    made = module.build(data)
    module.open(data, made)
    module.objective = dataclasses.replace(
        module.objective, kernel=unroll_kernel(module.attention, device)[1]
    )
    batch = Batch(*(column[:ROWS].to(device) for column in next(iter(data.train_dataloader()))))
    return SetUp(
        module,
        data,
        made.to(device),
        batch,
        trainer,
        isinstance(module.start, FromDrafter),
        seconds,
    )


@torch.no_grad()
def logits_of(drafter: Drafter, ids_1T: Tensor, aux_1TNH: Tensor, steps: int) -> Tensor:
    """The steps' logits over one document, (K, T, D), by the plainest of the kernels."""
    unroll = ttt_unroll(drafter, ids_1T, aux_1TNH, torch.zeros_like(ids_1T), steps, ORACLE)
    return torch.stack([drafter.logits(step.normed_BTH[0]) for step in unroll])


@torch.no_grad()
def taps(setup: SetUp) -> Iterator[Finding]:
    """The target's states that training gets are those of the stated boundaries.

    Hugging Face's own ``hidden_states`` are the reference: boundary b is ``hidden_states[b]``, and the last one is
    normed there.
    """
    target = setup.target
    drafter = setup.drafter
    source = setup.module.source
    found = list(islice(documents(setup.batch), DOCUMENTS))
    outputs = target_outputs(target, drafter, setup.batch, setup.objective, False, source)
    kept = DTYPES[source.store.contract.dtype] if isinstance(source, CachedSource) else None
    *allowed, allowed_last, _ = own_states(target, kept).allowed
    allowed[-1] = allowed_last  # the last is compared after the final norm
    outs = [
        target.model(d.ids_T[None, :LENGTH], output_hidden_states=True, use_cache=False)
        for d in found
    ]
    states = [[state[0] for state in out.hidden_states] for out in outs]  # by document and boundary

    def cut(x_BTH: Tensor) -> list[Tensor]:
        """A state of training's, document by document."""
        return [
            x_BTH[d.row, d.first : d.first + min(len(d.ids_T), LENGTH)].to(target.dtype)
            for d in found
        ]

    for n, b in enumerate(drafter.config.aux_layers):
        normed = b < target.num_layers or drafter.config.fusion.final_norm
        ours = [x if normed else target.final_norm(x) for x in cut(outputs.aux_BTNH[:, :, n])]
        yield _boundary(b, ours, states, allowed[b])
    last = cut(outputs.final_BTH)
    own = [one[-1] for one in states]
    fault = "the target's distribution is not taken from its last state after the final norm"
    if max(map(median_error, map(target.final_norm, last), own)) <= allowed_last:
        fault = "the final norm is missing: Target.logits expects the last state after it"
    yield judged(
        "the last state that training gets is normed once",
        max(map(median_error, last, own)),
        "<=",
        allowed_last,
        fault,
    )
    if setup.saved:
        yield _trained(setup, found)


def _boundary(b: int, ours: list[Tensor], states: list[list[Tensor]], allowed: float) -> Finding:
    """A boundary's states are the model's own, and farther from all that they may be taken for."""
    own = {layer: [document[layer] for document in states] for layer in range(len(states[0]))}
    difference = compare_boundary(b, ours, own)
    worst = difference.error
    nearest = difference.nearest
    what = (
        f"boundary {b}: training's state is hidden_states[{b}] ({how_many(len(ours), 'document')})"
    )
    if difference.is_of_another:
        fault = f"it is boundary {nearest}'s: the layer number is off by {nearest - b:+d} where states are taken"
        return judged(what, worst, "<", difference.nearest_error, fault)
    fault = "they are no boundary's: other tokens, rows shifted, another document's or target's: make them again"
    remark = f"the nearest other is boundary {nearest}, {difference.nearest_error:.2g} off"
    return judged(what, worst, "<=", allowed, fault, remark)


def _trained(setup: SetUp, found: list[PackedDocument]) -> Finding:
    """A trained drafter agrees best with the states that it was trained on."""
    target = setup.target
    config = setup.drafter.config
    drafter = setup.precise()
    scores: dict[int, Tensor] = {}  # by how far off, of every token that the drafter knows
    for by in (0, -1, 1):
        layers = tuple(b + by for b in config.aux_layers)
        parts = []
        if not 0 <= layers[0] <= layers[-1] <= target.num_layers:
            continue
        for ids_1T in (document.ids_T[None, :LENGTH] for document in found):
            out = target.forward(
                ids_1T, View.packed(0 * ids_1T), layers, config.fusion.final_norm and by == 0
            )
            due_T = drafter.vocab.to_draft(target.logits(out.final_BTH[:, 1:])[0].argmax(-1))
            log_q_TD = logits_of(drafter, ids_1T, out.aux_BTNH.double(), 1)[0, :-1].log_softmax(-1)
            parts.append(log_q_TD[due_T >= 0, due_T[due_T >= 0]])
        scores[by] = torch.cat(parts)
    what = "the saved drafter drafts best from its stated boundaries, not from those one higher or lower (nats)"
    means = {by: float(x.mean()) for by, x in scores.items()}
    best = max((by for by in means if by), key=means.__getitem__, default=0)
    if best == 0 or max(means.values()) < 1 - math.log(config.draft_vocab_size):
        return unchecked(what, "it knows too little of these rows", means[0])
    lead_N = scores[0] - scores[best]
    # two standard errors
    if abs(float(lead_N.mean())) <= 2 * float(lead_N.std()) / len(lead_N) ** 0.5:
        return unchecked(what, f"boundaries {best:+d} fit as well, {means[best]:.4g}", means[0])
    fault = f"it was trained on boundaries {best:+d} from those stated: import it again with other --aux_layers"
    return judged(what, means[0], ">", means[best], fault, f"the bound: boundaries {best:+d}")


def masks(setup: SetUp) -> Iterator[Finding]:
    """What is supervised is what the assistant writes: in the loader's rows, against conversations rendered here."""
    batch = setup.batch
    data = setup.data
    real_BT = batch.documents_BT >= 0
    share = float(batch.loss_mask_BT[real_BT].double().mean())
    what = f"share of supervised tokens in the loader's rows of {type(data).__name__}"
    yield judged(
        what,
        share,
        ">",
        0,
        "nothing is supervised: the template marks no answer, or the mask was lost",
    )
    if isinstance(data, TextData | EmbeddedData):
        size = len(data.prefix)
        behind_BT = real_BT[:, size:] & (
            batch.documents_BT[:, size:] == batch.documents_BT.roll(size, 1)[:, size:]
        )
        share = float(batch.loss_mask_BT[:, size:][behind_BT].double().mean())
        yield judged(
            what,
            share,
            ">=",
            1,
            "text is supervised whole: the mask is shifted or cut where it is batched",
        )
    padding = float((batch.loss_mask_BT & ~real_BT).sum())
    yield judged(
        "supervised tokens in padding", padding, "<=", 0, "padding is trained on: mask it out"
    )
    if not isinstance(data, ChatData):
        return
    again = "supervised tokens are those between generation prompt and end of turn, rendered and tokenised again"
    yield judged(
        what,
        share,
        "<",
        1,
        "every token is supervised, prompts too: the mask was lost; see --samples",
    )
    if not (pairs := list(islice(_rendered(setup, data), CONVERSATIONS))):
        why = f"none of the first {CONVERSATIONS} conversations is in the training rows as it is rendered here"
        yield unchecked(again, f"{why}: look at --samples")
        return
    ours_T, own_T = (torch.cat(column) for column in zip(*pairs, strict=True))
    alike = {
        by: float((ours_T & own_T.roll(by)).sum() / (ours_T | own_T.roll(by)).sum())
        for by in (0, -1, 1)
    }
    best = max(alike, key=alike.__getitem__)
    least = ALIKE
    fault = "other tokens are supervised than the assistant writes, of another rendering or lost before the batch"
    if best and alike[best] >= SHIFTED:
        fault = f"the mask is shifted by {best:+d} token: token j is supervised where x[j] itself is the assistant's"
        least = alike[best]
    yield judged(f"{again} ({how_many(len(pairs), 'conversation')})", alike[0], ">=", least, fault)
    ended = float(ours_T[own_T & ~F.pad(own_T[1:], (0, 1))].double().mean())
    fault = "the end-of-turn token is not supervised: such a drafter never proposes to stop"
    yield judged("share of turns whose last token is supervised", ended, ">=", ALIKE, fault)


def first_conversations(
    data: ChatData, count: int, left_out: list[str] | None
) -> Iterator[ChatConversation]:
    """The first conversations of the training data; ``left_out`` gets what is wrong with broken rows."""
    read = partial(conversation, layout=data.layout)
    rows = (
        row for source in find_sources(data.patterns) for row in read_rows(source, read, left_out)
    )
    return islice(rows, count)


def _rendered(setup: SetUp, data: ChatData) -> Iterator[tuple[Tensor, Tensor]]:
    """The masks of training documents, (T,) each, as the loader has them and as they are rendered here."""

    def key(ids_T: Tensor) -> bytes:
        return ids_T.to(torch.int32).cpu().numpy().tobytes()

    left_out: list[str] | None = [] if data.broken == "drop" else None
    made = encode(
        first_conversations(data, CONVERSATIONS, left_out),
        setup.module.tokenizer,
        data.seq_len,
        turns=data.turns,
        left_out=left_out,
    )
    known = {key(one.ids_T): one.loss_mask_T for one in made}
    for batch in ResumableLoader(data.splits.train, data.batch_size, shuffle=False):
        yield from (
            (d.loss_mask_T.cpu(), known[key(d.ids_T)])
            for d in documents(batch)
            if key(d.ids_T) in known
        )


def vocabulary(setup: SetUp) -> Iterator[Finding]:
    """The draft vocabulary covers the data, and the head's rows are its tokens'."""
    drafter = setup.drafter
    target = setup.target
    ids_D = drafter.vocab.target_ids_D.cpu()
    V = drafter.config.vocab_size
    counts_V = setup.data.supervised_counts(V)
    best_D = choose(counts_V, len(ids_D), target.eos_token_ids)
    best, share = (
        float(counts_V[of].sum() / counts_V.sum().clamp_min(1)) for of in (best_D, ids_D)
    )
    what = "share of the supervised tokens of the training data that the draft vocabulary has"
    fault = "it was counted on other text, or with another tokenizer: train from the target (model.start FromTarget)"
    if missing := sorted(set(target.eos_token_ids) - set(ids_D.tolist())):
        share = -1.0
        fault = f"it lacks the end-of-text tokens {missing}: no draft proposes to stop"
    yield judged(what, share, ">=", COVERED * best, fault, f"the best of this size: {best:.4f}")
    if drafter.config.hidden_size == target.hidden_size and not (
        setup.saved and drafter.config.head == "own"
    ):
        ours_DH = drafter.lm_head.weight.detach()
        theirs_DH = target.head_weight()[drafter.vocab.target_ids_D]
        wrong = int((ours_DH != theirs_DH.to(ours_DH)).any(-1).sum())
        fault = "so many rows are another token's: take the head's rows at vocab.target_ids_D"
        yield judged(
            "row j of the head is the target's row of the token that j stands for",
            wrong,
            "<=",
            0,
            fault,
        )
