"""A row that the target answers: what is said before each of its answers, and where its conversation has to end.

A conversation continues with what the row says next as long as that still fits: a tool's recorded result belongs behind
the call that it answers. The target's own call is therefore compared with the row's.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdec.data.layouts import ChatConversation
from specdec.data.messages import Message
from specdec.data.said import arguments_of

STOP = "stop"
LENGTH = "length"
# behind the last message, which may be a user's
END: Message = {"role": "assistant", "content": ""}

# why a conversation ends before the row does; the answer in question is the target's own and is kept
OTHERWISE = "the target called otherwise than the row"
SILENT = "the target did not call where the row calls a tool"
SPOKEN = "the target called a tool where the row answers"
UNREADABLE = "the target named a tool, but its call cannot be read"
ORPHAN = "a tool's result in the row answers no call"
# why a row is left out although its answers are there
TRUNCATED = "an answer ran out of tokens"
# why a row is skipped
NOBODY = "no user's turn"
FIRST = "the assistant speaks before any user does"


def pack_ids(ids: Sequence[int]) -> str:
    """Token ids as text: some six bytes of memory each, where a list of numbers takes 36."""
    return " ".join(map(str, ids))


def unpack_ids(text: str) -> list[int]:
    """Return the token ids of :func:`pack_ids`."""
    return [int(word) for word in text.split()]


class TurnAnswer(NamedTuple):
    """The answer to one turn, or why there is none."""

    row: str
    turn: int
    message: Message = {}  # noqa: RUF012  role, content, reasoning_content, tool_calls; never changed
    finish: str = STOP  # it ended its turn; LENGTH: it had no more tokens
    tokens: int = 0  # generated, an end token included
    prompt_token_ids: str | None = None  # packed; None where a server does not give them
    token_ids: str | None = None  # packed, as they were generated, an end token included
    failed: str | None = None

    @property
    def text(self) -> str:
        """The answer's words, without thoughts and calls."""
        return str(self.message.get("content", ""))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tools that it calls."""
        return list(self.message.get("tool_calls") or [])


class Turn(NamedTuple):
    """What is said before an answer, and the calls in the row's own one."""

    messages: list[Message]
    calls: list[dict[str, Any]] = []  # noqa: RUF012  never changed


