"""Reading conversations: rows in several layouts in, one kind of message out."""

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from specdec.data.layouts import ID_COLUMNS, Layout, Message, Values, named, parsed, recognise
from specdec.data.names import Names
from specdec.data.rows import Row, each_row, find_sources

log = logging.getLogger(__name__)

SHOWN = 3  # broken rows


class Conversation(NamedTuple):
    """Messages, the tools they may call, where they came from, and what they are known by."""

    place: str  # "chats.jsonl, line 7"
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    id: str  # unique among those read together, and the same whenever they are read


def conversation(row: Row, chosen: Layout | None = None) -> Conversation:
    """A row's conversation; its id is its own, else a hash of what is said.

    Raises:
        ValueError: its layout cannot be told or is not the chosen one, or the row is malformed.
    """
    layout = recognise(row.values, row.place, chosen)
    messages, tools = layout.messages(row.values, row.place), _tools(row.values, row.place)
    return Conversation(row.place, messages, tools, _id(row, messages, tools))


def _tools(row: Values, place: str) -> list[dict[str, Any]] | None:
    tools = parsed(row.get("tools"), f"{place}: 'tools'")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{place}: 'tools' must be a list of JSON schemas")
    return tools or None


def _id(row: Row, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
    own = next((row.values[key] for key in ID_COLUMNS if key in row.values), None)
    if own is None:
        said = json.dumps([messages, tools], sort_keys=True, default=str)
        return hashlib.sha256(said.encode()).hexdigest()[:16]
    if isinstance(own, bool) or not isinstance(own, str | int):
        raise ValueError(f"{row.place}: the id must be a string or an integer, not {type(own).__name__}")
    return str(own)


def tell_left_out(left_out: Sequence[str]) -> None:
    """A warning, if a broken row was left out."""
    if left_out:
        log.warning("%d broken rows were left out, as: %s", len(left_out), "; ".join(left_out[:SHOWN]))


def read_conversations(
    patterns: str | Sequence[str], layout: str | None = None, left_out: list[str] | None = None
) -> list[Conversation]:
    """Every conversation of files, saved datasets and Hub data; an id that comes again is numbered (``id#2``).

    Args:
        layout: of every row; None tells each row's by its columns.
        left_out: takes what is wrong with each broken row, which is left out then; None stops at the first.

    Raises:
        ValueError: a source is missing, unreadable or empty, or a row is broken; the message names file and row.
    """
    chosen = None if layout is None else named(layout)
    conversations: list[Conversation] = []
    names = Names()
    for source in find_sources(patterns):
        before, broken = len(conversations), len(left_out or ())
        for found in each_row(source, partial(conversation, chosen=chosen), left_out):
            conversations.append(found._replace(id=names.distinct(found.id)))
        if len(conversations) == before:
            why = f" but broken rows, as: {left_out[broken]}" if left_out and len(left_out) > broken else ""
            raise ValueError(f"{source}: holds no conversation{why}; remove it from the data or fill it")
    return conversations
