"""Damaged, vanished and unfinished caches, full disks and folders that may not be written."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.data import Batch
from specdec.engines.extract import stored_rows
from specdec.features.contract import described
from specdec.features.runners import TransformersEngine
from specdec.features.store import FeatureStore, PackedRow, each_row, shard_rows
from specdec.features.writer import CacheWriter
from specdec.target import Target
from tests.features.made import Texts, contract_of, fill
from tests.tiny import largest_file

FLIPS = 40


def use(cache: Path) -> None:
    """Read every row, as an epoch does."""
    data = Texts()
    data.prepare(None)
    store = FeatureStore(cache, described(data))
    for row in [*each_row(data.splits.train), *each_row(data.splits.validation)]:
        aux = torch.zeros(len(row.ids_R), 3, 32)
        store.read(row, [0, 1, 2], aux, torch.zeros(len(row.ids_R), 32))


def test_any_flipped_bit_of_a_shard_is_refused_by_name(copied: Callable[[], Path]) -> None:
    cache, draw = copied(), random.Random(0)
    shards = sorted(cache.glob("shard-*.safetensors"))
    for _ in range(FLIPS):
        shard = draw.choice(shards)
        good = shard.read_bytes()
        # half of them in header and keys
        at = draw.choice([draw.randrange(len(good)), draw.randrange(1200)])
        bad = bytearray(good)
        bad[at] ^= 1 << draw.randrange(8)
        shard.write_bytes(bad)
        with pytest.raises(ValueError, match=shard.name) as caught:
            FeatureStore(cache, {}).verify()
        with pytest.raises(ValueError, match=shard.name):
            use(cache)
        assert "\n" not in str(caught.value)
        shard.write_bytes(good)
    use(cache)


def test_any_flipped_bit_of_the_index_is_refused(copied: Callable[[], Path]) -> None:
    path, draw = copied() / "index.json", random.Random(0)
    good = path.read_bytes()
    for _ in range(FLIPS):
        bad = bytearray(good)
        bad[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        if bad.split() == good.split():  # one blank for another
            continue
        with pytest.raises(ValueError, match=r"index\.json"):
            FeatureStore(path.parent, {})


def test_a_column_of_another_dtype_is_refused_by_name(copied: Callable[[], Path]) -> None:
    """The bytes are read as the cache's index says, and are right; the header says otherwise."""
    cache = copied()
    shard = cache / "shard-00001.safetensors"
    good = shard.read_bytes()
    assert good.count(b'"F32"') >= 2
    shard.write_bytes(good.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors.*is I32, not F32"):
        shard_rows(shard, FeatureStore(cache, {}).contract.columns())


@pytest.mark.parametrize("size", [0, 7, 900, -1])
def test_a_shard_that_is_cut_off_is_refused_by_name(size: int, copied: Callable[[], Path]) -> None:
    cache = copied()
    shard = cache / "shard-00001.safetensors"
    os.truncate(shard, size if size >= 0 else shard.stat().st_size - 1)
    with pytest.raises(
        ValueError, match=r"shard-00001\.safetensors.*run the same specdec cache command"
    ):
        use(cache)


def test_an_unfinished_cache_and_none_are_told_apart(
    copied: Callable[[], Path], tmp_path: Path
) -> None:
    cache = copied()
    (cache / "index.json").rename(cache / "building.json")
    with pytest.raises(ValueError, match="not finished: run the same specdec cache command again"):
        FeatureStore(cache, {})
    with pytest.raises(ValueError, match="make it with specdec cache --out"):
        FeatureStore(tmp_path / "nothing", {})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_are_not_written(
    value: float, target: Target, tmp_path: Path
) -> None:
    data = Texts()
    contract = contract_of(target, data)
    engine, rows = TransformersEngine(target, contract.layers, "any"), stored_rows(data)
    row, aux, final = next(engine.states(rows))
    aux[2, 1, 5] = value
    with (
        pytest.raises(
            ValueError,
            match="the target's boundary 3 holds NaN or infinity: run it in a wider dtype",
        ),
        CacheWriter.building(tmp_path, contract, 30_000) as writer,
    ):
        writer.add(row, aux, final)
    assert not (tmp_path / "index.json").exists()


def test_a_full_disk_is_told_and_costs_no_whole_shard(
    target: Target, whole: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    fill(tmp_path / "other", target, Texts(texts=4))  # all is imported
    with (
        largest_file(10_000),
        pytest.raises(ValueError, match=r"shard-00000\.safetensors: .*(File too large|space)"),
    ):
        fill(cache, target, Texts())
    assert not list(cache.glob(".tmp-*")) and not list(cache.glob("shard-*"))
    fill(cache, target, Texts())
    assert same(cache, whole)


def same(one: Path, other: Path) -> bool:
    """Whether two caches are equal, byte by byte."""
    names = [sorted(p.name for p in cache.glob("*") if p.name != ".lock") for cache in (one, other)]
    return names[0] == names[1] and all(
        (one / n).read_bytes() == (other / n).read_bytes() for n in names[0]
    )


@pytest.mark.parametrize("damage", ["vanished", "flipped", "unfinished", "stale"])
def test_the_same_command_mends_a_cache(
    damage: str, copied: Callable[[], Path], whole: Path, target: Target
) -> None:
    cache = copied()
    shard = cache / "shard-00001.safetensors"
    if damage == "vanished":
        shard.unlink()
    elif damage == "flipped":
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    elif damage == "unfinished":
        said = json.loads((cache / "index.json").read_text())
        (cache / "index.json").rename(cache / "building.json")
        for entry in said["shards"][2:]:
            (cache / entry["file"]).unlink()
    else:
        (cache / ".tmp-0123456789ab").mkdir()
        (cache / ".tmp-0123456789ab" / ".lock").touch()  # which nobody holds
        (cache / ".tmp-0123456789ab" / "shard-00003.safetensors").write_bytes(b"half a shard")
    fill(cache, target, Texts())
    assert same(cache, whole)


def test_a_cache_of_something_else_is_not_gone_on_with(
    copied: Callable[[], Path], target: Target
) -> None:
    with pytest.raises(
        ValueError, match=r"made for something else: .*seq_len was 32, is 24; choose another --out"
    ):
        fill(copied(), target, Texts(seq_len=24))


def row(ids: list[int], documents: list[int]) -> PackedRow:
    (found,) = each_row(
        Batch(
            torch.tensor([ids]),
            torch.ones(1, len(ids), dtype=torch.bool),
            torch.tensor([documents]),
        )
    )
    return found


def test_a_key_is_of_ids_and_borders_alone() -> None:
    one = row([5, 6, 7, 8, 0, 0], [0, 0, 1, 1, -1, -1])
    assert [piece.tolist() for piece in one.pieces()] == [[5, 6], [7, 8]] and one.tokens == 4
    assert one.key == row([5, 6, 7, 8], [0, 0, 1, 1]).key  # no padding
    assert one.key != row([5, 6, 7, 8], [0, 0, 0, 0]).key != row([5, 6, 7, 8], [0, 1, 1, 1]).key
    assert row([0, 0], [-1, -1]).tokens == 0


def test_a_shard_that_changes_while_a_cache_is_used_is_refused_by_name(
    copied: Callable[[], Path],
) -> None:
    """Cut off, gone, or another's: none of it is a SIGBUS, which no Python could catch."""
    cache, data = copied(), Texts()
    data.prepare(None)
    store, rows = FeatureStore(cache, described(data)), [*each_row(data.splits.train)]
    shard = cache / "shard-00000.safetensors"
    whole = shard.read_bytes()

    def read() -> None:
        for row in rows:
            store.read(
                row, [0], torch.zeros(len(row.ids_R), 1, 32), torch.zeros(len(row.ids_R), 32)
            )

    read()
    os.truncate(shard, 4096)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors: it is cut off: run the same"):
        read()
    shard.write_bytes(whole)
    read()
    half = len(whole) // 2
    shard.write_bytes(whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :])
    with pytest.raises(
        ValueError,
        match=r"shard-00000\.safetensors: a row's CRC-32 is not the one .*: run the same",
    ):
        read()
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors: no such file"):
        read()


def test_a_cache_holds_no_file_open(copied: Callable[[], Path]) -> None:
    """Of a thousand shards a process may not have more open."""
    cache, before = copied(), len(os.listdir("/proc/self/fd"))
    use(cache)
    store = FeatureStore(cache, {})
    assert len(os.listdir("/proc/self/fd")) == before and store.entries
    assert str(cache) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("taps", [[], [1], [0, 1, 2], [2, 0]])
@pytest.mark.parametrize("columns", [0, 1])
def test_rows_are_read_as_they_were_written(
    copied: Callable[[], Path], taps: list[int], columns: int
) -> None:
    """Into a whole batch's row, or into part of its boundaries."""
    cache, data = copied(), Texts()
    data.prepare(None)
    store = FeatureStore(cache, described(data))
    stored = [load_file(path) for path in sorted(cache.glob("shard-*"))]
    aux, final = (torch.cat([one[name] for one in stored]) for name in ("aux_PNH", "final_PH"))
    keys = [bytes(key) for one in stored for key in one["keys"].numpy()]
    sizes = torch.cat([one["sizes_E"] for one in stored]).tolist()
    places = dict(zip(keys, zip(aux.split(sizes), final.split(sizes), strict=True), strict=True))
    for row in each_row(data.splits.train):
        R, T = row.tokens, row.tokens + 3
        found, end = torch.zeros(T, len(taps) + columns, 32), torch.zeros(T, 32)
        store.read(row, taps, found, end)
        aux_RNH, final_RH = places[row.key]
        assert torch.equal(found[:R, : len(taps)], aux_RNH[:, taps]) and torch.equal(
            end[:R], final_RH
        )
        assert not found[R:].any() and not found[:, len(taps) :].any() and not end[R:].any()


def test_a_pipe_in_place_of_a_shard_is_refused(copied: Callable[[], Path]) -> None:
    """Nothing waits for what never comes."""
    directory = copied()
    shard = next(directory.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(ValueError, match="no regular file"):
        FeatureStore(directory, {})
