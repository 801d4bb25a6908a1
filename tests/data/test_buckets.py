"""Batches of rows of similar length."""

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.data import buckets
from specdec.data.batch import Batch, Document
from specdec.data.buckets import BucketLoader, BucketSampler, padding_share, real_tokens, width
from specdec.data.chat_data import ChatData
from specdec.data.loader import ResumableLoader
from specdec.data.packing import pad, pad_to_longest
from tests.data.tiny import CHATML, tiny_tokenizer, write_jsonl

LENGTHS = random.Random(0).choices([3, 30, 90, 150, 240], k=53)


def rows(lengths: list[int] = LENGTHS) -> Batch:
    """Row i holds the number i + 1 so many times."""
    made = [Document(torch.full((n,), i + 1), torch.ones(n, dtype=torch.bool)) for i, n in enumerate(lengths)]
    return pad_to_longest(made, 4096)


def seen(loader: ResumableLoader) -> list[list[int]]:
    return [batch.ids_BT[:, 0].tolist() for batch in loader]


def test_rows_are_as_long_as_the_longest() -> None:
    assert rows().ids_BT.shape == (53, 240)
    with pytest.raises(ValueError, match="a row holds 100"):
        pad_to_longest([Document(torch.arange(101), torch.ones(101, dtype=torch.bool))], 100)


def test_a_batch_ends_with_its_longest_row() -> None:
    whole = rows()
    for batch in BucketLoader(whole, 4, seed=1):
        longest = int(real_tokens(batch).max())
        assert batch.ids_BT.shape[1] == min(240, -(-longest // 64) * 64)
        for row in zip(*batch, strict=True):
            expected = [column[int(row[0][0]) - 1] for column in whole]
            assert all(torch.equal(one, other[: len(one)]) for one, other in zip(row, expected, strict=True))
            assert not (expected[2][len(row[0]) :] >= 0).any()
    assert (width(0, 240), width(64, 240), width(65, 240), width(200, 240), width(1, 7)) == (64, 64, 128, 240, 7)


def test_every_row_comes_once_and_rows_of_a_batch_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = BucketLoader(rows(), 4, seed=1)
    epochs = [seen(loader), seen(loader)]
    assert [sorted(chain(*epoch)) for epoch in epochs] == [list(range(1, 54))] * 2
    assert epochs[0] != epochs[1]
    assert [len(batch) for batch in epochs[0]] == [4] * 13 + [1]
    spread = [len({LENGTHS[i - 1] for i in batch}) for batch in epochs[0]]
    assert sum(spread) <= 14 + 5  # five lengths: at most four batches are mixed
    lengths = [LENGTHS[batch[0] - 1] for batch in epochs[0]]
    assert lengths != sorted(lengths, reverse=True)
    monkeypatch.setattr(buckets, "WINDOW", 2)
    assert sorted(chain(*seen(BucketLoader(rows(), 4, seed=1)))) == list(range(1, 54))


def test_padding_is_little() -> None:
    whole = rows()
    read = [batch.documents_BT for batch in BucketLoader(whole, 4, seed=1)]
    share = sum(int((one < 0).sum()) for one in read) / sum(one.numel() for one in read)
    assert padding_share(whole, 4, 1) == pytest.approx(share)
    assert share < 0.3 < float((whole.documents_BT < 0).float().mean())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_processes_share_equally_and_read_alike(world_size: int) -> None:
    loaders = [BucketLoader(rows(), 4, 5, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [list(loader) for loader in loaders]
    assert len({len(share) for share in batches}) == 1
    drawn = [row for share in batches for batch in share for row in zip(*batch, strict=True)]
    assert len(drawn) == -(-53 // world_size) * world_size
    assert sorted(int(row[0][0]) for row in drawn if (row[2] == 0).any()) == list(range(1, 54))
    for step in list(zip(*batches, strict=True))[:-1]:
        lengths = torch.cat([real_tokens(batch) for batch in step]).tolist()
        assert len(set(lengths)) <= 2 + (world_size > 1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 5, 13, 14])
def test_a_resumed_loader_goes_on_exactly(num_workers: int, taken: int) -> None:
    whole = BucketLoader(rows(), 4, seed=5)
    expected = [seen(whole) for _ in range(3)]
    stopped = BucketLoader(rows(), 4, seed=5, num_workers=num_workers)
    iterator = iter(stopped)
    assert [next(iterator).ids_BT[:, 0].tolist() for _ in range(taken)] == expected[0][:taken]
    state = stopped.state_dict()
    iterator.close()
    resumed = BucketLoader(rows(), 4, seed=5, num_workers=num_workers)
    resumed.load_state_dict(state)
    left = [*([expected[0][taken:]] if taken < 14 else []), *expected[1:]]
    assert [seen(resumed) for _ in left] == left


def test_another_packing_cannot_be_resumed() -> None:
    plain, bucket = ResumableLoader(rows(), 4), BucketLoader(rows(), 4)
    with pytest.raises(ValueError, match="packing was None in the checkpoint and is bucket now"):
        bucket.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="packing was bucket in the checkpoint and is None now"):
        plain.load_state_dict(bucket.state_dict())


def test_in_order_it_is_the_order_of_rows() -> None:
    assert list(chain(*seen(BucketLoader(rows(), 4, shuffle=False)))) == list(range(1, 54))
    assert BucketSampler(torch.tensor(LENGTHS), 4, shuffle=False).order(3) == list(range(53))


def test_conversations_in_buckets(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = [{"prompt": "two", "response": "four " * (1 + 30 * (i % 3))} for i in range(24)]
    path = str(write_jsonl(tmp_path / "a.jsonl", said))
    made = {packing: ChatData(path, path, packing=packing, seq_len=500, batch_size=4) for packing in ("pad", "bucket")}
    for data in made.values():
        data.prepare(tiny_tokenizer(CHATML))
    counts = [data.supervised_counts(400) for data in made.values()]
    assert torch.equal(*counts)
    shares = {name: data.padding_share(data.splits.train) for name, data in made.items()}
    assert shares["bucket"] < shares["pad"] / 2
    assert isinstance(made["bucket"].train_dataloader(), BucketLoader)
    assert {batch.ids_BT.shape[1] for batch in made["pad"].train_dataloader()} == {500}
    assert len({batch.ids_BT.shape[1] for batch in made["bucket"].train_dataloader()}) > 1
    assert pad([Document(torch.arange(2), torch.ones(2, dtype=torch.bool))], 4).ids_BT.shape == (1, 4)
