"""Data by its name on the Hugging Face Hub, through ``datasets`` and its cache."""

import re
from typing import Any

PREFIX = "hub:"
_REASON = 240  # characters


def repository(source: str) -> str:
    """The repository's name in ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``."""
    return _parts(source)[0]


def hub_rows(source: str) -> Any:
    """The rows of ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``, a ``datasets.Dataset``.

    A split may be a slice, as ``test[:80]``.

    Raises:
        ValueError: the name is malformed, or the Hub and the local cache do not have such rows.
    """
    name, revision, config, split = _parts(source)
    # only here: the import takes as long as reading most files
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError, KeyError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error).split())[:_REASON]
        raise ValueError(f"{source}: not to be had from the Hub or its local cache: {reason}") from error


def hub_fingerprint(source: str) -> str:
    """What changes with the data of ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``.

    Raises:
        ValueError: as of :func:`hub_rows`.
    """
    return str(hub_rows(source)._fingerprint)


def _parts(source: str) -> tuple[str, str | None, str, str]:
    found = re.fullmatch(r"hub:([^:@]+)(?:@([^:]+))?:([^:]+):(.+)", source)
    if not found:
        raise ValueError(f"{source}: write hub:REPOSITORY:CONFIG:SPLIT, as hub:openai/gsm8k:main:test")
    name, revision, config, split = found.groups()
    return name, revision, config, split
