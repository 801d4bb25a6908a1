"""The doctor's checks of what training gets: the target's states, the masks, the draft vocabulary.

Legend: B rows, T tokens, N aux layers, H hidden, D draft vocabulary, V vocabulary.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from specdec.data import ChatData, TextData
from specdec.data.chat import Report, conversation, encode
from specdec.data.layouts import ChatConversation
from specdec.data.loader import ResumableLoader
from specdec.data.rendering import ChatTemplateError
from specdec.data.rows import find_sources, read_rows
from specdec.data.said import TurnError
from specdec.data.template import Template, template_of
from specdec.diagnostics.doctor_setup import (
    Finding,
    Findings,
    PackedDocument,
    SetUp,
    documents,
    judged,
    last_supervised,
    logits_of,
    turn_ends,
    unchecked,
)
from specdec.drafter import most_frequent_ids
from specdec.embedded.corpus import EmbeddedData
from specdec.features.contract import DTYPES
from specdec.features.source import CachedSource
from specdec.nn.view import View
from specdec.target.rounding import compare_boundary, median_error, own_states
from specdec.training.step import target_outputs
from specdec.utils.text import how_many

DOCUMENTS = 8  # whose states are compared
LENGTH = 512  # tokens of each
CONVERSATIONS = 64  # rendered again, and compared
ALIKE = 0.98  # least share of the supervised tokens that are found here
SHIFTED = 0.8  # share of them, if the mask is moved by a token
COVERED = 0.9  # least share of what the best draft vocabulary of this size covers


@torch.no_grad()
def taps(setup: SetUp) -> Findings:
    """The target's states that training gets are those of the stated boundaries.

    Hugging Face's own ``hidden_states`` are the reference: boundary b is ``hidden_states[b]``, and the last one is
    normed there.
    """
    target = setup.target
    drafter = setup.drafter
    source = setup.module.source
    compared = list(islice(documents(setup.batch), DOCUMENTS))
    outputs = target_outputs(target, drafter, setup.batch, setup.objective, False, source)
    stored_dtype = DTYPES[source.store.contract.dtype] if isinstance(source, CachedSource) else None
    *allowed, allowed_last, _ = own_states(target, stored_dtype).allowed
    allowed[-1] = allowed_last  # the last is compared after the final norm
    states = []  # by document and boundary
    for document in compared:
        ids_1T = document.ids_T[None, :LENGTH]
        out = target.model(ids_1T, output_hidden_states=True, use_cache=False)
        states.append([state_1TH[0] for state_1TH in out.hidden_states])

    def by_document(x_BTH: Tensor) -> list[Tensor]:
        """Cut one of training's states into documents."""
        cut = []
        for document in compared:
            end = document.first + min(len(document.ids_T), LENGTH)
            cut.append(x_BTH[document.row, document.first : end].to(target.dtype))
        return cut

    for n, b in enumerate(drafter.config.aux_layers):
        ours = by_document(outputs.aux_BTNH[:, :, n])
        if b == target.num_layers and not drafter.config.fusion.final_norm:
            ours = [target.final_norm(x_TH) for x_TH in ours]
        yield _boundary(b, ours, states, allowed[b])
    last = by_document(outputs.final_BTH)
    final = [of_document[-1] for of_document in states]
    fault = "the target's distribution is not taken from its last state after the final norm"
    if max(map(median_error, map(target.final_norm, last), final)) <= allowed_last:
        fault = "the final norm is missing: Target.logits expects the last state after it"
    yield judged(
        "the last state that training gets is normed once",
        max(map(median_error, last, final)),
        "<=",
        allowed_last,
        fault,
    )
    if setup.saved:
        yield _trained(setup, compared)


def _boundary(b: int, ours: list[Tensor], states: list[list[Tensor]], allowed: float) -> Finding:
    """Check that a boundary's states are the model's own, and not another boundary's."""
    difference = compare_boundary(b, ours, dict(enumerate(map(list, zip(*states, strict=True)))))
    worst = difference.error
    nearest = difference.nearest
    what = (
        f"boundary {b}: training's state is hidden_states[{b}] ({how_many(len(ours), 'document')})"
    )
    if difference.is_of_another:
        return judged(
            what,
            worst,
            "<",
            difference.nearest_error,
            f"it is boundary {nearest}'s: the layer number is off by {nearest - b:+d} where states are taken",
        )
    return judged(
        what,
        worst,
        "<=",
        allowed,
        "they are no boundary's: other tokens, rows shifted, another document's or target's: make them again",
        f"the nearest other is boundary {nearest}, {difference.nearest_error:.2g} off",
    )


