"""Damaged, vanished and unfinished caches, full disks and folders that may not be written."""

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.extraction.engines import TransformersEngine
from specdec.extraction.plan import rows_of
from specdec.features.contract import described
from specdec.features.index import Index
from specdec.features.pieces import packed_rows
from specdec.features.store import Store
from specdec.features.writer import CacheWriter
from specdec.files import sha256
from specdec.target import Target
from tests.features.made import Texts, contract_of, fill
from tests.tiny import largest_file

FLIPS = 120


def use(cache: Path) -> None:
    """Read every row, as an epoch does."""
    data = Texts()
    data.prepare(None)
    store = Store(cache, described(data))
    for row in packed_rows(data.splits.train) + packed_rows(data.splits.validation):
        aux = torch.zeros(len(row.ids_R), 3, 32)
        store.read(row, [0, 1, 2], aux, torch.zeros(len(row.ids_R), 32))


def test_a_whole_cache_is_read_and_verified(whole: Path) -> None:
    use(whole)
    Store(whole, {}).verify()
    assert len(list(whole.glob("shard-*.safetensors"))) > 2
    assert not list(whole.glob(".tmp-*")) and not (whole / "building.json").exists()


def test_any_flipped_bit_of_a_shard_is_refused_by_name(copied: Callable[[], Path]) -> None:
    cache, draw = copied(), random.Random(0)
    shards = sorted(cache.glob("shard-*.safetensors"))
    for _ in range(FLIPS):
        shard = draw.choice(shards)
        good = shard.read_bytes()
        at = draw.choice([draw.randrange(len(good)), draw.randrange(1200)])  # half of them in header and keys
        bad = bytearray(good)
        bad[at] ^= 1 << draw.randrange(8)
        shard.write_bytes(bad)
        with pytest.raises(ValueError, match=shard.name) as caught:
            Store(cache, {}).verify()
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
            Store(path.parent, {})


