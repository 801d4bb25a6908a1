"""Links in folders that are written again: what lies behind one stays as it is."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.training.run_directory import CLAIM, RunDirectory
from specdec.utils.files import claimed
from specdec.utils.journal import Journal
from specdec.utils.links import open_in_place, refuse_links
from specdec.utils.locks import claim_of, is_held, locked

CONTENT = "what somebody else has written\n"
LINKS: dict[str, Callable[[Path, Path], object]] = {
    "symbolic": lambda victim, link: link.symlink_to(victim),
    "hard": lambda victim, link: os.link(victim, link),
    "of a link": lambda victim, link: _link_of_a_link(victim, link),
}


def _link_of_a_link(victim: Path, link: Path) -> None:
    between = victim.with_name("between")
    between.symlink_to(victim)
    link.symlink_to(between)


def _claim_of_out(place: Path) -> None:
    with claimed(place / "out"):
        pass


def _claim_of_run(place: Path) -> None:
    with RunDirectory() as directory:
        directory.choose(str(place / "run"))


def _lock(place: Path) -> None:
    with locked(place / "lock"):
        pass


def _journal(place: Path) -> None:
    with Journal(place / "journal", "specdec.test", {}):
        pass


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "claim of --out": (str(claim_of(Path("out"))), _claim_of_out),
    "claim of a run": (f"run/{CLAIM}", _claim_of_run),
    "lock": ("lock", _lock),
    "journal": ("journal", _journal),
}


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("content", ["", CONTENT])
def test_the_file_behind_a_link_is_not_written(
    tmp_path: Path, kind: str, writer: str, content: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text(content)
    name, write = WRITERS[writer]
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    LINKS[kind](victim, link)
    with pytest.raises(ValueError, match=rf"{link.name}: (it is a link|another name)"):
        write(tmp_path)
    assert victim.read_text() == content
    link.unlink()
    write(tmp_path)
    assert victim.read_text() == content


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_made_behind_a_link_and_no_pipe_is_waited_for(
    tmp_path: Path, writer: str
) -> None:
    name, write = WRITERS[writer]
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="it is a link"):
        write(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(ValueError, match=f"{link.name}: .*no regular file"):
        write(tmp_path)


def test_a_claim_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "claim")
    with pytest.raises(ValueError, match="no regular file"):
        is_held(tmp_path / "claim")
    assert not is_held(tmp_path / "none") and not is_held(tmp_path / "claim" / "none")


def test_a_file_is_opened_as_it_is(tmp_path: Path) -> None:
    for text in ("a", "b"):
        with open_in_place(tmp_path / "file", "a", encoding="utf-8") as stream:
            stream.write(text)
    assert (tmp_path / "file").read_text() == "ab"
    assert (tmp_path / "file").stat().st_mode & 0o111 == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_link_at_any_depth_is_found_unless_it_stays_inside(tmp_path: Path, seed: int) -> None:
    """Generated: a tree with links that stay inside, then one that leads out of it."""
    draw = random.Random(seed)
    root = tmp_path / "run"
    (tmp_path / "run-other").mkdir()  # whose name begins as the folder's
    folders = [root]
    for number in range(8):
        folders.append(draw.choice(folders) / f"folder-{number}")
    for folder in folders:
        folder.mkdir()
        (folder / "file").touch()
    for number in range(3):
        place = draw.choice(folders) / f"inside-{number}"
        inside = draw.choice(folders) / draw.choice(["file", "nothing", ""])
        place.symlink_to(draw.choice([inside, os.path.relpath(inside, place.parent)]))
    refuse_links(root)
    outside = draw.choice([tmp_path / "run-other", tmp_path, tmp_path / "nothing", Path("/")])
    link = draw.choice(folders) / "link"
    link.symlink_to(draw.choice([outside, os.path.relpath(outside, link.parent)]))
    with pytest.raises(ValueError, match=f"{link}: it is a link out of {root}"):
        refuse_links(root)
    if link.parent != root:
        refuse_links(root, link.relative_to(root).parts[0])


def test_a_folder_may_itself_lie_behind_a_link(tmp_path: Path) -> None:
    """Whoever typed its path decides where that leads."""
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "run" / "last").symlink_to("first")
    refuse_links(tmp_path / "runs" / "run")
