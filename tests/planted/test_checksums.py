"""Damage to a folder that keeps its hashes: each is found, and the file is named."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.utils.files import write_sums
from specdec.utils.reading import SUMS, check_sums

Damage = Callable[[Path], None]


def changed(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Damage:
    """Other bytes in a file of the same size and time."""

    def damage(folder: Path) -> None:
        file = folder / name
        about = file.stat()
        file.write_bytes(change(file.read_bytes()))
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))

    return damage


def swapped(folder: Path) -> None:
    """Two files have each other's names."""
    (folder / "config.json").rename(folder / "other")
    (folder / "model.safetensors").rename(folder / "config.json")
    (folder / "other").rename(folder / "model.safetensors")


def of_another(folder: Path) -> None:
    """A file of another folder of the same kind."""
    (folder / "config.json").write_text('{"a": 2}\n')


def one_file_less(folder: Path) -> None:
    """It has gone, and with it what the list says."""
    (folder / "config.json").unlink()


def one_file_more(folder: Path) -> None:
    """It has come from elsewhere."""
    (folder / "extra.safetensors").write_bytes(b"more")


def a_line_less(folder: Path) -> None:
    """The list no longer says anything of a file."""
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(lines[1:]))


def pipe(folder: Path) -> None:
    """The list is a pipe, which nobody could read to its end."""
    (folder / SUMS).unlink()
    os.mkfifo(folder / SUMS)


FAULTS: dict[str, Damage] = {
    "one bit": changed(lambda data: bytes([data[0] ^ 1]) + data[1:]),
    "the last bit": changed(lambda data: data[:-1] + bytes([data[-1] ^ 128])),
    "cut off": changed(lambda data: data[:-1]),
    "a byte more": changed(lambda data: data + b"\0"),
    "empty": changed(lambda data: b""),
    "two bytes exchanged": changed(lambda data: data[:3] + data[4:2:-1] + data[5:]),
    "zeros in place of a block": changed(lambda data: data[:8] + bytes(16) + data[24:]),
    "two files exchanged": swapped,
    "a file of another folder": of_another,
    "a file less": one_file_less,
    "a file more": one_file_more,
    "a line less in the list": a_line_less,
    "a bit in the list": changed(lambda data: bytes([data[0] ^ 1]) + data[1:], SUMS),
    "an empty list": changed(lambda data: b"", SUMS),
    "a pipe in place of the list": pipe,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A drafter's files, as far as their names go."""
    (tmp_path / "config.json").write_text('{"a": 1}\n')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(1, 41)))
    write_sums(tmp_path)
    return tmp_path


def test_without_damage_it_holds(folder: Path) -> None:
    assert set(check_sums(folder)) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_damage_is_found(fault: str, folder: Path) -> None:
    FAULTS[fault](folder)
    with pytest.raises(ValueError, match=r"config\.json|\.safetensors|SHA256SUMS"):
        check_sums(folder)
