"""Prompts to evaluate on, from files and the Hugging Face Hub."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.evaluation.layouts import ID_COLUMNS, Asked, BlankError, Layout, named, recognise, text
from specdec.evaluation.rows import Row, read_rows, stem


class Prompt(NamedTuple):
    """One prompt: exactly one of ``turns``, ``messages`` and ``text`` is set."""

    prompt_id: str
    category: str | None
    turns: list[str] | None
    """User turns of a conversation whose answers the target gives (MT-bench)."""
    messages: list[dict[str, str]] | None
    """A conversation that ends with a user turn; each message has ``role`` and ``content``."""
    text: str | None
    """Raw text, used as it is; the empty string if the prompt or a part of it is blank, so that it cannot be asked."""


def load_prompts(sources: Sequence[str | Path], limit: int | None = None, layouts: Sequence[str] = ()) -> list[Prompt]:
    """Read prompts from files and Hub data, the first ``limit`` of all together.

    :func:`~specdec.evaluation.rows.read_rows` says what can be read, :mod:`specdec.evaluation.layouts` what rows may
    hold. Their id is ``question_id``, ``prompt_id``, ``task_id`` or ``id``, else the line or row; one that occurs in
    several files gets the file's stem in front. Their ``category``, if they bring none, is the suite's.

    Args:
        layouts: names of layouts; a row that has the columns of one of them is read so, the first of them winning.

    Raises:
        ValueError: a source cannot be read or used; the message names it, the line and what is wrong.
    """
    if not sources:
        raise ValueError("no prompt file given")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: it must be at least 1")
    preferred = named(layouts)
    used: set[str] = set()
    names = [str(source) for source in sources]
    loaded = [(name, _load(name, preferred, used)) for name in names]
    for layout in preferred:
        if layout.name not in used:
            raise ValueError(f"layouts: no row is read as {layout.name} ({', '.join(sorted(layout.columns))})")
    times_used = Counter(prompt.prompt_id for _, prompts in loaded for prompt in prompts)
    stems = Counter(stem(name) for name in names)
    unique: dict[str, Prompt] = {}
    for source, prompts in loaded:
        label = stem(source) if stems[stem(source)] == 1 else source
        for prompt in prompts:
            name = prompt.prompt_id if times_used[prompt.prompt_id] == 1 else f"{label}:{prompt.prompt_id}"
            if name in unique:
                raise ValueError(f"{source}: prompt id {name} is used twice; is the file given twice?")
            unique[name] = prompt._replace(prompt_id=name)
    return list(unique.values())[:limit]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of what is asked, whatever the files are called."""
    return hashlib.sha256(json.dumps([prompt._asdict() for prompt in prompts]).encode()).hexdigest()


def _load(source: str, preferred: Sequence[Layout], used: set[str]) -> list[Prompt]:
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for row in read_rows(source):
        layout = recognise(row.values, row.place, preferred)
        used.add(layout.name)
        prompt = _prompt(row, layout)
        if prompt.prompt_id in places:
            other = places[prompt.prompt_id].removeprefix(f"{source}, ")
            raise ValueError(f"{row.place}: id {prompt.prompt_id} is taken by {other} already")
        places[prompt.prompt_id] = row.place
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{source}: there is no prompt in it")
    return prompts


def _prompt(row: Row, layout: Layout) -> Prompt:
    prompt_id = next((row.values[key] for key in ID_COLUMNS if key in row.values), row.name)
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int):
        raise ValueError(f"{row.place}: the id must be a string or an integer, not {type(prompt_id).__name__}")
    category = layout.category
    if row.values.get("category", "") != "":  # EAGLE's own files have empty ones
        category = text(row.values["category"], f"{row.place}: category")
    try:
        asked = layout.ask(row.values, row.place)
    except BlankError:
        asked = Asked(text="")
    return Prompt(str(prompt_id), category, *asked)
