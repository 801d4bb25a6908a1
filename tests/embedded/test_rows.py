from typing import Any

import pytest
import torch

from specdec.embedded.rows import spread, stream_rows, training_order
from specdec.embedded.tokenizer import train_tokenizer


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


def test_training_order_covers_all_rows_before_it_repeats() -> None:
    order = training_order(7, 17, seed=3)
    assert len(order) == 17
    assert sorted(order[:7].tolist()) == sorted(order[7:14].tolist()) == list(range(7))
    assert order[:7].tolist() != order[7:14].tolist()
    assert torch.equal(order, training_order(7, 17, seed=3))
    assert not torch.equal(order, training_order(7, 17, seed=4))


def test_spread() -> None:
    rows_RT = torch.arange(10)[:, None]
    assert spread(rows_RT, 4).flatten().tolist() == [0, 2, 5, 7]
    assert torch.equal(spread(rows_RT, 99), rows_RT)
