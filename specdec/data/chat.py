"""Conversations: rows in several layouts in, documents out, of which the model's own tokens are supervised.

A conversation is rendered by the target's own template and tokenised once. The mask is found in characters of the
rendered text and carried over to tokens by their offsets. Pieces are never tokenised by themselves, and nothing is
searched for by marker strings: tokens merge across boundaries, and users write markers too.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.data.layouts import TRAINING, ChatConversation, named, parsed, recognise
from specdec.data.loader import Document
from specdec.data.rows import DataRow, contents_of, find_sources, read_rows
from specdec.data.template import Rendered, Spans, Template, check_tokenizer, template_of, tokenizing
from specdec.data.tokens import EncodedDocument
from specdec.data.turns import Piece, Refused, TokenPiece, Turns, rows_of, said_text
from specdec.utils.files import cache_directory, locked, staged
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

VERSION = 3  # of what is kept on disk: raise it whenever a change of this package gives other tokens or masks
CHUNK = 256  # conversations tokenised in one call
MUCH = 0.05  # a loss that deserves a warning


class MaskError(ValueError):
    """The loss mask holds no token, or every token."""


class Encoded(NamedTuple):
    """N conversations as documents, cut to a row's length, and their tokens before the cut."""

    documents: list[Document]
    lengths_N: Tensor  # int64, tokens
    supervised_N: Tensor  # int64, supervised tokens

    def take(self, indices: Sequence[int]) -> "Encoded":
        """Some of the conversations."""
        return Encoded([self.documents[i] for i in indices], self.lengths_N[indices], self.supervised_N[indices])

    @property
    def lost(self) -> dict[str, int]:
        """What truncation and missing answers cost, by name."""
        kept_N = torch.tensor([int(document.loss_mask_T.sum()) for document in self.documents])
        sizes_N = torch.tensor([len(document.ids_T) for document in self.documents])
        return {
            "conversations": len(self.documents),
            "cut": int((sizes_N < self.lengths_N).sum()),  # conversations longer than a row
            "tokens_lost": int((self.lengths_N - sizes_N).sum()),
            "supervised_lost": int((self.supervised_N - kept_N).sum()),
            "silent": int((self.supervised_N == 0).sum()),  # conversations without a supervised token, before the cut
            "cut_away": int(((self.supervised_N > 0) & (kept_N == 0)).sum()),  # that lost all supervised tokens to it
        }

    def usable(self, max_length: int, name: str) -> list[Document]:
        """The documents that have a supervised token; what was lost is logged, with a warning if it is much.

        Raises:
            MaskError: no token is supervised, or every one.
        """
        lost, supervised = self.lost, int(self.supervised_N.sum())
        count, cut, share = lost["conversations"], lost["cut"], lost["supervised_lost"] / max(supervised, 1)
        log.log(
            logging.WARNING if max(share, cut / count) > MUCH else logging.INFO,
            "%s: %s, %d cut to %d tokens: %d of %d tokens lost, %d of %d supervised (%.1f %%)",
            name, how_many(count, "conversation"), cut, max_length, lost["tokens_lost"], int(self.lengths_N.sum()),
            lost["supervised_lost"], supervised, 100 * share,
        )  # fmt: skip
        documents = [document for document in self.documents if document.loss_mask_T.any()]
        if len(documents) < count:
            log.warning(
                "%s: dropped %d of %s, without a supervised token", name, count - len(documents), how_many(count, "row")
            )
        if not documents:
            raise MaskError(
                f"{name}: of {how_many(count, 'conversation')} none has a supervised token ({cut} were cut to "
                f"{max_length} tokens): they need assistant turns that begin within seq_len"
            )
        if all(bool(document.loss_mask_T.all()) for document in documents):
            raise MaskError(
                f"{name}: every token is supervised, prompts included: the chat template marks no assistant turns; "
                "check its {% generation %} tags"
            )
        return documents


def read_conversations(
    patterns: str | Sequence[str], layout: str | None = None, left_out: list[str] | None = None
) -> list[ChatConversation]:
    """Every conversation of files and Hub data; an id that comes again is numbered (``id#2``).

    Args:
        layout: of every row; None recognises each row's by its columns.
        left_out: gets what is wrong with each broken row, which is left out then; None stops at the first.

    Raises:
        ValueError: a source is missing, unreadable or empty, or a row is broken; the message names file and row.
    """
    conversations: list[ChatConversation] = []
    times = Counter[str]()
    for source in find_sources(patterns):
        before, broken = len(conversations), len(left_out or ())
        for one in read_rows(source, partial(conversation, layout=layout), left_out):
            name = one.id
            while times[name]:
                times[one.id] += 1
                name = f"{one.id}#{times[one.id]}"
            times[name] += 1
            conversations.append(one._replace(id=name))
        if len(conversations) == before:
            why = f" but broken rows, as: {left_out[broken]}" if left_out and len(left_out) > broken else ""
            raise ValueError(f"{source}: holds no conversation{why}; remove it from the data or fill it")
    return conversations