def same_value(first: Any, second: Any) -> bool:
    """Whether two values of JSON are equal: ``1`` is ``1.0``, but not ``true``; an object's order does not matter."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            same_value(value, second[name]) for name, value in first.items()
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_value, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def readable(calls: Sequence[dict[str, Any]]) -> bool:
    """Whether every call has arguments that are an object."""
    try:
        return all(isinstance(arguments_of(call), dict) for call in calls)
    except ValueError:
        return False


def same_calls(calls: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> bool:
    """Whether the same tools are called with the same arguments, in the same order."""
    if [call["function"]["name"] for call in calls] != [
        call["function"]["name"] for call in others
    ]:
        return False
    return readable([*calls, *others]) and all(
        same_value(arguments_of(call), arguments_of(other))
        for call, other in zip(calls, others, strict=True)
    )


@dataclass
class Dialogue:
    """A row of the input: the messages before each answer in it, and the answers so far."""

    id: str  # unique in the input
    place: str
    turns: list[Turn]
    tools: list[dict[str, Any]] | None = None
    skipped: str | None = None  # why there are no turns
    cut: str | None = None  # why the turns end before the row does
    answers: list[TurnAnswer] = field(default_factory=list)  # the last one may have failed

    @classmethod
    def of(cls, conversation: ChatConversation) -> "Dialogue":
        """A conversation without its assistant's messages.

        An answer is due to every run of messages with a user's or a tool's in it; two answers in a row are one. A
        user's message or a tool's result at the end is answered, too. What stands behind a result without a call is
        left out.
        """
        turns: list[Turn] = []
        unanswered: list[Message] = []
        cut = None
        for message in [*conversation.messages, END]:
            if message["role"] in ("tool", "function") and not (turns and turns[-1].calls):
                cut = ORPHAN
                message = END
            if message["role"] != "assistant":
                unanswered.append(message)
            elif any(
                earlier["role"] != "system" and earlier["role"] != "developer"
                for earlier in unanswered
            ):
                turns.append(Turn(unanswered, list(message.get("tool_calls") or [])))
                unanswered = []
            elif turns:
                turns[-1] = Turn(
                    turns[-1].messages, [*turns[-1].calls, *(message.get("tool_calls") or [])]
                )
            elif message is not END:
                return cls(conversation.id, conversation.place, [], conversation.tools, FIRST)
            if cut:
                break
        skipped = None if turns else cut or NOBODY
        return cls(conversation.id, conversation.place, turns, conversation.tools, skipped, cut)

    @property
    def calls_tools(self) -> bool:
        """Whether the row's own answers call tools."""
        return any(turn.calls for turn in self.turns)

    @property
    def failed(self) -> str | None:
        """Why the last request has no answer."""
        return self.answers[-1].failed if self.answers else None

    @property
    def truncated(self) -> bool:
        """Whether the last answer had no more tokens."""
        return bool(self.answers) and self.answers[-1].finish == LENGTH

    @property
    def ended(self) -> str | None:
        """Why the conversation ends before the row does, if its answers are there."""
        if not self.answers or self.failed or self.truncated:
            return None
        return self.departure(self.answers[-1]) or self.cut

    @property
    def complete(self) -> bool:
        """Whether every answer is there and has its end."""
        return (
            self.done and bool(self.answers) and not (self.failed or self.truncated or self.ended)
        )

    def left_out(self, truncated: str) -> str | None:
        """Why a row whose answers are there is no row of the data set; None if it is one.

        Args:
            truncated: what happens to a row whose last answer ran out of tokens: ``drop`` or ``keep``.
        """
        if self.truncated and truncated == "drop":
            return TRUNCATED
        return self.skipped or self.failed

    def departure(self, answer: TurnAnswer) -> str | None:
        """Why what the row says next does not fit behind the answer; None if it does, or if nothing comes next."""
        recorded = self.turns[answer.turn].calls
        if answer.turn + 1 == len(self.turns) or not (answer.calls or recorded):
            return None
        if not readable(answer.calls):
            return UNREADABLE
        if not answer.calls:
            return UNREADABLE if self._names_a_tool(answer.text) else SILENT
        if not recorded:
            return SPOKEN
        return None if same_calls(answer.calls, recorded) else OTHERWISE

    def _names_a_tool(self, text: str) -> bool:
        functions = [
            tool["function"] if isinstance(tool.get("function"), dict) else tool
            for tool in self.tools or []
        ]
        names = [str(function["name"]) for function in functions if function.get("name")]
        return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)

    def ends_with(self, answer: TurnAnswer) -> bool:
        """Whether nothing is asked after it."""
        last = answer.turn + 1 == len(self.turns)
        return (
            bool(answer.failed)
            or answer.finish == LENGTH
            or last
            or self.departure(answer) is not None
        )

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask."""
        return self.ends_with(self.answers[-1]) if self.answers else not self.turns

    def add(self, **fields: Any) -> TurnAnswer:
        """Make the next turn's answer, and return it."""
        self.answers.append(TurnAnswer(self.id, len(self.answers), **fields))
        return self.answers[-1]

    def messages(self, ids: bool = False) -> list[Message]:
        """The conversation up to the next answer, or to the last of all; earlier answers are part of it.

        Args:
            ids: with the token ids of every answer, as the data set has them.
        """
        out: list[Message] = []
        for number, turn in enumerate(self.turns[: len(self.answers) + (not self.done)]):
            out += turn.messages
            if number < len(self.answers):
                answer = self.answers[number]
                out.append(self._message(answer, turn) | (self._tokens(answer) if ids else {}))
        return out

    def fields(self) -> dict[str, Any]:
        """The row of the data set, JSON-ready: its id, its messages with the token ids of every answer, its tools."""
        fields: dict[str, Any] = {"id": self.id, "messages": self.messages(ids=True)}
        return fields | ({"tools": self.tools} if self.tools else {})

    @staticmethod
    def _message(answer: TurnAnswer, turn: Turn) -> Message:
        """The answer; calls that are the row's have the row's ids, to which its results refer.

        Calls that cannot be read become text: no reader of rows takes them, and nothing is asked behind them. Token ids
        have them as they were written, and the text must say nothing else.
        """
        if not readable(answer.calls):
            functions = [call["function"] for call in answer.calls if answer.token_ids is None]
            calls_text = [f"{function['name']} {function['arguments']}" for function in functions]
            message = {
                **answer.message,
                "content": "\n".join(filter(None, [answer.text, *calls_text])),
            }
            message.pop("tool_calls", None)
            return message
        if not answer.calls or not same_calls(answer.calls, turn.calls):
            return answer.message
        calls = []
        for call, recorded in zip(answer.calls, turn.calls, strict=True):
            with_id = {**call, "id": recorded.get("id")}
            calls.append({name: value for name, value in with_id.items() if value is not None})
        return {**answer.message, "tool_calls": calls}

    @staticmethod
    def _tokens(answer: TurnAnswer) -> dict[str, Any]:
        """Return the fields that training reads in addition to the words: token ids, and that an answer is not whole.

        Without ids it is impossible to tell the tokens of half an answer or of a broken call: those are not trained on.
        """
        fields: dict[str, Any] = {"finish_reason": LENGTH} if answer.finish == LENGTH else {}
        if answer.prompt_token_ids is not None and answer.token_ids is not None:
            fields["prompt_token_ids"] = unpack_ids(answer.prompt_token_ids)
            fields["token_ids"] = unpack_ids(answer.token_ids)
        elif answer.finish != STOP or not readable(answer.calls):
            fields["weight"] = 0
        return fields
