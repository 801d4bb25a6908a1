"""Which tokens of a text are supervised, by lengths and by offsets."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from specdec.data.template import Rendered
from specdec.data.tokenizing import Tokenizer, byte_lengths, token_mask, with_mask
from tests.data.families import FAMILIES, family_tokenizer
from tests.data.tiny import tiny_tokenizer

WORDS = ["two plus two", " ", "\n", "\n\n", "\t", "é", "e\u0301", "🙂", "漢字", "\u2126", "<|im_end|>", "<|eot_id|>",
         "</s>", "<think>", "<|", "\u200b", "\xa0", "it's", "\r\n", "A", "\x00"]  # fmt: skip
TEXTS = st.lists(
    st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), min_size=1, max_size=12
).map("".join)


@st.composite
def rendered(draw: st.DrawFn) -> Rendered:
    text = draw(TEXTS.filter(bool))
    edges = sorted(draw(st.sets(st.integers(0, len(text)), min_size=2, max_size=4)))
    return Rendered(
        text, [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=False)]
    )


def by_offsets(tokenizer: Any, piece: Rendered) -> tuple[list[int], list[bool]]:
    (encoding,) = tokenizer([piece.text], add_special_tokens=False).encodings
    ids_T, mask_T = with_mask(encoding, piece)
    return ids_T.tolist(), mask_T.tolist()


def assert_same(tokenizer: Any, pieces: list[Rendered]) -> None:
    tokens = list(Tokenizer(tokenizer)(pieces))
    assert [(ids_T.tolist(), mask_T.tolist()) for ids_T, mask_T in tokens] == [
        by_offsets(tokenizer, piece) for piece in pieces
    ]
    assert {(ids_T.dtype, mask_T.dtype) for ids_T, mask_T in tokens} == {(torch.int32, torch.bool)}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(rendered(), min_size=2, max_size=4))
def test_lengths_give_the_tokens_and_the_mask_that_offsets_give(
    family: str, pieces: list[Rendered]
) -> None:
    tokenizer = family_tokenizer(family)
    assert byte_lengths(tokenizer) is not None
    assert_same(tokenizer, pieces)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(rendered(), min_size=2, max_size=4))
def test_a_text_that_nfc_may_change_is_masked_by_offsets(pieces: list[Rendered]) -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert byte_lengths(tokenizer) is not None
    assert_same(tokenizer, pieces)


def spaced() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def lowered() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize("tokenizer", [spaced(), lowered()])
def test_lengths_are_not_believed_where_they_are_not_those_of_the_text(tokenizer: Any) -> None:
    assert byte_lengths(tokenizer) is None
    assert_same(tokenizer, [Rendered("Two plus <|im_end|> two", [(4, 9), (19, 23)])])


def test_truncation_and_padding_of_the_tokenizer_are_not_applied() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokens = list(
        Tokenizer(tokenizer)([Rendered("two plus two", [(0, 3)]), Rendered("is four", [(0, 2)])])
    )
    assert [tokenizer.decode(ids_T) for ids_T, _ in tokens] == ["two plus two", "is four"]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_the_mask_holds_the_tokens_that_begin_inside_a_span(trim_offsets: bool) -> None:
    tokenizer = tiny_tokenizer(trim_offsets=trim_offsets)
    text = "two plus two is four 🙂 and\n\nsix"
    (encoding,) = tokenizer([text], add_special_tokens=False).encodings
    ends = [0, *(end for _, end in encoding.offsets)]
    # white space that is trimmed off the offsets belongs to the token behind it
    starts = [min(start, end) for (start, _), end in zip(encoding.offsets, ends, strict=False)]
    for first in range(len(text)):
        for last in range(first, len(text) + 1):
            expected = [first <= start < last for start in starts]
            assert token_mask(encoding, [(first, last)]).tolist() == expected