def conversation(row: DataRow, layout: str | None = None) -> ChatConversation:
    """A row's conversation; its id is the row's, else a hash of the messages and tools.

    Raises:
        ValueError: it has no layout, or not the one that is named, or is malformed.
    """
    chosen = [] if layout is None else named([layout], TRAINING)
    messages = recognise(row.values, row.place, chosen or TRAINING, chosen).read(row.values, row.place)
    tools = parsed(row.values.get("tools"), f"{row.place}: 'tools'") or None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{row.place}: 'tools' must be a list of JSON schemas")
    content = json.dumps([messages, tools], sort_keys=True, default=str)
    row_id = row.own_id or hashlib.sha256(content.encode()).hexdigest()[:16]
    return ChatConversation(row.place, messages, tools, row_id)


@dataclass
class Report:
    """What became of the assistants' words when conversations were made into rows."""

    conversations: int = 0
    rows: int = 0
    tokens: int = 0  # of all rows, before they are cut
    repeated: int = 0  # of these, context that another row of the conversation has, too
    supervised: int = 0  # tokens
    said: int = 0  # tokens of the assistants, supervised or not
    reasons: Counter[str] = field(default_factory=Counter)  # of turns that are not supervised, and how many
    first: dict[str, str] = field(default_factory=dict)  # by reason, the place of the first such turn
    missing: list[str] = field(default_factory=list)  # what the template cannot express

    def refuse(self, turns: Sequence[Refused], tokenizer: Any) -> None:
        """Count turns that are not supervised."""
        for turn in turns:
            self.reasons[turn.reason] += 1
            self.first.setdefault(turn.reason, turn.place)
            self.said += len(tokenizer.encode(said_text(turn.message), add_special_tokens=False, verbose=False))

    def lines(self) -> list[str]:
        """The report in words: what is supervised, what it costs, and why the rest is not."""
        share = 100 * self.supervised / max(self.said, 1)
        rows = f"{how_many(self.conversations, 'conversation')} in {how_many(self.rows, 'row')}"
        lines = [
            f"of {self.said:,} tokens that assistants said {self.supervised:,} are supervised ({share:.1f} %)",
            f"{rows} of {self.tokens:,} tokens, of which {self.repeated:,} repeat the context of another row",
        ]
        if self.missing:
            lines.append(f"the chat template cannot express {', '.join(self.missing)}")
        for reason, count in self.reasons.most_common():
            lines.append(f"{how_many(count, 'turn')} not supervised, first {self.first[reason]}: {reason}")
        return lines


def encode(
    conversations: Iterable[ChatConversation], tokenizer: Any, max_length: int, turns: Turns = "auto",
    left_out: list[str] | None = None, report: Report | None = None,
) -> Iterator[EncodedDocument]:  # fmt: skip
    """Conversations as rows of tokens, each tokenised once and cut to ``max_length`` tokens.

    Args:
        turns: how the turns of a conversation are put into rows; see :func:`specdec.data.turns.rows_of`.
        left_out: gets why a conversation has no usable turn, which is left out then; None stops at the first.
        report: is added to.

    Raises:
        ValueError: there is no usable chat template, or a conversation cannot be used.
    """
    check_tokenizer(tokenizer)
    template = template_of(tokenizer)
    report = Report() if report is None else report
    report.missing = template.form.missing
    number = 0
    for batch in _batched(conversations, CHUNK):
        pieces: list[tuple[int, Piece]] = []
        for conversation in batch:
            try:
                rows = _usable_rows(template, conversation, turns, report)
            except ValueError as error:
                if left_out is None:
                    raise
                left_out.append(str(error))
                continue
            pieces += [(number, piece) for piece in rows]
            number += 1
        yield from _tokenised(pieces, tokenizer, max_length, report)
    if not number:
        raise ValueError(f"no conversation is left: {left_out[0] if left_out else 'there was none'}")


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _usable_rows(template: Template, conversation: ChatConversation, turns: Turns, report: Report) -> list[Piece]:
    """A conversation's rows; ValueError if the assistant speaks and no turn can be supervised."""
    rows = rows_of(template, conversation, turns)
    report.refuse(rows.refused, template.tokenizer)
    if rows.refused and not rows.pieces:
        raise ValueError(f"{rows.refused[0].place}: {rows.refused[0].reason}")
    report.conversations += 1
    if rows.pieces:
        return rows.pieces
    try:
        text = template.renderer.render(template.form.messages(conversation.messages), conversation.tools, False)
    except ValueError as error:
        raise ValueError(f"{conversation.place}: {error}") from error
    return [Rendered(text, [])]


