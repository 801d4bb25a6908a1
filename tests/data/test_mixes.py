"""Sources with shares of the rows: the order, its place, what is said of them, and validation by source."""

import contextlib
import io
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specdec.data.loader import Batch, Mix, ResumableLoader, order
from specdec.data.mixes import MixSource, mix_of, read_mix, shares
from specdec.data.module import ChatData, TextData
from specdec.features.contract import described
from tests.data.tiny import CHATML, tiny_tokenizer, write_jsonl

COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@given(COUNTS, st.data(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_goes_on_where_the_last_one_stopped(
    counts: list[int], data: Any, seed: int
) -> None:
    weights = data.draw(st.lists(st.floats(0.5, 8), min_size=len(counts), max_size=len(counts)))
    mix = None
    sources = [MixSource("x", str(number), weight) for number, weight in enumerate(weights)]
    with contextlib.suppress(ValueError):
        mix = mix_of(sources, counts)
    assume(mix is not None)
    assert sum(mix.drawn) == sum(counts)
    wanted = [weight / sum(weights) * sum(counts) for weight in weights]
    assert all(abs(drawn - exact) < 1 for drawn, exact in zip(mix.drawn, wanted, strict=True))
    drawn = [mix.order(seed, epoch).tolist() for epoch in range(6)]
    assert drawn[3] == mix.order(seed, 3).tolist()  # of seed and epoch alone
    first = 0
    for rows, share in zip(counts, mix.drawn, strict=True):
        inside = range(first, first + rows)
        assert all(sum(row in inside for row in epoch) == share for epoch in drawn)
        times = Counter(row for epoch in drawn for row in epoch if row in inside)
        # none again before all were drawn
        assert max(times.values()) - min(times[row] for row in inside) <= 1
        first += rows


def test_a_source_is_gone_through_again_in_another_order() -> None:
    mix = Mix((9, 3), (3, 9))
    second = [[row for row in mix.order(0, epoch).tolist() if row >= 9] for epoch in range(2)]
    assert all(len(rows) == 9 for rows in second) and second[0] != second[1]
    first = [row for epoch in range(3) for row in mix.order(0, epoch).tolist() if row < 9]
    assert sorted(first) == list(range(9)) and first != list(range(9))
    assert mix.order(1, 0).tolist() != mix.order(0, 0).tolist()


def rows(count: int) -> Batch:
    ids_BT = torch.arange(count)[:, None].repeat(1, 2)
    return Batch(ids_BT, ids_BT >= 0, 0 * ids_BT)


def seen(loader: ResumableLoader) -> list[list[int]]:
    return [batch.ids_BT[:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("taken", [0, 2, 6])
def test_a_mix_is_resumed_exactly(taken: int) -> None:
    mix = Mix((9, 3), (4, 8))
    whole = ResumableLoader(rows(12), 2, seed=5, mix=mix)
    expected = [seen(whole) for _ in range(4)]
    stopped = ResumableLoader(rows(12), 2, seed=5, mix=mix)
    seen(stopped)
    iterator = iter(stopped)
    assert [next(iterator).ids_BT[:, 0].tolist() for _ in range(taken)] == expected[1][:taken]
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    iterator.close()
    place = torch.load(file, weights_only=True)
    resumed = ResumableLoader(rows(12), 2, seed=5, mix=mix)
    resumed.load_state_dict(place)
    left = [*([expected[1][taken:]] if taken < 6 else []), *expected[2:]]
    assert [seen(resumed) for _ in left] == left
    for other in (None, Mix((9, 3), (5, 7)), Mix((8, 4), (4, 8))):
        with pytest.raises(ValueError, match="the data cannot be resumed: mix was"):
            ResumableLoader(rows(12), 2, seed=5, mix=other).load_state_dict(place)


def test_processes_share_a_mix_and_no_batch_of_a_section_has_another_s_rows() -> None:
    mix = Mix((9, 4), (5, 8))
    parts = [
        ResumableLoader(rows(13), 2, 1, True, rank, 3, mix=mix).numbers(2).tolist()
        for rank in range(3)
    ]
    assert [row for turn in zip(*parts, strict=True) for row in turn if row >= 0] == mix.order(
        1, 2
    ).tolist()
    loaders = [
        ResumableLoader(rows(13), 2, 0, False, rank, 2, sections=[7, 6]) for rank in range(2)
    ]
    batches = [seen(loader) for loader in loaders]
    assert [len(part) for part in batches] == [len(loader) for loader in loaders] == [4, 4]
    # 0: a blank row
    assert batches == [[[0, 2], [4, 6], [7, 9], [11]], [[1, 3], [5, 0], [8, 10], [12]]]


def chats(path: Path, count: int, words: str) -> str:
    said = [
        {"prompt": f"{words} {i % 7}", "response": f"{words} " * (1 + i % 5) + str(i)}
        for i in range(count)
    ]
    return str(write_jsonl(path, said))


def made(train: Any, val: Any = None, **more: Any) -> ChatData:
    data = ChatData(train, val, **({"seq_len": 48, "val_fraction": 0.2, "batch_size": 2} | more))
    data.prepare(tiny_tokenizer(CHATML))
    return data


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [
        chats(tmp_path / "sky.jsonl", 60, "the sky"),
        chats(tmp_path / "two.jsonl", 25, "two plus"),
    ]


def test_a_mix_is_packed_by_source_and_drawn_by_weight(
    files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        data = made([MixSource(files[0], "sky", 1.0), MixSource([files[1]], None, 3.0)])
    alone = [made(file) for file in files]
    columns = zip(data.splits.train, *(one.splits.train for one in alone), strict=True)
    assert all(torch.equal(mixed, torch.cat([first, second])) for mixed, first, second in columns)
    assert data.mix is not None and data.mix.rows == tuple(
        len(one.splits.train.ids_BT) for one in alone
    )
    total = sum(data.mix.rows)
    assert abs(data.mix.drawn[1] / total - 0.75) < 1 / total
    first = data.first_rows(7)
    drawn = data.mix.order(0, 0)[:7]
    assert torch.equal(first.ids_BT, data.splits.train.ids_BT[drawn])
    loaded = torch.cat([batch.ids_BT for batch in data.train_dataloader()])
    assert torch.equal(loaded[:7], first.ids_BT.long()) and len(loaded) == total
    assert f"train: two: {data.mix.rows[1]} rows, {data.mix.drawn[1]} of an epoch" in caplog.text
    told = data.shares
    assert [one["name"] for one in told] == ["sky", "two"] and sum(
        one["share_of_rows"] for one in told
    ) == 1
    supervised = [int(data.splits.train.loss_mask_BT[row].sum()) for row in data.mix.order(0, 0)]
    exact = sum(
        n
        for n, row in zip(supervised, data.mix.order(0, 0), strict=True)
        if row >= data.mix.rows[0]
    )
    assert abs(told[1]["share_of_supervised_tokens"] - exact / sum(supervised)) < 0.1
    counts_V = data.supervised_counts(400)
    once = [one.supervised_counts(400) for one in alone]
    assert ((counts_V > 0) == (once[0] + once[1] > 0)).all()
    word = tiny_tokenizer().encode("two")[0]
    assert counts_V[word] == -(-int(once[1][word]) * data.mix.drawn[1] // data.mix.rows[1])


def test_names_without_weights_draw_every_row_once(files: list[str]) -> None:
    data = made([MixSource(files[0]), MixSource(files[1])])
    assert data.mix is None and data.train_dataloader().state_dict()["mix"] is None
    count = len(data.splits.train.ids_BT)
    assert torch.equal(data.train_dataloader().numbers(3), order(count, 0, 3))
    plain = made(files)
    assert not plain.shares and not plain.validation_sections and plain.mix is None
    assert not torch.equal(
        plain.splits.train.ids_BT[:count],
        data.splits.train.ids_BT[: len(plain.splits.train.ids_BT)],
    )


def test_validation_is_by_source(files: list[str]) -> None:
    data = made([MixSource(files[0], "sky", 1.0), MixSource(files[1], "two", 1.0)])
    parts = [made(file).splits.validation for file in files]
    assert data.validation_sections == {"sky": len(parts[0].ids_BT), "two": len(parts[1].ids_BT)}
    loader = data.val_dataloader()
    names = [data.validation_source(number) for number in range(len(loader) + 1)]
    assert names == ["sky"] * -(-len(parts[0].ids_BT) // 2) + ["two"] * -(
        -len(parts[1].ids_BT) // 2
    ) + [None]
    for name, batch in zip(names[:-1], loader, strict=True):
        part = parts[0 if name == "sky" else 1].ids_BT
        assert all((part == row).all(1).any() for row in batch.ids_BT)
    named = made(files[0], [MixSource(files[1], "held")])
    assert list(named.validation_sections) == ["held"] and not named.shares
    unnamed = made([MixSource(files[0], "sky")], files[1])
    assert not unnamed.validation_sections and unnamed.validation_source(0) is None


def test_a_mix_of_texts(tmp_path: Path) -> None:
    paths = [
        str(write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(40)]))
        for name in "ab"
    ]
    data = TextData([MixSource(path, weight=1.0) for path in paths], val_fraction=0.2, seq_len=16)
    data.prepare(tiny_tokenizer())
    assert data.mix is not None and list(data.validation_sections) == ["a", "b"]


def test_what_a_cache_of_features_is_of_knows_the_weights(files: list[str]) -> None:
    first, second = (
        described(made([MixSource(files[0], "a", 1.0), MixSource(files[1], "b", w)]))
        for w in (1.0, 2.0)
    )
    assert first != second and first["train"][1] == {"source": files[1], "name": "b", "weight": 1.0}


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ([MixSource("a", "x"), MixSource("b", "x")], None, "data.train: two sources are called x"),
        ([MixSource("a", "x y")], None, "'x y' is no name"),
        ([MixSource("a", weight=1.0), MixSource("b")], None, "give all sources a weight, or none"),
        (["a", MixSource("b")], None, "data.train: 'a': give paths alone, or every source"),
        ("a", [MixSource("b", weight=1.0)], "data.val: validation reads every row once"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(train: Any, val: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatData(train, val)


def test_numbers_of_a_mix_are_checked(files: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.train\.weight must be above 0"):
        MixSource("a", weight=0.0)
    with pytest.raises(ValueError, match="the weight of two is less than one of the"):
        made([MixSource(files[0], weight=1e6), MixSource(files[1], weight=1.0)])
    one = chats(tmp_path / "one.jsonl", 1, "the")
    with pytest.raises(ValueError, match="one: 1 document cannot be split"):
        made([MixSource(files[0]), MixSource(one)])
    assert read_mix("a", "x") == [MixSource("a")] and read_mix(["a", "b"], "x") == [
        MixSource(["a", "b"])
    ]
    assert shares([MixSource("a", "n")], [4], torch.tensor([8]))[0]["share_of_rows"] == 1


@pytest.mark.parametrize("broken", ["refuse", "drop"])
def test_a_token_that_the_target_lacks_is_named_with_its_row(
    files: list[str], tmp_path: Path, broken: str
) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    size = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    texts = str(
        write_jsonl(tmp_path / "texts.jsonl", [{"text": "the"}, {"text": ""}, {"text": "a <new>"}])
    )
    with open(files[1], "a") as file:
        file.write('{"prompt": "x", "response": ""}\n' + '{"prompt": "x"}\n' * (broken == "drop"))
        file.write('{"prompt": "x", "response": "a <new> word"}\n')
    line = 27 + (broken == "drop")
    for data, place in (
        (ChatData(files, files, broken=broken), f"{files[1]}, line {line}"),
        (
            ChatData([MixSource(file) for file in files], files, broken=broken),
            f"{files[1]}, line {line}",
        ),
        (TextData(texts, texts), f"{texts}, line 3"),
    ):
        data.prepare(tokenizer)
        data.check_vocabulary(size + 1)
        with pytest.raises(
            ValueError,
            match=rf"holds token id {size} \(1 such tokens\), .* correct {place}, which has",
        ):
            data.check_vocabulary(size)
