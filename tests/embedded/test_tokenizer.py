from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specdec.embedded.corpus import corpus, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(small_library: Path) -> Any:
    return train_tokenizer((file.read_text() for file in sorted(small_library.iterdir())), 300, 128)


@given(
    st.text()
    | st.lists(
        st.sampled_from(["<s>", "</s>", " ", "\n", "\r\n", "\t", "é", "def f():", "0x"])
    ).map("".join)
)
def test_round_trip_of_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:] and tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_saved_tokenizer_is_the_same(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for source in corpus(0).held_out[:3]:
        ids = loaded.encode(source.text, verbose=False)
        assert ids == tokenizer.encode(source.text, verbose=False)
        assert loaded.decode(ids, skip_special_tokens=True) == source.text
    assert loaded.encode("<s></s>") == tokenizer.encode("<s></s>")
    assert (loaded.bos_token, loaded.eos_token, loaded.chat_template) == ("<s>", "</s>", None)
    assert len(loaded) == 300
    assert loaded.model_max_length == 128


def test_batches_and_pairs_start_with_bos(tokenizer: Any) -> None:
    first, second = tokenizer(["a", "b c"])["input_ids"]
    assert tokenizer("a", "b c")["input_ids"] == first + second


def test_training_is_deterministic(tokenizer: Any, small_library: Path) -> None:
    again = train_tokenizer(
        (file.read_text() for file in sorted(small_library.iterdir())), 300, 128
    )
    assert again.get_vocab() == tokenizer.get_vocab()


def test_too_little_text() -> None:
    with pytest.raises(ValueError, match="vocab_size=400: the corpus yields a vocabulary of"):
        train_tokenizer(["few words, few words"], 400, 128)
