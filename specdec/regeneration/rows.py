"""What is to be answered: conversations without their assistant's words, and the beginnings of texts."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.data.conversations import Conversation, read_conversations
from specdec.data.documents import find_files, read_jsonl, read_text
from specdec.data.names import Names

Message = dict[str, Any]

KEYS = ("text", "prompt")  # of a row of plain text
TOOLS = ("tool", "function")  # roles that answer a call
UNASKED = "the assistant speaks before any user does"
NOBODY = "no user's turn"
CALLS = "a tool is called in the first answer"


class Row(NamedTuple):
    """A row of the input, and what is said before each answer in it."""

    id: str
    """Unique in the input."""
    place: str
    said: list[list[Message]]
    """One list before each answer; none for a row that is not asked, or is plain text."""
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    """What a text begins with; None in a conversation."""
    skipped: str | None = None
    """Why nothing is asked."""
    cut: bool = False
    """Whether it ended before a tool was called."""

    @property
    def answers(self) -> int:
        """How many the whole row has."""
        return len(self.said) if self.text is None else 1


def read_chats(
    patterns: str | Sequence[str], layout: str | None = None, left_out: list[str] | None = None
) -> list[Row]:
    """The conversations of files, saved datasets and Hub data.

    Args:
        layout: of every row; None tells each row's by its columns.
        left_out: takes what is wrong with each broken row, which is left out then; None stops at the first.

    Raises:
        ValueError: a file is missing or empty, or a row is broken.
    """
    return [_chat(one) for one in read_conversations(patterns, layout, left_out)]


def _chat(one: Conversation) -> Row:
    """An answer is due to every run of turns that has a user's in it; one that comes twice in a row is one answer.

    The last user's turn is answered whether or not the row has an answer to it. From the first tool call on nothing is
    asked: what the target would call, nobody has run.
    """
    said: list[list[Message]] = []
    turns: list[Message] = []
    cut, skipped = False, None
    for message in one.messages:
        if message["role"] in TOOLS or message.get("tool_calls"):
            cut, turns = True, []
            break
        if message["role"] != "assistant":
            turns.append(message)
        elif any(turn["role"] == "user" for turn in turns):
            said.append(turns)
            turns = []
        elif not said:
            skipped = UNASKED
            break
    if not skipped and any(turn["role"] == "user" for turn in turns):
        said.append(turns)
    if not said and not skipped:
        skipped = CALLS if cut else NOBODY
    return Row(one.id, one.place, [] if skipped else said, one.tools, skipped=skipped, cut=cut and not skipped)


def read_beginnings(patterns: str | Sequence[str], tokenizer: Any, tokens: int) -> list[Row]:
    """The first ``tokens`` tokens of every text, the tokenizer's own first ones not counted; a shorter text is whole.

    A ``.jsonl`` file has a ``text`` or ``prompt`` on every line, another file is one text.

    Raises:
        ValueError: a file is missing, empty or broken, or the tokenizer does not say where its tokens stand.
    """
    if tokens < 1:
        raise ValueError(f"prompt_tokens must be at least 1, not {tokens}")
    if not tokenizer.is_fast:
        raise ValueError("prompt_tokens needs a fast tokenizer: only those say where a token ends")
    rows: list[Row] = []
    names = Names()
    for path in find_files(patterns):
        texts = [_text(row, place) for place, row in read_jsonl(path)] if path.suffix == ".jsonl" else None
        for name, place, text in texts if texts is not None else [(None, str(path), read_text(path))]:
            begun = _beginning(text, tokenizer, tokens)
            skipped = None if begun else "an empty text"
            rows.append(Row(names.distinct(name or _hash(text)), place, [], text=begun, skipped=skipped))
    return rows


def _text(row: dict[str, Any], place: str) -> tuple[str | None, str, str]:
    keys = [key for key in KEYS if key in row]
    if len(keys) != 1 or not isinstance(row[keys[0]], str):
        raise ValueError(f"{place}: with prompt_tokens a row needs a string 'text' or 'prompt', this has {sorted(row)}")
    name = row.get("id")
    return None if name is None else str(name), place, row[keys[0]]


def _beginning(text: str, tokenizer: Any, tokens: int) -> str:
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest(rows: Sequence[Row]) -> str:
    """SHA-256 of what is asked and in which order, wherever the files lie."""
    out = hashlib.sha256()
    for row in rows:
        out.update(json.dumps([row.id, row.said, row.tools, row.text], sort_keys=True).encode())
    return out.hexdigest()
