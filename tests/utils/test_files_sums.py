"""A directory's files beside their hashes."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.utils.files import SUMS, check_sums, write_sums


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}\n')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(40)))
    write_sums(tmp_path)
    return tmp_path


def test_it_is_what_sha256sum_reads(directory: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=directory, check=True)
    (directory / "logs").mkdir()
    (directory / ".gitattributes").touch()  # as a repository on the Hub has
    (directory / "README.md").write_text("a card, which is edited there")
    check_sums(directory, "copy it again")
    (directory / ".gitattributes").unlink()
    (directory / "LICENSE").touch()
    write_sums(directory)  # it does not list itself
    assert len((directory / SUMS).read_text().splitlines()) == 2


def test_every_flipped_bit_is_found_and_its_file_named(directory: Path) -> None:
    for file in directory.iterdir():
        whole = file.read_bytes()
        for at in range(len(whole)):
            for bit in (0, 3, 5, 7):
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
                with pytest.raises(ValueError, match=rf"{file.name if file.name != SUMS else directory.name}.*copy it"):
                    check_sums(directory, "copy it again")
        file.write_bytes(whole)
    check_sums(directory, "copy it again")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda d: (d / SUMS).write_text(""), "damaged or cut off"),
    "cut": (lambda d: (d / SUMS).write_text((d / SUMS).read_text()[:-1]), "damaged or cut off"),
    "outside": (lambda d: (d / SUMS).write_text(f"{'0' * 64}  ../x\n"), "damaged or cut off"),
    "a line": (
        lambda d: (d / SUMS).write_text((d / SUMS).read_text().splitlines(keepends=True)[0]),
        rf"safetensors: its SHA-256 is not that in {SUMS}",
    ),
    "more": (lambda d: (d / "extra.bin").touch(), rf"extra\.bin: its SHA-256 is not that in {SUMS}"),
    "a file": (lambda d: (d / "config.json").unlink(), r"config\.json: its SHA-256"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_missing_is_named(name: str, directory: Path) -> None:
    damage, message = DAMAGE[name]
    damage(directory)
    with pytest.raises(ValueError, match=message):
        check_sums(directory, "copy it again")
