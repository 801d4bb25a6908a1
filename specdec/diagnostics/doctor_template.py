"""Whether the chat template writes what the data's conversations say, and ends turns as the target does."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from specdec.data import ChatData
from specdec.data.chat import Report, encode
from specdec.data.layouts import ChatConversation
from specdec.data.rendering import ChatTemplateError
from specdec.data.said import TurnError
from specdec.data.template import Template, template_of
from specdec.diagnostics.doctor_data import ALIKE, first_conversations
from specdec.diagnostics.doctor_setup import Finding, SetUp, judged, unchecked

CONVERSATIONS = 256  # that are rendered here
LONGEST = 2**20  # tokens: nothing is cut


def template(setup: SetUp) -> Iterator[Finding]:
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
) -> Iterator[Finding]:
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
        "nobody answers in them"
    ]
    yield judged(what, share, ">=", ALIKE, "; ".join(reasons[:3]))
    if not documents:
        return
    ends = Counter[int]()
    for document in documents:
        following_T = torch.cat([document.loss_mask_T[1:], document.loss_mask_T.new_zeros(1)])
        ends.update(document.ids_T[document.loss_mask_T & ~following_T].tolist())
    wrong = {token: count for token, count in ends.items() if token not in end_ids}
    names = ", ".join(
        repr(tokenizer.decode([token]))
        for token in sorted(wrong, key=lambda token: -wrong[token])[:3]
    )
    yield judged(
        "share of turns that end with a token at which the target stops",
        1 - sum(wrong.values()) / max(ends.total(), 1), ">=", ALIKE,
        f"turns end with {names}: the chat template is another model's or was changed, or the target's generation "
        "config lacks an end token",
    )  # fmt: skip
    yield from _tags(conversations, template_of(tokenizer))


def _tags(conversations: Sequence[ChatConversation], template: Template) -> Iterator[Finding]:
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