def _tokenised(
    pieces: Sequence[tuple[int, Piece]], tokenizer: Any, max_length: int, report: Report
) -> Iterator[EncodedDocument]:
    """The documents of some conversations' pieces, in their order."""
    texts = [piece.text for _, piece in pieces if isinstance(piece, Rendered)]
    encoded: Iterator[tuple[list[int], list[tuple[int, int]]]] = iter(())
    if texts:
        with tokenizing():
            columns = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        encoded = zip(columns["input_ids"], columns["offset_mapping"], strict=True)
    longest: Counter[int] = Counter()
    for number, piece in pieces:
        if isinstance(piece, TokenPiece):
            ids, mask = piece.ids, piece.mask
        else:
            ids, offsets = next(encoded)
            mask = token_mask(offsets, piece.spans)
        supervised = sum(mask)
        report.rows += 1
        report.tokens += len(ids)
        report.supervised += supervised
        report.said += supervised
        report.repeated += min(len(ids), longest[number])
        longest[number] = max(longest[number], len(ids))
        ids_T = torch.tensor(ids[:max_length], dtype=torch.int32)
        mask_T = torch.tensor(mask[:max_length], dtype=torch.bool)
        yield EncodedDocument(ids_T, mask_T, len(ids), supervised, number)


def token_mask(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[bool]:
    """Tokens that begin inside a span. One that begins before it carries a piece of the header, and is left out.

    White space that a tokenizer trims off its offsets belongs to the token behind it.
    """
    ends = [0, *(end for _, end in offsets)]
    starts = [min(start, previous) for (start, _), previous in zip(offsets, ends, strict=False)]
    mask = [False] * len(starts)
    token = 0
    for first, last in spans:
        while token < len(starts) and starts[token] < last:
            mask[token] = starts[token] >= first
            token += 1
    return mask


def determinants(
    patterns: str | Sequence[str], layout: str | None, broken: str, tokenizer: Any, max_length: int
) -> list[Any]:
    """Whatever can change the tokens: the sources' content, the tokenizer, its template, and versions.

    Raises:
        ValueError: a source is missing or unreadable.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    versions = [importlib.metadata.version(name) for name in ("jinja2", "tokenizers", "transformers")]
    template = [backend, tokenizer.special_tokens_map, tokenizer.chat_template]
    contents = [contents_of(source) for source in find_sources(patterns)]
    return [VERSION, versions, contents, layout, broken, template, max_length]


def cached(determined_by: list[Any], make: Callable[[], Encoded]) -> Encoded:
    """What specdec's cache has under these determinants; ``make`` is called where it has nothing, by one process.

    Raises:
        ValueError: the cache may not be written, the disk is full, or what was kept is damaged.
    """
    key = hashlib.sha256(json.dumps(determined_by, sort_keys=True, default=str).encode()).hexdigest()[:16]
    path = cache_directory() / "tokens" / f"{key}.safetensors"
    # no lock where nothing is written: the cache may be read-only
    with contextlib.nullcontext() if path.exists() else locked(path.with_suffix(".lock")):
        if not path.exists():
            documents, lengths_N, supervised_N = make()
            tensors = {
                "ids": torch.cat([document.ids_T for document in documents]).int(),
                "loss_mask": torch.cat([document.loss_mask_T for document in documents]),
                "sizes": torch.tensor([len(document.ids_T) for document in documents]),
                "lengths": lengths_N,
                "supervised": supervised_N,
            }
            with staged(path) as temporary:
                save_file(tensors, temporary)
    try:
        with safe_open(path, framework="pt", backend="pread") as file:  # mapped, a file that is cut off is a SIGBUS
            kept = file.get_tensors()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged, remove it: {error}") from error
    sizes = kept["sizes"].tolist()
    columns = (kept["ids"].long().split(sizes), kept["loss_mask"].split(sizes))
    log.info("%s as tokens: %s", how_many(len(sizes), "conversation"), path)
    return Encoded([Document(*pair) for pair in zip(*columns, strict=True)], kept["lengths"], kept["supervised"])