def _trained(setup: SetUp, compared: list[PackedDocument]) -> Finding:
    """Check that a trained drafter agrees best with the states of its stated boundaries."""
    target = setup.target
    config = setup.drafter.config
    drafter = setup.precise()
    # of every token that the drafter knows, by how far off the boundaries are
    scores: dict[int, Tensor] = {}
    for by in (0, -1, 1):
        layers = tuple(b + by for b in config.aux_layers)
        parts = []
        if not 0 <= layers[0] <= layers[-1] <= target.num_layers:
            continue
        final_norm = config.fusion.final_norm and by == 0
        for document in compared:
            ids_1T = document.ids_T[None, :LENGTH]
            out = target.forward(ids_1T, View.packed(0 * ids_1T), layers, final_norm)
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
    # Two standard errors decide.
    if abs(float(lead_N.mean())) <= 2 * float(lead_N.std()) / len(lead_N) ** 0.5:
        return unchecked(what, f"boundaries {best:+d} fit as well, {means[best]:.4g}", means[0])
    return judged(
        what,
        means[0],
        ">",
        means[best],
        f"it was trained on boundaries {best:+d} from those stated: import it again with other --aux_layers",
        f"the bound: boundaries {best:+d}",
    )


def masks(setup: SetUp) -> Findings:
    """The loader's rows supervise what the assistant writes, as conversations that are rendered again show."""
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
        documents_BT = batch.documents_BT
        same_BT = documents_BT[:, size:] == documents_BT.roll(size, 1)[:, size:]
        behind_BT = real_BT[:, size:] & same_BT
        behind_share = float(batch.loss_mask_BT[:, size:][behind_BT].double().mean())
        yield judged(
            what, behind_share, ">=", 1, "text is supervised whole: the mask is shifted or cut where it is batched"
        )  # fmt: skip
    padding = float((batch.loss_mask_BT & ~real_BT).sum())
    yield judged(
        "supervised tokens in padding", padding, "<=", 0, "padding is trained on: mask it out"
    )
    if isinstance(data, ChatData):
        yield judged(
            what,
            share,
            "<",
            1,
            "every token is supervised, prompts too: the mask was lost; see --samples",
        )
        yield from _masks_of_conversations(setup, data)


def _masks_of_conversations(setup: SetUp, data: ChatData) -> Findings:
    """Compare the loader's masks with those of conversations that are rendered again."""
    what = "supervised tokens are those between generation prompt and end of turn, rendered and tokenized again"
    pairs = list(islice(_rendered(setup, data), CONVERSATIONS))
    if not pairs:
        why = f"none of the first {CONVERSATIONS} conversations is in the training rows as it is rendered here"
        yield unchecked(what, f"{why}: look at --samples")
        return
    loaded_T, rendered_T = (torch.cat(column) for column in zip(*pairs, strict=True))
    alike = {}
    for by in (0, -1, 1):
        shifted_T = rendered_T.roll(by)
        alike[by] = float((loaded_T & shifted_T).sum() / (loaded_T | shifted_T).sum())
    best = max(alike, key=alike.__getitem__)
    least = ALIKE
    fault = "other tokens are supervised than the assistant writes, of another rendering or lost before the batch"
    if best and alike[best] >= SHIFTED:
        fault = f"the mask is shifted by {best:+d} token: token j is supervised where x[j] itself is the assistant's"
        least = alike[best]
    yield judged(f"{what} ({how_many(len(pairs), 'conversation')})", alike[0], ">=", least, fault)
    ended = float(loaded_T[last_supervised(rendered_T)].double().mean())
    fault = "the end-of-turn token is not supervised: such a drafter never proposes to stop"
    yield judged("share of turns whose last token is supervised", ended, ">=", ALIKE, fault)


def first_conversations(
    data: ChatData, count: int, left_out: list[str] | None
) -> Iterator[ChatConversation]:
    """Return the first conversations of the training data; ``left_out`` gets the faults of broken rows."""
    parse = partial(conversation, layout=data.layout)
    sources = find_sources(data.patterns)
    rows = (row for source in sources for row in read_rows(source, parse, left_out))
    return islice(rows, count)


