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


def encode_texts(
    texts: Iterable[str], tokenizer: Any, begin: int = 0
) -> Iterator[list[EncodedDocument]]:
    """Texts with the tokenizer's special tokens, closed by its end-of-sequence token where it has one, in chunks.

    Args:
        begin: number of the first chunk that is tokenized; the texts of those before are only read.
    """
    with tokenizing():
        prefix = text_prefix(tokenizer)
    count = 0  # texts before the chunk
    for number, chunk in enumerate(groups(texts, len, CHUNK, CHARACTERS)):
        if number >= begin:
            with tokenizing():
                encoded = tokenizer(
                    chunk, add_special_tokens=True, return_attention_mask=False, verbose=False
                )
            all_ids = [undoubled(ids, prefix) for ids in encoded["input_ids"]]
            yield [
                _document(ids, tokenizer.eos_token_id, count + place)
                for place, ids in enumerate(all_ids)
            ]
        count += len(chunk)


def _document(ids: list[int], eos_token_id: int | None, number: int) -> EncodedDocument:
    """The document of a text, all of whose tokens are supervised."""
    if eos_token_id is not None and ids[-1:] != [eos_token_id]:
        ids = [*ids, eos_token_id]
    ids_T = torch.tensor(ids, dtype=torch.int32)
    mask_T = torch.ones_like(ids_T, dtype=torch.bool)
    return EncodedDocument(ids_T, mask_T, len(ids), len(ids), number)
