"""Links in folders that are written again: none is followed, so nothing behind one is written or removed."""

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any


def open_in_place(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file that is written where it lies, instead of being replaced as a whole.

    OSError if it is a link, another name has the same file, or it is no regular file; it is as it was then.

    Args:
        mode: ``a`` or ``a+``, which empty nothing, or ``r``.
        options: more of :func:`open`.
    """
    assert "w" not in mode
    return open(path, mode, opener=_open_own, **options)


REASONS = {
    errno.ELOOP: "it is a link, which is not followed: remove it",
    errno.ENXIO: "it is no regular file: remove it",
    errno.EMLINK: "another name has the same file, which would change too: replace it by a copy",
}


def _open_own(name: str, flags: int) -> int:
    try:
        handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in REASONS:
            error.strerror = REASONS[error.errno]
        raise
    about = os.fstat(handle)
    wrong = 0 if stat.S_ISREG(about.st_mode) else errno.ENXIO
    wrong = wrong or (errno.EMLINK if about.st_nlink > 1 else 0)
    if wrong:
        os.close(handle)
        raise OSError(wrong, REASONS[wrong], name)
    return handle


def refuse_link(path: Path) -> None:
    """Raise ValueError if a path is a link."""
    if path.is_symlink():
        raise ValueError(f"{path}: {REASONS[errno.ELOOP]}")


def refuse_links(directory: Path, *free: str) -> None:
    """Raise ValueError if a link in a directory, at any depth, leads out of it.

    Args:
        free: names in the directory that are not looked into.
    """
    root = os.path.realpath(directory)
    for link in _links(directory, free):
        if os.path.commonpath([root, os.path.realpath(link)]) != root:
            raise ValueError(
                f"{link}: it is a link out of {directory}, and what lies behind it could be written or removed: put "
                "what it stands for in its place, or remove it"
            )


def _links(directory: Path, free: Collection[str]) -> list[str]:
    links = []
    for folder, folders, files in os.walk(directory):
        if Path(folder) == directory:
            folders[:] = [name for name in folders if name not in free]
        paths = (os.path.join(folder, name) for name in (*folders, *files))
        links += [path for path in paths if os.path.islink(path)]
    return sorted(links)
