"""Texts: files and rows in, documents out, of which every token is supervised."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.data.prefix import text_prefix, undoubled
from specdec.data.rows import DataRow, find_sources, has_rows, read_plain_text, read_rows
from specdec.data.template import tokenizing
from specdec.data.tokens import EncodedDocument, groups
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

CHUNK = 256  # texts tokenized in one call, at most
CHARACTERS = 1 << 20  # and characters, from which on there are enough


class Text(NamedTuple):
    """A document of :class:`TextData`."""

    place: str  # for messages: "books.jsonl, line 7"
    text: str


def iter_texts(patterns: str | Sequence[str]) -> Iterator[Text]:
    """Every document of the sources that is not empty, as it comes.

    Raises:
        ValueError: a source is missing or undecodable, a row is broken, or there is no document.
    """

    def text_of(row: DataRow) -> Text:
        if not isinstance(row.values.get("text"), str):
            raise ValueError(
                f"{row.place}: a row of text needs a string 'text', this has only {sorted(row.values)}"
            )
        return Text(row.place, row.values["text"])

    count = 0
    empty = 0
    for source in find_sources(patterns):
        for item in (
            read_rows(source, text_of)
            if has_rows(source)
            else [Text(source, read_plain_text(Path(source)))]
        ):
            if item.text.strip():
                count += 1
                yield item
            else:
                empty += 1
    if not count:
        raise ValueError(f"no documents in {patterns}: every file is empty")
    if empty:
        log.warning("left out %s, %d remain", how_many(empty, "empty document"), count)


def encode_texts(texts: Iterable[str], tokenizer: Any) -> Iterator[EncodedDocument]:
    """Texts with the tokenizer's special tokens, closed by its end-of-sequence token where it has one."""
    with tokenizing():
        prefix = text_prefix(tokenizer)
    number = 0
    for chunk in groups(texts, len, CHUNK, CHARACTERS):
        with tokenizing():
            encoded = tokenizer(
                chunk, add_special_tokens=True, return_attention_mask=False, verbose=False
            )
        for encoded_ids in encoded["input_ids"]:
            ids = undoubled(encoded_ids, prefix)
            if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                ids.append(tokenizer.eos_token_id)
            ids_T = torch.tensor(ids, dtype=torch.int32)
            yield EncodedDocument(
                ids_T, torch.ones_like(ids_T, dtype=torch.bool), len(ids), len(ids), number
            )
            number += 1
