"""specdec's cache of tokens and rows.

An entry of the cache is a folder, written whole or not at all: ``00000.arrow``, ``00001.arrow``, ... (Arrow's IPC file
format, which ``pyarrow`` and others read), and ``SHA256SUMS``, against which a process compares it once.

Until an entry is whole, its files lie in a folder ``NAME-CODE.begun`` next to it, each with its own checksums. A
process that was killed loses at most the file that it was writing: the next one of the same code continues after the
last whole file.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from specdec.data.rows import contents_of, find_sources
from specdec.data.tokenizer import tokenizer_digest
from specdec.data.tokens import Encoded, EncodedDocument, TokenFiles, write_tokens
from specdec.utils.files import cache_place, staged_directory, write_json
from specdec.utils.links import refuse_link, refuse_links
from specdec.utils.locks import locked
from specdec.utils.machine import loaded_code
from specdec.utils.progress import Advance, progress
from specdec.utils.reading import SUMS, check_sums, digest, explained, read_json
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

# of what is kept on disk: raise it whenever a change of this package gives other tokens or masks
VERSION = 5
TOKENS = "tokens.arrow"  # of a part that is not yet in its entry
ABOUT = "about.json"
PART = 128  # chunks of documents in one file

# from a number of chunks, and from what was said of these, to the documents of the chunks after them
Make = Callable[[int, dict[str, Any]], Iterable[list[EncodedDocument]]]


def determinants(
    patterns: str | Sequence[str],
    layout: str | None,
    broken: str,
    tokenizer: Any,
    max_length: int,
    turns: str = "",
) -> list[Any]:
    """Whatever can change the tokens: the sources' content, the tokenizer, its template, and versions.

    Raises:
        ValueError: a source is missing or unreadable.
    """
    versions = [
        importlib.metadata.version(name) for name in ("jinja2", "tokenizers", "transformers")
    ]
    contents = [contents_of(source) for source in find_sources(patterns)]
    tokenizer_sha = tokenizer_digest(tokenizer)
    return [VERSION, versions, contents, layout, broken, tokenizer_sha, max_length, turns]


def cached(
    determined_by: list[Any], make: Make, unit: str = "conversation",
    about: Callable[[], dict[str, Any]] = dict,
) -> Encoded:  # fmt: skip
    """Return what specdec's cache has under these determinants; where it has nothing, one process makes it.

    Args:
        make: called with a number of chunks that were written before, and with what ``about`` returned after the last
            of them. It returns the documents of the chunks after these, which are always the same.
        about: called after a chunk; what it returns after all of them is stored, as :attr:`Encoded.about`.

    Raises:
        ValueError: no document is left, the cache may not be written, the disk is full, or what was kept is damaged.
    """
    folder = cache_place("tokens", determined_by)

    def write(temporary: Path) -> None:
        begun = folder.with_name(f"{folder.name}-{digest(loaded_code())[:8]}.begun")
        with progress("tokenizing", unit, None) as advance:
            parts = _write_parts(begun, make, unit, advance, about)
        if not sum(read_json(part / ABOUT)["documents"] for part in parts):
            raise ValueError("no document is left to train on")
        for part in parts:
            _link(part / TOKENS, temporary / f"{part.name}.arrow")
        write_json(temporary / ABOUT, about())

    entry(folder, write)
    sums = sound(folder)
    names = sorted(name for name in sums if name.endswith(".arrow"))
    content = hashlib.sha256("".join(sums[name] for name in names).encode()).hexdigest()
    files = TokenFiles([folder / name for name in names], content, read_json(folder / ABOUT))
    log.info("%s as tokens: %s", how_many(len(files.all()), "document"), folder)
    return files.all()


def _write_parts(
    begun: Path, make: Make, unit: str, advance: Advance, about: Callable[[], dict[str, Any]]
) -> list[Path]:
    """Write documents to ``begun``, ``PART`` chunks to a folder, after the parts that are there; return all parts."""
    parts = _sound_parts(begun)
    conversations = 0
    known = {}
    if parts:
        last = read_json(parts[-1] / ABOUT)
        conversations = last["conversations"]
        known = last["about"]
        log.info("tokenizing continues after %s", how_many(conversations, unit))
        advance(conversations)

    def counted(chunk: list[EncodedDocument]) -> list[EncodedDocument]:
        nonlocal conversations
        if chunk:
            advance(chunk[-1].conversation + 1 - conversations)
            conversations = chunk[-1].conversation + 1
        return chunk

    chunks = iter(make(len(parts) * PART, known))
    while (first := next(chunks, None)) is not None:
        documents = chain.from_iterable(map(counted, chain([first], islice(chunks, PART - 1))))
        parts.append(begun / f"{len(parts):05}")
        with staged_directory(parts[-1]) as temporary:
            written = write_tokens(documents, temporary / TOKENS)
            counts = {"documents": written, "conversations": conversations}
            write_json(temporary / ABOUT, counts | {"about": about()})
    return parts


def _sound_parts(begun: Path) -> list[Path]:
    """Return the folders of the parts up to the first that is missing or damaged; those after it are removed."""
    numbered = [part for part in begun.glob("*") if re.fullmatch("[0-9]{5}", part.name)]
    for part in numbered:
        refuse_link(part)
        refuse_links(part)
    parts: list[Path] = []
    while (part := begun / f"{len(parts):05}").exists():
        try:
            if not check_sums(part, "it is written again"):
                raise ValueError(f"{part}: it has no {SUMS}: it is written again")
        except ValueError as error:
            log.warning("%s", error)
            break
        parts.append(part)
    for part in set(numbered) - set(parts):
        shutil.rmtree(part)
    return parts


def _link(file: Path, path: Path) -> None:
    """Give a file a second name; where the file system has no such thing, copy it."""
    try:
        os.link(file, path)
    except OSError:
        shutil.copyfile(file, path)


def entry(folder: Path, write: Callable[[Path], None]) -> None:
    """Let one process write a folder of specdec's cache, if there is none, and remove what was begun of it.

    Args:
        write: fills the folder.

    Raises:
        ValueError: the cache may not be written, or the disk is full.
    """
    begun = list(folder.parent.glob(f"{folder.name}-*.begun"))
    for place in begun:
        refuse_link(place)
    # no lock where nothing is written: the cache may be read-only
    if folder.exists() and not begun:
        return
    # what is left of an entry that is whole does no harm where it cannot be removed
    with (
        contextlib.suppress(*([ValueError] if folder.exists() else [])),
        locked(folder.with_suffix(".lock")),
    ):
        if not folder.exists():
            with staged_directory(folder) as temporary:
                write(temporary)
        for place in folder.parent.glob(f"{folder.name}-*.begun"):
            shutil.rmtree(place, ignore_errors=True)


def sound(folder: Path) -> dict[str, str]:
    """The SHA-256 of an entry's files, which a process compares once with those that were written.

    Raises:
        ValueError: a file was cut off, altered or removed. What is mapped would be a crash, or other tokens.
    """
    with explained(folder):
        marks = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    return _sound(
        folder,
        tuple((name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in marks),
    )


@functools.lru_cache(64)
def _sound(folder: Path, marks: tuple[tuple[str, int, int, int], ...]) -> dict[str, str]:
    remedy = f"remove the folder {folder}, and it is made again"
    sums = check_sums(folder, remedy)
    if not sums:
        raise ValueError(f"{folder}: damaged, it has no {SUMS}: {remedy}")
    return sums
