"""Conversations: rows in several layouts in, documents out, of which the model's own tokens are supervised.

A conversation is rendered by the target's own template and tokenized once. The mask is found in characters of the
rendered text and carried over to tokens by their offsets. Pieces are never tokenized by themselves, and nothing is
searched for by marker strings: tokens merge across boundaries, and users write markers too.
"""

import hashlib
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from specdec.data.layouts import (
    TRAINING,
    UNREAD_COLUMNS,
    ChatConversation,
    layouts_named,
    recognize,
    tools_of,
)
from specdec.data.rows import DataRow, find_sources, read_rows
from specdec.data.shapes import Shapes
from specdec.data.template import Rendered, check_tokenizer, template_of
from specdec.data.tokenizing import Tokenizer
from specdec.data.tokens import MUCH, EncodedDocument
from specdec.data.turns import Piece, Refused, TokenPiece, Turns, said_text
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

PLACE = re.compile(r"^.*?, (?:line|row) \d+: (?:message \d+: )?")  # of a row, in a message about it
CHUNK = 256  # conversations tokenized in one call


def read_conversations(
    patterns: str | Sequence[str], layout: str | None = None, left_out: list[str] | None = None
) -> list[ChatConversation]:
    """Return every conversation of files and Hub data; an id that comes again is numbered (``id#2``).

    Args:
        layout: of every row; None recognizes each row's by its columns.
        left_out: gets what is wrong with each broken row, which is left out then; None stops at the first.

    Raises:
        ValueError: a source is missing, unreadable or empty, or a row is broken; the message names file and row.
    """
    conversations: list[ChatConversation] = []
    times = Counter[str]()
    for conversation in iter_conversations(patterns, layout, left_out):
        name = conversation.id
        while times[name]:
            times[conversation.id] += 1
            name = f"{conversation.id}#{times[conversation.id]}"
        times[name] += 1
        conversations.append(conversation._replace(id=name))
    return conversations


def warn_of_broken(left_out: Sequence[str] | None) -> None:
    """Log how many broken rows were left out, and what is wrong with the first."""
    if left_out:
        log.warning("left out %s, as: %s", how_many(len(left_out), "broken row"), left_out[0])


def iter_conversations(
    patterns: str | Sequence[str], layout: str | None = None, left_out: list[str] | None = None
) -> Iterator[ChatConversation]:
    """Yield the conversations of :func:`read_conversations` row by row; ids may come again."""
    for source in find_sources(patterns):
        count = 0
        broken = len(left_out or ())
        for row in read_rows(source, partial(conversation, layout=layout), left_out):
            count += 1
            yield row
        if not count:
            why = (
                f" but broken rows, as: {left_out[broken]}"
                if left_out and len(left_out) > broken
                else ""
            )
            raise ValueError(
                f"{source}: holds no conversation{why}; remove it from the data or fill it"
            )


def conversation(row: DataRow, layout: str | None = None) -> ChatConversation:
    """Return a row's conversation; its id is the row's, else a hash of the messages and tools.

    Raises:
        ValueError: it has no layout, or not the one that is named, or is malformed.
    """
    chosen = [] if layout is None else layouts_named([layout], TRAINING)
    unread = [column for column in UNREAD_COLUMNS if row.values.get(column)]
    if layout is None and unread and (unread[0] == "history" or "messages" in row.values):
        raise ValueError(
            f"{row.place}: column {unread[0]!r} may be a part of what is said, and is not read: drop it"
        )
    messages = recognize(row.values, row.place, chosen or TRAINING, chosen).read(
        row.values, row.place
    )
    tools = tools_of(row.values, row.place)
    content = json.dumps([messages, tools], sort_keys=True, default=str)
    row_id = row.own_id or hashlib.sha256(content.encode()).hexdigest()[:16]
    return ChatConversation(row.place, messages, tools, row_id)


@dataclass
class Report:
    """Counts of what became of the assistants' words when conversations were made into rows."""

    conversations: int = 0
    rows: int = 0
    tokens: int = 0  # of all rows, before they are cut
    repeated: int = 0  # of these, context that another row of the conversation has, too
    supervised: int = 0  # tokens
    said: int = 0  # tokens of the assistants, supervised or not
    # of turns that are not supervised, and how many
    reasons: dict[str, int] = field(default_factory=dict)
    # by reason, the place of the first such turn
    first: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # why conversations are left out
    without_tools: int = 0  # conversations whose tools the template does not write
    missing: list[str] = field(default_factory=list)  # what the template cannot express

    def refuse(self, turns: Sequence[Refused], tokenizer: Any, is_left_out: bool) -> None:
        """Count turns that are not supervised; the reasons only of those whose conversation stays."""
        for turn in turns:
            self.said += len(
                tokenizer.encode(said_text(turn.message), add_special_tokens=False, verbose=False)
            )
            if is_left_out:
                continue
            self.reasons[turn.reason] = self.reasons.get(turn.reason, 0) + 1
            self.first.setdefault(turn.reason, turn.place)

    def log(self) -> None:
        """Log the report, as a warning if much of what was said is not learned."""
        is_much = self.supervised < (1 - MUCH) * self.said or bool(self.left_out)
        for line in self.lines():
            log.log(logging.WARNING if is_much else logging.INFO, "%s", line)

    def lines(self) -> list[str]:
        """Return the report in words: what is supervised, what it costs, and why the rest is not."""
        share = 100 * self.supervised / max(self.said, 1)
        rows = f"{how_many(self.conversations, 'conversation')} in {how_many(self.rows, 'row')}"
        lines = [
            f"of {self.said:,} tokens that assistants said {self.supervised:,} are supervised ({share:.1f} %)",
            f"{rows} of {self.tokens:,} tokens, of which {self.repeated:,} repeat the context of another row",
        ]
        if self.missing:
            lines.append(f"the chat template cannot express {', '.join(self.missing)}")
        for reason, count in sorted(self.reasons.items(), key=lambda item: -item[1]):
            lines.append(
                f"{how_many(count, 'turn')} not supervised, first {self.first[reason]}: {reason}"
            )
        if self.without_tools:
            rows = how_many(self.without_tools, "conversation")
            lines.append(
                f"{rows} with tools that the chat template does not write: the target does not see them"
            )
        if self.left_out:
            lines.append(f"left out {how_many(len(self.left_out), 'broken row')}:")
        by_reason: dict[str, list[str]] = {}
        for text in self.left_out:
            by_reason.setdefault(PLACE.sub("", text), []).append(text)
        for reason, texts in sorted(by_reason.items(), key=lambda item: -len(item[1])):
            place = texts[0].removesuffix(f": {reason}")
            lines.append(f"  {how_many(len(texts), 'row')}, first {place}: {reason}")
        return lines


