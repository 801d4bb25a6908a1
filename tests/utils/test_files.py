import errno
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.utils import files, reading


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write_and_fail(path: Path, error: type[BaseException]) -> None:
    with files.staged(path) as temporary:
        temporary.write_text("half")
        raise error


def fill_and_fail(path: Path, error: type[BaseException], replace: bool = False) -> None:
    with files.staged_directory(path, replace=replace) as temporary:
        (temporary / "new.txt").write_text("new")
        raise error


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "no space left on device"),
        (errno.EACCES, "permission denied"),
        (errno.EROFS, "read-only file system"),
        (errno.ENOENT, "no such file or directory"),
        (errno.ENOTDIR, "a part of the path is a file, not a directory"),
        (errno.EISDIR, "it is a directory"),
    ],
)
def test_a_reason_in_one_line(code: int, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^some/path: {reason}$"), files.explained("some/path"):
        raise OSError(code, os.strerror(code))


def test_an_error_without_a_number_keeps_its_words() -> None:
    with pytest.raises(ValueError, match=r"^x: odd$"), files.explained(Path("x")):
        raise OSError("odd")


def test_a_staged_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.bin"
    with files.staged(path) as temporary:
        assert temporary.parent.parent == path.parent  # the same file system
        temporary.write_bytes(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert names(path.parent) == ["file.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_block_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(error):
        write_and_fail(path, error)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(ValueError, match=r"file\.txt: no space left"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_a_block_may_replace_the_temporary_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with files.staged(path) as temporary:
        other = tmp_path / "other"
        other.write_text("saved by renaming")
        os.replace(other, temporary)
    assert path.read_text() == "saved by renaming"
    assert names(tmp_path) == ["file.txt"]


def test_a_staged_directory_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run"
    with files.staged_directory(path) as temporary:
        assert temporary.parent.parent == path.parent
        (temporary / "inner").mkdir()
        (temporary / "inner" / "a.txt").write_text("a")
        (temporary / "b.txt").write_text("b")
        assert not path.exists()
    assert (path / "inner" / "a.txt").read_text() == "a"
    assert names(path) == [files.SUMS, "b.txt", "inner"]
    assert path.stat().st_mode & 0o777 == 0o755
    assert names(path.parent) == ["run"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_block_leaves_no_directory(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        fill_and_fail(tmp_path / "run", error)
    assert names(tmp_path) == []


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_exists_is_never_overwritten_silently(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "run")
    with (
        pytest.raises(ValueError, match="exists already"),
        files.staged_directory(tmp_path / "run"),
    ):
        pytest.fail("the block must not run")
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_without_a_name_is_there_already(path: str) -> None:
    with pytest.raises(ValueError, match="exists already"), files.claimed(Path(path)):
        pass


def test_a_directory_is_replaced_whole_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "old.txt").write_text("old")
    with files.staged_directory(path, replace=True) as temporary:
        (temporary / "new.txt").write_text("new")
        assert names(path) == ["old.txt"]
    assert names(path) == [files.SUMS, "new.txt"]
    assert names(tmp_path) == ["run"]


def test_a_failed_replacement_leaves_the_old_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "old.txt").write_text("old")
    with pytest.raises(RuntimeError):
        fill_and_fail(path, RuntimeError, replace=True)
    assert names(path) == ["old.txt"]
    assert names(tmp_path) == ["run"]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_no_directory(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="run: no space left"),
        files.staged_directory(tmp_path / "run"),
    ):
        pass
    assert names(tmp_path) == []


def test_text_is_utf8(tmp_path: Path) -> None:
    files.write_text(tmp_path / "t.txt", "é\n")
    assert (tmp_path / "t.txt").read_bytes() == b"\xc3\xa9\n"


def test_json_comes_back(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None, True], "a": "é"}
    files.write_json(tmp_path / "v.json", value)
    assert reading.read_json(tmp_path / "v.json") == value
    text = (tmp_path / "v.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert "é" in text
    assert list(json.loads(text)) == ["b", "a"]  # order is kept


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_written(tmp_path: Path, bad: float) -> None:
    files.write_json(tmp_path / "v.json", 1)
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "v.json", {"x": [bad]})
    assert reading.read_json(tmp_path / "v.json") == 1
    assert names(tmp_path) == ["v.json"]


WRITER = """
import sys, time
from specdec.utils.files import staged
with staged(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_the_next_writer_removes_what_killed_ones_have_left_and_nothing_else(
    tmp_path: Path,
) -> None:
    def writer() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "x")], stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
        return process

    def folders() -> list[Path]:
        return [path for path in tmp_path.glob(".tmp-*") if path.is_dir()]

    (own := tmp_path / ".tmp-of-somebody").write_text("mine")
    with writer() as killed:
        killed.kill()
    assert len(folders()) == 1
    with writer() as living:
        (left,) = folders()  # the living one's: the other went when it began
        files.write_text(tmp_path / "y", "whole")
        assert folders() == [left] and own.exists()
        living.kill()
    files.write_text(tmp_path / "y", "again")
    assert names(tmp_path) == [".tmp-of-somebody", "y"]


def test_what_was_being_replaced_when_its_writer_died_is_there(tmp_path: Path) -> None:
    """Killed between the two renames: the new content is whole, and takes its place at the next write."""
    folder = tmp_path / ".tmp-0123456789ab"
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "new").touch()
    (folder / ".replaced").mkdir()
    (folder / ".lock").touch()
    files.write_text(tmp_path / "other", "")
    assert (tmp_path / "run" / "new").exists() and not folder.exists()


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_that_lost_a_file_while_it_was_written_is_not_left(
    replace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = tmp_path / "run", os.replace
    if replace:
        path.mkdir()
        (path / "old").touch()

    def deleting(source: Path, to: Path) -> None:
        (source / "new").unlink(missing_ok=True)
        rename(source, to)

    monkeypatch.setattr(os, "replace", deleting)
    with (
        pytest.raises(
            ValueError, match="run: new was removed while it was written: run the command again"
        ),
        files.staged_directory(path, replace=replace) as temporary,
    ):
        (temporary / "new").touch()
    assert names(tmp_path) == (["run"] if replace else [])
    assert not replace or names(path) == ["old"]


def test_what_a_kill_left_beside_a_whole_folder_goes_when_it_is_asked_for_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / ".tmp-0123456789ab").mkdir()
    (tmp_path / ".tmp-0123456789ab" / ".lock").touch()
    with (
        pytest.raises(ValueError, match="exists already"),
        files.staged_directory(tmp_path / "run"),
    ):
        pass
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("seed", range(30))
def test_a_writer_of_checksums_keeps_those_of_others(tmp_path: Path, seed: int) -> None:
    """Generated: writers with patterns of their own, in any order; a changed file is found, whoever listed it."""
    draw = random.Random(seed)
    writers = {
        ("a*.json", "b.txt"): ["a.json", "a.1.json", "b.txt"],
        ("c-*.yaml",): ["c-.yaml"],
        ("D?.tex", "[e].md"): ["D1.tex", "e.md"],
    }
    listed = set[str]()
    for _ in range(8):
        patterns, names_of_writer = draw.choice(list(writers.items()))
        if draw.random() < 0.3:
            files.drop_sums(tmp_path, *patterns)
            listed -= {*names_of_writer}
        else:
            for name in names_of_writer:
                (tmp_path / name).write_text(str(draw.random()))
            files.write_sums(tmp_path, *patterns)
            listed |= {*names_of_writer}
        assert (tmp_path / reading.SUMS).exists() == bool(listed)
        assert listed <= reading.check_sums(tmp_path, partial=True).keys()
    for name in sorted(listed):
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(f"{whole}0")
        for patterns, names_of_writer in writers.items():
            if name not in names_of_writer and {*names_of_writer} <= listed:
                files.write_sums(tmp_path, *patterns)
        with pytest.raises(ValueError, match=re.escape(name)):
            reading.check_sums(tmp_path, partial=True)
        (tmp_path / name).write_text(whole)
