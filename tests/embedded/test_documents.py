from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.embedded.corpus import (
    LEAST_TOKENS,
    CorpusFile,
    EmbeddedData,
    corpus,
    encode_documents,
    train_tokenizer,
)

FUNCTION = (
    "def {name}(first, second):\n    third = first + second\n    return third * first - second\n"
)
TEXT = (
    "import this\n\n"
    + FUNCTION.format(name="one")
    + "\n\n@cached\n"
    + FUNCTION.format(name="two")
    + "\n\n\nx = 1\n"
)


@pytest.fixture(scope="module")
def tokenizer(small_library: Path) -> Any:
    return train_tokenizer((file.read_text() for file in sorted(small_library.iterdir())), 300, 128)


def test_a_document_is_a_function(tokenizer: Any) -> None:
    documents = encode_documents(tokenizer, [CorpusFile("a.py", TEXT)], 512)
    texts = [tokenizer.decode(one.ids_T[1:-1]) for one in documents]
    assert texts == [FUNCTION.format(name="one"), "@cached\n" + FUNCTION.format(name="two")]
    for one in documents:
        ids = one.ids_T.tolist()
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert one.loss_mask_T.all() and one.ids_T.dtype == torch.int64


def test_long_documents_are_cut_and_each_piece_starts_anew(tokenizer: Any) -> None:
    (whole,) = encode_documents(tokenizer, [CorpusFile("a.py", FUNCTION.format(name="one"))], 512)
    pieces = [
        one.ids_T.tolist()
        for one in encode_documents(
            tokenizer, [CorpusFile("a.py", FUNCTION.format(name="one"))], 20
        )
    ]
    assert len(pieces) > 1 and all(LEAST_TOKENS <= len(piece) <= 20 for piece in pieces)
    assert {piece[0] for piece in pieces} == {tokenizer.bos_token_id}
    joined = [id_ for piece in pieces for id_ in piece[1:]]
    assert joined == whole.ids_T.tolist()[1 : len(joined) + 1]
    assert all(tokenizer.eos_token_id not in piece[:-1] for piece in pieces)


def test_rows_hold_whole_documents_of_the_split(library: Path, tokenizer: Any) -> None:
    data = EmbeddedData(seq_len=96, batch_size=4)
    data.prepare(tokenizer)
    for rows, files in zip(data.splits, corpus(0), strict=True):
        starts_BT = torch.ones_like(rows.documents_BT, dtype=torch.bool)
        starts_BT[:, 1:] = rows.documents_BT[:, 1:] != rows.documents_BT[:, :-1]
        starts_BT &= rows.documents_BT >= 0
        assert (rows.ids_BT[starts_BT] == tokenizer.bos_token_id).all()
        assert int(starts_BT.sum()) == len(encode_documents(tokenizer, files, 96))
        inside_BT = (rows.documents_BT >= 0) & ~starts_BT
        assert (rows.ids_BT[inside_BT] != tokenizer.bos_token_id).all()


def test_a_tokenizer_without_ends_is_refused() -> None:
    class Bare:
        bos_token_id = eos_token_id = None

    with pytest.raises(ValueError, match="choose --data TextData or ChatData"):
        EmbeddedData().prepare(Bare())
