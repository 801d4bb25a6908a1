"""Rendered texts as tokens, and which of these are supervised.

Where a token begins is known from a tokenizer's offsets. Those of a byte-level tokenizer need not be asked for, which
saves a third of its time: every byte of the text is in one token, so that the tokens' own lengths add up to where
each begins. A text of which they do not add up gets its offsets from the tokenizer.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Encoding, decoders, normalizers, pre_tokenizers
from torch import Tensor

from specdec.data.template import Rendered, Spans, tokenizing


class Tokens(NamedTuple):
    """T tokens of a text."""

    ids_T: Tensor  # int32
    mask_T: Tensor  # bool, True where a token is supervised


class Tokenizer:
    """Tokenizes rendered texts; none gets the tokenizer's own special tokens, since the template writes them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.needs_ascii = self.backend.normalizer is not None  # NFC leaves ASCII as it is
        self.lengths_V = byte_lengths(tokenizer)

    def __call__(self, pieces: Sequence[Rendered]) -> Iterator[Tokens]:
        """The tokens of every text.

        Raises:
            ValueError: the tokenizer fails on a text.
        """
        if not pieces:
            return
        texts = [piece.text for piece in pieces]
        exact = self._exact(texts[:1])[0]  # which also switches truncation and padding off
        encodings: Sequence[Encoding] = []
        if self.lengths_V is not None:
            with tokenizing():
                encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        if not encodings or encodings[0].ids != exact.ids:
            yield from map(with_mask, self._exact(texts), pieces)
            return
        for piece, encoding in zip(pieces, encodings, strict=True):
            tokens = self._by_lengths(encoding.ids, piece)
            yield with_mask(self._exact([piece.text])[0], piece) if tokens is None else tokens

    def _exact(self, texts: Sequence[str]) -> Sequence[Encoding]:
        """Texts as tokens with their offsets."""
        with tokenizing():
            batch = self.tokenizer(
                list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
            )
        encodings: Sequence[Encoding] = batch.encodings
        return encodings

    def _by_lengths(self, ids: Sequence[int], piece: Rendered) -> Tokens | None:
        """Tokens whose places are known from their lengths; None if the lengths are not the text's."""
        text = piece.text
        is_ascii = text.isascii()
        size = len(text) if is_ascii else len(text.encode())
        ids_T = np.array(ids, np.int32)
        lengths_T = self.lengths_V[ids_T]  # type: ignore[index]
        ends_T = lengths_T.cumsum()
        if not len(ids_T) or ends_T[-1] != size or (self.needs_ascii and not is_ascii):
            return None
        starts_T = ends_T - lengths_T
        edges = [edge for span in piece.spans for edge in span]
        if not is_ascii:
            edges = [len(text[:edge].encode()) for edge in edges]
        tokens = starts_T.searchsorted(edges).tolist()
        mask_T = np.zeros(len(ids_T), np.bool_)
        for begin, end in zip(tokens[::2], tokens[1::2], strict=True):
            mask_T[begin:end] = True
        return Tokens(torch.from_numpy(ids_T), torch.from_numpy(mask_T))


def byte_lengths(tokenizer: Any) -> np.ndarray | None:
    """How many bytes of a text each token stands for, (V,) int64; None if they do not tell where a token begins."""
    backend = tokenizer.backend_tokenizer
    added = tokenizer.added_tokens_decoder
    is_plain = backend.normalizer is None or isinstance(backend.normalizer, normalizers.NFC)
    if not is_plain or not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    if any(token.lstrip or token.rstrip for token in added.values()):  # these take white space in
        return None
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = tokenizer.get_vocab()
    # no sum with it is a text's
    lengths_V = np.full(max(vocabulary.values(), default=0) + 1, -(2**40), np.int64)
    for token, number in vocabulary.items():
        if alphabet.issuperset(token):
            lengths_V[number] = len(token)
    for number, token in added.items():
        lengths_V[number] = len(token.content.encode())
    # a space before a word would be counted
    probes = ["a", *(f"{token.content}a" for token in added.values())]
    with tokenizing():
        encodings = backend.encode_batch_fast(probes, add_special_tokens=False)
    sizes = [int(lengths_V[encoding.ids].sum()) for encoding in encodings]
    return lengths_V if sizes == [len(probe.encode()) for probe in probes] else None


def with_mask(encoding: Encoding, piece: Rendered) -> Tokens:
    """Tokens of a text, masked by their offsets."""
    return Tokens(torch.tensor(encoding.ids, dtype=torch.int32), token_mask(encoding, piece.spans))


def token_mask(encoding: Encoding, spans: Spans) -> Tensor:
    """The tokens that begin inside a span, (T,) bool. One that begins before it carries a piece of the header.

    Spans are in the text's order. Only the tokens around their ends are looked at.
    """
    count = len(encoding)
    mask_T = torch.zeros(count, dtype=torch.bool)
    tokens = range(count)
    for first, last in spans:
        begin = bisect_left(tokens, first, key=partial(_start_of, encoding))
        end = bisect_left(tokens, last, begin, key=partial(_start_of, encoding))
        mask_T[begin:end] = True
    return mask_T


def _start_of(encoding: Encoding, token: int) -> int:
    """The character at which a token begins; white space that is trimmed off its offsets belongs to it."""
    start, _ = encoding.token_to_chars(token) or (0, 0)
    _, end = (encoding.token_to_chars(token - 1) if token else None) or (0, 0)
    return min(start, end)