def _rendered(setup: SetUp, data: ChatData) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the masks of training documents, (T,) each, as the loader has them and as they are rendered here."""

    def key(ids_T: Tensor) -> bytes:
        return ids_T.to(torch.int32).cpu().numpy().tobytes()

    left_out: list[str] | None = [] if data.broken == "drop" else None
    rendered = encode(
        first_conversations(data, CONVERSATIONS, left_out),
        setup.module.tokenizer,
        data.seq_len,
        turns=data.turns,
        left_out=left_out,
    )
    masks = {key(document.ids_T): document.loss_mask_T for document in rendered}
    for batch in ResumableLoader(data.splits.train, data.batch_size, shuffle=False):
        for document in documents(batch):
            mask_T = masks.get(key(document.ids_T))
            if mask_T is not None:
                yield document.loss_mask_T.cpu(), mask_T


def vocabulary(setup: SetUp) -> Findings:
    """The draft vocabulary covers the data, and the head's rows are its tokens'."""
    drafter = setup.drafter
    target = setup.target
    ids_D = drafter.vocab.target_ids_D.cpu()
    counts_V = setup.data.supervised_counts(drafter.config.vocab_size)
    best_D = most_frequent_ids(counts_V, len(ids_D), target.eos_token_ids)
    total = counts_V.sum().clamp_min(1)
    best = float(counts_V[best_D].sum() / total)
    share = float(counts_V[ids_D].sum() / total)
    what = "share of the supervised tokens of the training data that the draft vocabulary has"
    fault = "it was counted on other text, or with another tokenizer: train from the target (model.start FromTarget)"
    if missing := sorted(set(target.eos_token_ids) - set(ids_D.tolist())):
        share = -1.0
        fault = f"it lacks the end-of-text tokens {missing}: no draft proposes to stop"
    yield judged(what, share, ">=", COVERED * best, fault, f"the best of this size: {best:.4f}")
    trained_head = setup.saved and drafter.config.head == "own"
    if drafter.config.hidden_size == target.hidden_size and not trained_head:
        head_DH = drafter.lm_head.weight.detach()
        target_DH = target.head_weight()[drafter.vocab.target_ids_D]
        wrong = int((head_DH != target_DH.to(head_DH)).any(-1).sum())
        fault = "this many rows are another token's: take the head's rows at vocab.target_ids_D"
        yield judged(
            "row j of the head is the target's row of the token that j stands for",
            wrong,
            "<=",
            0,
            fault,
        )


CONVERSATIONS = 256  # that are rendered here
LONGEST = 2**20  # tokens: nothing is cut


def template(setup: SetUp) -> Findings:
    """The words of the training data's assistants are supervised, and every turn ends as the target's do."""
    data = setup.data
    if not isinstance(data, ChatData):
        return
    left_out: list[str] | None = [] if data.broken == "drop" else None
    conversations = list(first_conversations(data, CONVERSATIONS, left_out))
    yield from template_findings(
        conversations, setup.module.tokenizer, setup.target.eos_token_ids, data.turns
    )


def template_findings(
    conversations: Sequence[ChatConversation],
    tokenizer: Any,
    end_ids: Collection[int],
    turns: Any = "auto",
) -> Findings:
    """The findings for some conversations.

    Args:
        end_ids: the tokens at which the target stops.
    """
    report = Report()
    left_out: list[str] = []
    try:
        documents = list(encode(conversations, tokenizer, LONGEST, turns, left_out, report))
    except ValueError:
        documents = []  # no conversation is left, which the share below says
    what = f"share of the {report.said:,} tokens that assistants say in the first conversations that is supervised"
    share = report.supervised / max(report.said, 1)
    report.left_out = left_out
    reasons = [line.strip() for line in report.lines() if ", first " in line] or [
        "they contain no answer"
    ]
    yield judged(what, share, ">=", ALIKE, "; ".join(reasons[:3]))
    if not documents:
        return
    ends = turn_ends(documents)
    wrong = {token: count for token, count in ends.items() if token not in end_ids}
    most = sorted(wrong, key=wrong.__getitem__, reverse=True)[:3]
    names = ", ".join(repr(tokenizer.decode([token])) for token in most)
    yield judged(
        "share of turns that end with a token at which the target stops",
        1 - sum(wrong.values()) / max(ends.total(), 1), ">=", ALIKE,
        f"turns end with {names}: the chat template is another model's or was changed, or the target's generation "
        "config lacks an end token",
    )  # fmt: skip
    yield from _tags(conversations, template_of(tokenizer))


def _tags(conversations: Sequence[ChatConversation], template: Template) -> Findings:
    """A template's own tags mark what the model writes."""
    if not template.renderer.has_tags:
        return
    checked = 0
    wrong = 0
    for row in conversations:
        for number, message in enumerate(row.messages):
            if message["role"] != "assistant":
                continue
            try:
                turn = template.turn(row.messages, number, row.tools)
                formed = template.form.messages(row.messages[: number + 1])
                marked = template.renderer.tagged(formed, row.tools)
                text = template.renderer.render(formed, row.tools, False)
            except (TurnError, ChatTemplateError):
                continue
            written = "".join(turn.text[start:end] for start, end in turn.spans)
            stretch = text[marked[-1][0] : marked[-1][1]] if marked else ""
            checked += 1
            wrong += stretch.strip() != written.strip()
    what = "share of turns of which the template's {% generation %} tags mark what the model writes, and no more"
    if not checked:
        yield unchecked(what, "no turn could be rendered")
        return
    fault = (
        "the tags stand elsewhere, with the header or without the end: specdec goes by the generation prompt and "
        "supervises the right tokens, other trainers would not"
    )
    yield judged(what, 1 - wrong / checked, ">=", ALIKE, fault)
