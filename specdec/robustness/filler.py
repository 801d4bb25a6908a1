"""Texts that contexts are filled with."""

from collections.abc import Callable, Sequence
from pathlib import Path

from specdec.data.documents import read_text
from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.corpus import corpus


def filler(path: str | None = None) -> Callable[[], Sequence[str]]:
    """A file's text; or the standard library's sources that the embedded target did not train on, once asked for.

    Raises:
        ValueError: the file cannot be read.
    """
    if path is None:
        return lambda: [source.text for source in corpus(EmbeddedConfig().seed).held_out]
    text = read_text(Path(path))
    return lambda: [text]