def encode(
    conversations: Iterable[ChatConversation], tokenizer: Any, max_length: int, turns: Turns = "auto",
    left_out: list[str] | None = None, report: Report | None = None,
) -> Iterator[EncodedDocument]:  # fmt: skip
    """Conversations as rows of tokens, each tokenized once and cut to ``max_length`` tokens.

    Args:
        turns: how the turns of a conversation are put into rows; see :func:`specdec.data.turns.rows_of`.
        left_out: gets why a conversation has no usable turn, which is left out then; None stops at the first.
        report: is added to.

    Raises:
        ValueError: there is no usable chat template, or a conversation cannot be used.
    """
    report = Report() if report is None else report
    numbered = enumerate(conversations)
    for chunk in encode_chunks(numbered, tokenizer, max_length, turns, left_out, report):
        yield from chunk


def encode_chunks(
    numbered: Iterable[tuple[int, ChatConversation]], tokenizer: Any, max_length: int, turns: Turns,
    left_out: list[str] | None, report: Report,
) -> Iterator[list[EncodedDocument]]:  # fmt: skip
    """As :func:`encode`, for conversations with their numbers; yields the documents of ``CHUNK`` conversations at once.

    After a chunk, ``report`` and ``left_out`` say what became of it and of those before, and of no later one.
    """
    check_tokenizer(tokenizer)
    template = template_of(tokenizer)
    shapes = Shapes(template, turns)
    tokenize = Tokenizer(tokenizer)
    report.missing = template.form.missing
    for batch in _batched(numbered, CHUNK):
        pieces: list[tuple[int, Piece]] = []
        for number, conversation in batch:
            try:
                rows = _usable_rows(shapes, conversation, report)
            except ValueError as error:
                if left_out is None:
                    raise ValueError(f"{error}; data.broken drop leaves such rows out") from error
                left_out.append(str(error))
                continue
            pieces += [(number, piece) for piece in rows]
        yield list(_tokenized(pieces, tokenize, max_length, report))
    if not report.conversations:
        raise ValueError(
            f"no conversation is left: {left_out[0] if left_out else 'there was none'}"
        )


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _usable_rows(shapes: Shapes, conversation: ChatConversation, report: Report) -> list[Piece]:
    """Return a conversation's rows; raise ValueError if the assistant speaks and no turn can be supervised."""
    template = shapes.template
    rows = shapes.rows(conversation)
    report.refuse(rows.refused, template.tokenizer, is_left_out=not rows.pieces)
    report.without_tools += bool(conversation.tools) and not template.form.tools
    if rows.refused and not rows.pieces:
        raise ValueError(f"{rows.refused[0].place}: {rows.refused[0].reason}")
    report.conversations += 1
    if rows.pieces:
        return rows.pieces
    try:
        text = template.renderer.render(
            template.form.messages(conversation.messages), conversation.tools, False
        )
    except ValueError as error:
        raise ValueError(f"{conversation.place}: {error}") from error
    return [Rendered(text, [])]


def _tokenized(
    pieces: Sequence[tuple[int, Piece]], tokenize: Tokenizer, max_length: int, report: Report
) -> Iterator[EncodedDocument]:
    """Yield the documents of some conversations' pieces, in their order."""
    tokenized = tokenize([piece for _, piece in pieces if isinstance(piece, Rendered)])
    longest: Counter[int] = Counter()
    for number, piece in pieces:
        if isinstance(piece, TokenPiece):
            ids_T = torch.tensor(piece.ids, dtype=torch.int32)
            mask_T = torch.tensor(piece.mask, dtype=torch.bool)
        else:
            ids_T, mask_T = next(tokenized)
        length = len(ids_T)
        supervised = int(mask_T.count_nonzero())
        report.rows += 1
        report.tokens += length
        report.supervised += supervised
        report.said += supervised
        report.repeated += min(length, longest[number])
        longest[number] = max(longest[number], length)
        yield EncodedDocument(ids_T[:max_length], mask_T[:max_length], length, supervised, number)
