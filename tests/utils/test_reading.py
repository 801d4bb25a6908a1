"""A directory's files beside their hashes."""

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.utils import reading
from specdec.utils.files import write_sums
from specdec.utils.reading import (
    SUMS,
    check_listed,
    check_sum,
    check_sums,
    open_regular,
    read_json,
    sha256,
)


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


def test_hashes_are_returned_by_any_name(directory: Path) -> None:
    (directory / "für.jsonl").touch()
    write_sums(directory)
    assert check_sums(directory) == {
        name: sha256(directory / name) for name in ("config.json", "für.jsonl", "model.safetensors")
    }
    (directory / SUMS).unlink()
    assert check_sums(directory) == {}


def test_a_hash_beside_a_file_is_read_as_tools_write_it(tmp_path: Path) -> None:
    file, beside = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.sha256"
    file.write_text("{}\n")
    digest = sha256(file)
    for text in (
        "{}",
        "{}  rows.jsonl\n",
        "{} *rows.jsonl\r\n",
        "{}  data/rows.jsonl\n",
        "{}  ./rows.jsonl",
    ):
        beside.write_bytes(text.format(digest).encode())
        check_sum(file)
    beside.write_text(digest.upper())
    check_sum(file)
    wrong = (
        f"{digest}  other.jsonl\n",
        digest[:-1],
        digest.capitalize().swapcase(),
        f"{digest}  r/ws.jsonl",
    )
    for text in wrong:
        beside.write_text(text)
        with pytest.raises(ValueError, match="damaged"):
            check_sum(file)


def test_every_flipped_bit_is_found_and_its_file_named(directory: Path) -> None:
    for file in directory.iterdir():
        whole = file.read_bytes()
        for at in range(len(whole)):
            for bit in (0, 3, 5, 7):
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
                with pytest.raises(
                    ValueError,
                    match=rf"{file.name if file.name != SUMS else directory.name}.*copy it",
                ):
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
    "more": (
        lambda d: (d / "extra.bin").touch(),
        rf"extra\.bin: its SHA-256 is not that in {SUMS}",
    ),
    "a file": (lambda d: (d / "config.json").unlink(), r"config\.json: its SHA-256"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_missing_is_named(name: str, directory: Path) -> None:
    damage, message = DAMAGE[name]
    damage(directory)
    with pytest.raises(ValueError, match=message):
        check_sums(directory, "copy it again")


def test_unreadable_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    with pytest.raises(ValueError, match=r"v\.json: no such file or directory"):
        reading.read_json(path)
    with pytest.raises(ValueError, match="it is a directory"):
        reading.read_json(tmp_path)
    path.write_bytes(b'"caf\xe9"')
    with pytest.raises(ValueError, match=r"v\.json: not UTF-8 text .* at byte 4"):
        reading.read_json(path)
    path.write_text('{\n"a": 1,\n}')
    with pytest.raises(ValueError, match=r"v\.json, line \d: not valid JSON"):
        reading.read_json(path)


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "data").write_bytes(data)
    assert reading.sha256(tmp_path / "data") == hashlib.sha256(data).hexdigest()


def test_json_of_no_sane_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v.json"
    for text in ("[" * 10**5 + "]" * 10**5, '{"a":' * 10**5, "[" + "9" * 10_000 + "]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"v\.json: not JSON of a sane size: \w+") as told:
            reading.read_json(path)
        assert len(str(told.value)) < 300 and "\n" not in str(told.value)
    monkeypatch.setattr(reading, "MOST_JSON", 10)
    path.write_text("123456789\n")
    assert reading.read_json(path) == 123456789
    path.write_text("1234567890\n")
    with pytest.raises(
        ValueError, match=r"v\.json: 11 bytes, and no JSON file of more than 10 is read"
    ):
        reading.read_json(path)


@pytest.mark.parametrize("read", [reading.read_json, reading.sha256, reading.regular])
def test_what_may_never_end_is_not_read(read: Callable[[Path], object], tmp_path: Path) -> None:
    """A device, a pipe that nobody writes to, and links to them."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(ValueError, match=rf"^{path}: it is a pipe or device, no regular file$"):
            read(path)
    with pytest.raises(ValueError, match="it is a directory"):
        read(tmp_path)
    with pytest.raises(ValueError, match="nowhere: no such file"):
        read(tmp_path / "nowhere")


COMMANDS = (
    "sha256sum * > SHA256SUMS", "sha256sum * > SHA256SUMS; sha256sum * > SHA256SUMS", "sha256sum -b * > SHA256SUMS",
    "sha256sum ./* > SHA256SUMS", "sha256sum --tag * > SHA256SUMS",
    "sha256sum * */* > SHA256SUMS; echo '# data' >> SHA256SUMS",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_list_of_somebody_else_is_read_as_sha256sum_reads_it(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    files = [
        tmp_path / name
        for name in ("README.md", "LICENSE", "rows.arrow", "a  b", "a\\n\nb", "more/x")
    ]
    for file in files:
        file.write_text(file.name)
    subprocess.run(["bash", "-c", command], cwd=tmp_path)
    (tmp_path / "unlisted").touch()
    check_listed(tmp_path)
    for file in files:
        if file.parent == tmp_path or "*/*" in command:
            file.write_text("changed")
            with pytest.raises(ValueError, match="its SHA-256 is not that in SHA256SUMS"):
                check_listed(tmp_path)
            file.unlink()
            with pytest.raises(ValueError, match="its SHA-256 is not that in SHA256SUMS"):
                check_listed(tmp_path)
            file.write_text(file.name)
    (tmp_path / SUMS).unlink()
    check_listed(tmp_path)


def test_a_list_of_no_hashes_or_of_files_elsewhere_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for line in (f"{sha256(__file__)}  {__file__}", f"{'0' * 64} x", "x", f"{'0' * 63}  x"):
        (data / SUMS).write_text(f"{line}\n")
        with pytest.raises(ValueError, match="SHA256SUMS"):
            check_listed(data)
    (tmp_path / "x").touch()
    (data / SUMS).write_text(f"{sha256(tmp_path / 'x')}  ../x\n")
    with pytest.raises(ValueError, match="SHA256SUMS"):
        check_listed(data)


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    """A pipe would be waited for, and a device never ends."""
    path = tmp_path / "a.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    wanted = "it is a directory" if kind == "directory" else "it is a pipe or device"
    (tmp_path / "b.json").write_text("{}")
    reads: list[Callable[[], object]] = [
        lambda: open_regular(path),
        lambda: sha256(path),
        lambda: read_json(path),
    ]
    # in place of a list of hashes it is refused, too: else nothing would be compared
    path.rename(tmp_path / "b.json.sha256")
    with pytest.raises(ValueError, match=wanted):
        read_json(tmp_path / "b.json")
    (tmp_path / "b.json.sha256").rename(path)
    for read in reads:
        with pytest.raises(ValueError, match=f"a.json: {wanted}"):
            read()
