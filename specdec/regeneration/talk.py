"""A row on its way: what is asked next, what was answered, and what it becomes."""

from typing import Any, NamedTuple

from specdec.regeneration.rows import Message, Row

STOP, LENGTH = "stop", "length"


class Ask(NamedTuple):
    """One question to the target: a conversation so far, or the beginning of a text."""

    row: str
    turn: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    text: str | None


class Answer(NamedTuple):
    """What the target said."""

    row: str
    turn: int
    text: str
    finish: str
    """``stop``: it ended its turn; ``length``: it had no more tokens."""
    tokens: int
    """Generated, an end token included."""
    prompt_tokens: int
    reasoning: str | None = None
    """Where a server takes it out of the text."""
    read_back: bool | None = None
    """Whether the text, rendered and tokenised, is what was generated; None: nobody knows the tokens."""


class Failed(NamedTuple):
    """A question without an answer."""

    row: str
    turn: int
    reason: str


Found = Answer | Failed


class Talk:
    """A row and its answers so far.

    Args:
        row: not one that is skipped.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.answers: list[Answer] = []
        self.failed: Failed | None = None

    @property
    def truncated(self) -> bool:
        """Whether the last answer was cut off; nothing is asked after it."""
        return bool(self.answers) and self.answers[-1].finish == LENGTH

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask."""
        return self.failed is not None or self.truncated or len(self.answers) == self.row.answers

    def next(self) -> Ask:
        """The next question; what the target answered before is part of it."""
        assert not self.done
        turn = len(self.answers)
        messages = self.messages() if self.row.text is None else []
        return Ask(self.row.id, turn, messages, self.row.tools, self.row.text)

    def add(self, found: Found) -> None:
        """Take what became of the last question."""
        assert found.row == self.row.id and found.turn == len(self.answers)
        if isinstance(found, Failed):
            self.failed = found
        else:
            self.answers.append(found)

    def messages(self) -> list[Message]:
        """The conversation so far, up to the next answer, or to the last of all."""
        out: list[Message] = []
        for turn, said in enumerate(self.row.said[: len(self.answers) + 1]):
            if turn == len(self.answers) and self.done:
                break
            out += said
            if turn < len(self.answers):
                out.append(spoken(self.answers[turn]))
        return out

    def result(self) -> dict[str, Any]:
        """The row as data to train on."""
        if self.row.text is not None:
            return {"id": self.row.id, "text": self.row.text + self.answers[0].text}
        tools = {"tools": self.row.tools} if self.row.tools else {}
        return {"id": self.row.id, "messages": self.messages(), **tools}


def spoken(answer: Answer) -> Message:
    """An answer as the assistant's message."""
    reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning is not None else {}
    return {"role": "assistant", "content": answer.text, **reasoning}
