"""From a conversation to rows: each assistant turn in the context in which the target writes it.

Many templates write an earlier turn otherwise than it was generated: they drop its thought, or end it with another
token. Such a conversation gives several rows, and in each of them the turns before are what the target would see.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from specdec.data.form import Tools, thought_and_text
from specdec.data.layouts import ChatConversation
from specdec.data.messages import Message
from specdec.data.rendering import ChatTemplateError
from specdec.data.said import TurnError, arguments_of, calls_stand, stands
from specdec.data.template import Rendered, Template

MARKUP = 100  # characters of an answer that may be a template's own marks
REWRITTEN = "the chat template writes it otherwise once the conversation continues: set data.turns to auto or each"
Turns = Literal["auto", "whole", "each"]


class TokenPiece(NamedTuple):
    """A row whose tokens the target wrote itself, so that nothing is rendered."""

    ids: list[int]
    mask: list[bool]  # True where a token is supervised


class Refused(NamedTuple):
    """An assistant turn that is not supervised."""

    place: str  # "chats.jsonl, line 7: message 2"
    reason: str
    message: Message


Piece = Rendered | TokenPiece


class _Turn(NamedTuple):
    """An assistant turn that can be supervised."""

    place: str
    message: Message
    piece: Piece


class Rows(NamedTuple):
    """The rows of a conversation, and its turns that are refused."""

    pieces: list[Piece]
    refused: list[Refused]


def rows_of(template: Template, conversation: ChatConversation, turns: Turns = "auto") -> Rows:
    """Return the rows of a conversation.

    Args:
        turns: "auto" puts turns into one row while each one's prompt begins with the row so far; "each" makes a row
            of every turn; "whole" makes one row, in which turns that the template rewrites later are context alone.
    """
    pieces: list[_Turn] = []
    refused: list[Refused] = []
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        place = f"{conversation.place}: message {number + 1}"
        try:
            piece = _piece(template, conversation, number)
        except (TurnError, ChatTemplateError) as error:
            refused.append(Refused(place, str(error), message))
            continue
        if turns == "whole":
            # what does not begin this turn's prompt was rewritten, and so is context alone
            rewritten = [older for older in pieces if not _begins_with(piece, older.piece)]
            refused += [Refused(older.place, REWRITTEN, older.message) for older in rewritten]
            pieces = [older for older in pieces if older not in rewritten]
        pieces.append(_Turn(place, message, piece))
    rows = [turn.piece for turn in pieces]
    return Rows(rows if turns == "each" else list(_joined(rows)), refused)


def _piece(template: Template, conversation: ChatConversation, number: int) -> Piece:
    """One turn behind its prompt."""
    message = conversation.messages[number]
    if "token_ids" in message or "prompt_token_ids" in message:
        return _written(template, conversation, number)
    rendered = template.turn(conversation.messages, number, conversation.tools)
    is_last = number + 1 == len(conversation.messages)
    return (
        rendered._replace(text=rendered.text + rendered.tail, tail="")
        if is_last
        else rendered._replace(tail="")
    )


def _written(template: Template, conversation: ChatConversation, number: int) -> TokenPiece:
    """A turn as the ids that the target wrote; they must say what the messages say."""
    message = conversation.messages[number]
    if "token_ids" not in message or "prompt_token_ids" not in message:
        raise TurnError(
            "it has one of token_ids and prompt_token_ids without the other: give both, or none"
        )
    prompt: list[int] = message["prompt_token_ids"]
    ids: list[int] = message["token_ids"]
    if not _says(template, message, ids, conversation.tools):
        raise TurnError(
            "its token_ids do not say what the message says: they are another tokenizer's, or the message was changed "
            "(then remove them)"
        )
    asked = template.tokenizer.decode(
        prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if not all(
        stands(earlier["content"].strip(), asked)
        for earlier in conversation.messages[:number]
        if _is_asked(earlier)
    ):
        raise TurnError(
            "its prompt_token_ids do not hold what was asked: they are another tokenizer's, or a message before it was "
            "changed (then remove them)"
        )
    return TokenPiece(prompt + ids, [False] * len(prompt) + [True] * len(ids))


def _is_asked(message: Message) -> bool:
    """Whether a template writes a message's text as it is; of an assistant's it may drop parts."""
    return message["role"] in ("user", "system", "developer")


def _says(template: Template, message: Message, ids: list[int], tools: Tools) -> bool:
    """Whether ids say a message: read by the template, or, where that cannot, as text without the special tokens."""
    answer = template.answer(ids, tools)
    if _squeezed(answer) == _squeezed(message):
        return True
    bare = template.tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    whole = template.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if "".join(bare.split()) == "".join(message["content"].split()):
        return True  # a server that reads no answers
    # one that reads what the template's own structure does not tell apart here: every part stands in the ids
    thought, text = thought_and_text(message)
    rest = whole
    for words in (thought.strip(), text.strip()):
        match = re.search(rf"(?<!\w){re.escape(words)}(?!\w)", rest) if words else None
        if words and match is None:
            return False
        rest = rest[: match.start()] + " " + rest[match.end() :] if match else rest
    return calls_stand(message, whole) and (
        bool(message.get("tool_calls")) or len("".join(rest.split())) < MARKUP
    )


def _squeezed(message: Message) -> tuple[str, ...]:
    """Return what a message says, without white space, to be compared."""
    thought, text = thought_and_text(message)
    calls = [
        (call["function"]["name"], arguments_of(call)) for call in message.get("tool_calls") or ()
    ]
    return ("".join(thought.split()), "".join(text.split()), json.dumps(calls, sort_keys=True))


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces, of which each that begins with the one before is one row with it."""
    row: Piece | None = None
    for piece in pieces:
        if row is not None and _begins_with(piece, row):
            row = _with_supervised(piece, row)
        else:
            if row is not None:
                yield row
            row = piece
    if row is not None:
        yield row


def _begins_with(piece: Piece, row: Piece) -> bool:
    """Whether a turn's prompt begins with the whole row."""
    if isinstance(piece, Rendered) and isinstance(row, Rendered):
        return piece.text[: piece.spans[0][0]].startswith(row.text)
    if isinstance(piece, TokenPiece) and isinstance(row, TokenPiece):
        return piece.ids[: len(row.ids)] == row.ids
    return False


def _with_supervised(piece: Piece, row: Piece) -> Piece:
    """A turn's piece in which what is supervised in the row before is supervised, too."""
    if isinstance(piece, Rendered):
        assert isinstance(row, Rendered)
        return piece._replace(spans=[*row.spans, *piece.spans])
    assert isinstance(row, TokenPiece)
    return piece._replace(mask=row.mask + piece.mask[len(row.mask) :])


def said_text(message: Any) -> str:
    """Return what an assistant's message says, as one text to count the tokens of."""
    thought, text = thought_and_text(message)
    calls = [
        f"{call['function']['name']} {call['function'].get('arguments')}"
        for call in message.get("tool_calls", ())
    ]
    return "\n".join([thought, text, *calls])
