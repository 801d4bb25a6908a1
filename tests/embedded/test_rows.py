from typing import Any

import pytest

from specdec.embedded.corpus import stream_rows, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["ab"], 258, 128)


def test_rows_hold_the_stream(tokenizer: Any) -> None:
    rows_RT = stream_rows(tokenizer, ["abcd", "<s>", "efghi"], 4)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    text = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcd<s>efghi"]
    stream = [*text[:4], eos, *text[4:7], eos, *text[7:], eos][:12]
    assert rows_RT.tolist() == [[bos, *stream[:4]], [bos, *stream[4:8]], [bos, *stream[8:]]]


def test_too_little_text(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="seq_len is 9: the corpus has only 5 tokens"):
        stream_rows(tokenizer, ["abcd"], 9)
