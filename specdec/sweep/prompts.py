"""What a study's measures ask: files, or prompts from text that the embedded target was never trained on."""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.data import held_out_prompts
from specdec.embedded.source import EMBEDDED, TargetSource
from specdec.evaluation.prompts import fingerprint, load_prompts

OWN = ("prompts", "prompts_count", "prompt_tokens")  # arguments that are the study's, not the command's
FEWEST, COUNT, TOKENS = 2, 40, 64


class Prompts(NamedTuple):
    """The files that a measure reads, and the hash of what it asks."""

    files: tuple[str, ...]
    sha256: str
    name: str | None = None
    """Of the file in the study's directory that has to be written, if any."""
    text: str = ""


def prompts_of(measure: str, given: Mapping[str, Any], source: TargetSource, directory: Path) -> Prompts:
    """The prompts of a measure.

    Args:
        given: its arguments; without ``prompts`` they are embedded ones.
        source: whose tokenizer cuts embedded prompts to ``prompt_tokens``.
        directory: the study's, in which embedded prompts get a file named after what it holds: a sweep of a study that
            was changed meanwhile does not write over what another one is about to ask.

    Raises:
        ValueError: files that cannot be read, or numbers that are out of range.
    """
    asked = given.get("prompts", EMBEDDED)
    limit, layouts = given.get("limit"), given.get("layouts") or []
    layouts = [layouts] if isinstance(layouts, str) else layouts
    if asked != EMBEDDED:
        if more := [name for name in OWN[1:] if name in given]:
            raise ValueError(f"{measure}: {more[0]} is of embedded prompts: leave it out, or say prompts: {EMBEDDED}")
        files = [asked] if isinstance(asked, str) else asked
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise ValueError(f"{measure}: prompts must be {EMBEDDED}, a file or a list of files, not {asked!r}")
        return Prompts(tuple(files), _asked(files, limit, layouts))
    count, tokens = given.get("prompts_count", COUNT), given.get("prompt_tokens", TOKENS)
    if type(count) is not int or type(tokens) is not int or count < FEWEST or tokens < 2:
        raise ValueError(
            f"{measure}: prompts_count is {count}, prompt_tokens {tokens}: at least {FEWEST} and 2 are needed"
        )
    rows = held_out_prompts(count, tokens, EmbeddedConfig().seed, source.load_tokenizer())
    text = "".join(json.dumps({**row, "category": None}) + "\n" for row in rows)
    name = f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return Prompts((str(directory / name),), _asked([file.name], limit, layouts), name, text)


def _asked(files: Sequence[str], limit: int | None, layouts: Sequence[str]) -> str:
    return fingerprint(load_prompts(files, limit, layouts))