@pytest.mark.parametrize("size", [0, 7, 900, -1])
def test_a_shard_that_is_cut_off_is_refused_by_name(size: int, copied: Callable[[], Path]) -> None:
    cache = copied()
    shard = cache / "shard-00001.safetensors"
    os.truncate(shard, size if size >= 0 else shard.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors.*run the same specdec cache command"):
        use(cache)


def test_a_vanished_shard_is_named(copied: Callable[[], Path]) -> None:
    cache = copied()
    (cache / "shard-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00002\.safetensors: the shard is gone"):
        use(cache)


def test_a_shard_that_vanishes_later_is_named(copied: Callable[[], Path]) -> None:
    cache = copied()
    store = Store(cache, {})
    (cache / "shard-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00002\.safetensors: the shard is gone"):
        store.verify()


@pytest.mark.parametrize(
    "file",
    ["../shard-00000.safetensors", "shard-../ab.safetensors", "shard-abcde.safetensors", "shard-00000.safetensors\n"],
)
def test_an_index_cannot_name_files_elsewhere(file: str, copied: Callable[[], Path]) -> None:
    path = copied() / "index.json"
    index = Index.read(path)
    Index(index.contract, [index.shards[0]._replace(file=file)]).write(path)
    with pytest.raises(ValueError, match="is no shard's name"):
        Store(path.parent, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [("layers", "abc"), ("layers", [1, "2"]), ("layers", [1.0, True]),
     ("hidden_size", "32"), ("target", {}), ("target", []), ("data", None), ("dtype", "pickle"),
     ("numbering", "outputs of layers"), ("engine", 3)],
)  # fmt: skip
def test_an_index_that_says_nonsense_is_one_line(key: str, value: Any, copied: Callable[[], Path]) -> None:
    """Though its own hash is right."""
    path = copied() / "index.json"
    said = json.loads(path.read_text())
    said["contract"][key] = value
    body = {name: said[name] for name in ("contract", "shards")}
    said["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"index\.json") as caught:
        Store(path.parent, {})
    assert "\n" not in str(caught.value)


def test_spans_outside_a_shard_are_refused(copied: Callable[[], Path]) -> None:
    cache = copied()
    shard = cache / "shard-00001.safetensors"
    tensors = load_file(shard)
    tensors["spans"][0, 1] += 10**6
    save_file(tensors, shard)
    index = Index.read(cache / "index.json")
    entries = [e._replace(sha256=sha256(shard)) if e.file == shard.name else e for e in index.shards]
    Index(index.contract, entries).write(cache / "index.json")
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors: its spans lie outside"):
        Store(cache, {}).verify()


def test_an_unfinished_cache_and_none_are_told_apart(copied: Callable[[], Path], tmp_path: Path) -> None:
    cache = copied()
    (cache / "index.json").rename(cache / "building.json")
    with pytest.raises(ValueError, match="not finished: run the same specdec cache command again"):
        Store(cache, {})
    with pytest.raises(ValueError, match="make it with specdec cache --out"):
        Store(tmp_path / "nothing", {})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_are_not_written(value: float, target: Target, tmp_path: Path) -> None:
    data = Texts()
    contract = contract_of(target, data)
    engine, rows = TransformersEngine(target, contract.layers, "any"), rows_of(data)
    writer = CacheWriter(tmp_path, contract, 30_000)
    row, aux, final = next(engine.states(rows))
    aux[2, 1, 5] = value
    writer.add(row, aux, final)
    with pytest.raises(ValueError, match=rf"shard-00000\.safetensors: boundary 3 of token 2 holds {value}"):
        writer.finish()
    assert not (tmp_path / "index.json").exists()


def test_states_that_are_no_numbers_are_not_read(copied: Callable[[], Path]) -> None:
    """Though the hashes are right."""
    cache = copied()
    shard = cache / "shard-00001.safetensors"
    tensors = load_file(shard)
    tensors["final_PH"][4, 4] = float("nan")
    save_file(tensors, shard)
    index = Index.read(cache / "index.json")
    entries = [e._replace(sha256=sha256(shard)) if e.file == shard.name else e for e in index.shards]
    Index(index.contract, entries).write(cache / "index.json")
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors: the final state of token 4 holds nan"):
        use(cache)


def test_a_full_disk_is_told_and_costs_no_whole_shard(target: Target, whole: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fill(tmp_path / "other", target, Texts(texts=4))  # all is imported
    with largest_file(10_000), pytest.raises(ValueError, match=r"shard-00000\.safetensors: .*(File too large|space)"):
        fill(cache, target, Texts())
    assert not list(cache.glob(".tmp-*")) and not list(cache.glob("shard-*"))
    fill(cache, target, Texts())
    assert same(cache, whole)


def test_a_folder_that_may_not_be_written_is_named(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file.*: a part of the path is a file"):
        fill(tmp_path / "file" / "cache", target, Texts())


def test_a_file_system_that_is_read_only_is_told(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(ValueError, match=r"cache.shard-00000\.safetensors: the file system is read-only"):
        fill(tmp_path / "cache", target, Texts())


def same(one: Path, other: Path) -> bool:
    """Whether two caches are equal, byte by byte."""
    names = [sorted(p.name for p in cache.glob("*") if p.name != ".lock") for cache in (one, other)]
    return names[0] == names[1] and all((one / n).read_bytes() == (other / n).read_bytes() for n in names[0])


@pytest.mark.parametrize("damage", ["vanished", "flipped", "unfinished", "stale"])
def test_the_same_command_mends_a_cache(damage: str, copied: Callable[[], Path], whole: Path, target: Target) -> None:
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
        (cache / ".tmp-left").write_bytes(b"half a shard")
    fill(cache, target, Texts())
    assert same(cache, whole)


def test_a_cache_of_something_else_is_not_gone_on_with(copied: Callable[[], Path], target: Target) -> None:
    with pytest.raises(ValueError, match=r"made for something else: .*seq_len was 32, is 24; choose another --out"):
        fill(copied(), target, Texts(seq_len=24))
