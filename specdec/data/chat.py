"""Conversations: rows in several layouts in, documents out, of which the model's own tokens are supervised.

A conversation is rendered by the target's own template and tokenised once. The mask is found in characters of the
rendered text and carried over to tokens by their offsets. Pieces are never tokenised by themselves, and nothing is
searched for by marker strings: tokens merge across boundaries, and users write markers too.
"""

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from specdec.data.layouts import TRAINING, ChatConversation, named, parsed, recognise
from specdec.data.rows import DataRow, find_sources, read_rows
from specdec.data.template import Spans, Template, tokenizing
from specdec.data.tokens import EncodedDocument

log = logging.getLogger(__name__)

CHUNK = 256  # conversations tokenised in one call


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
    for one in iter_conversations(patterns, layout, left_out):
        name = one.id
        while times[name]:
            times[one.id] += 1
            name = f"{one.id}#{times[one.id]}"
        times[name] += 1
        conversations.append(one._replace(id=name))
    return conversations


def iter_conversations(
    patterns: str | Sequence[str], layout: str | None = None, left_out: list[str] | None = None
) -> Iterator[ChatConversation]:
    """As :func:`read_conversations`, row by row; ids may come again."""
    for source in find_sources(patterns):
        count = 0
        broken = len(left_out or ())
        for row in read_rows(source, partial(conversation, layout=layout), left_out):
            count += 1
            yield row
        if not count:
            why = f" but broken rows, as: {left_out[broken]}" if left_out and len(left_out) > broken else ""
            raise ValueError(f"{source}: holds no conversation{why}; remove it from the data or fill it")


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


def encode(
    conversations: Iterable[ChatConversation], tokenizer: Any, max_length: int, left_out: list[str] | None = None
) -> Iterator[EncodedDocument]:
    """Conversations rendered and tokenised once each, cut to ``max_length`` tokens, as they come.

    Args:
        left_out: gets why the template refuses a conversation, which is left out then; None stops at the first.

    Raises:
        ValueError: there is no usable chat template, or a row cannot be rendered.
    """
    template = Template(tokenizer)
    count = 0
    numbered = enumerate(conversations)
    while chunk := list(itertools.islice(numbered, CHUNK)):
        rendered = []
        for number, one in chunk:
            try:
                rendered.append((number, template.render(one)))
            except ValueError as error:
                if left_out is None:
                    raise
                left_out.append(str(error))
        texts = [item.text for _, item in rendered] or [""]
        with tokenizing():
            made = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for (number, item), ids, offsets in zip(rendered, made["input_ids"], made["offset_mapping"], strict=False):
            count += 1
            mask = token_mask(offsets, item.spans)
            ids_T = torch.tensor(ids[:max_length], dtype=torch.int32)
            mask_T = torch.tensor(mask[:max_length], dtype=torch.bool)
            yield EncodedDocument(ids_T, mask_T, len(ids), sum(mask), number)
    if not count:
        raise ValueError(f"no conversation is left: {left_out[0] if left_out else 'there was none'}")


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
