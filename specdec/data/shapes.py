"""Rows of conversations of a shape that has come before: rendered once, where a turn would be rendered twice.

A template writes most conversations alike: the same characters stand before, between and behind the texts. What they
are is learned from trial conversations of the same shape (roles, thoughts), turn by turn, as
:mod:`specdec.data.turns` makes every row. A conversation of the shape is then rendered once, as a whole. If that is
exactly the learned characters with its texts in between, its turns stand where they stood in the trial.

Everything else goes turn by turn: calls and tools, a text that is empty or begins or ends with white space, and a text
that has something the template looks for, or a special token. Both ways are compared for the first conversations
of a shape and then now and again; after a difference the shape goes turn by turn for good.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, cast

import jinja2
from jinja2 import nodes

from specdec.data.layouts import ChatConversation
from specdec.data.messages import Message
from specdec.data.rendering import ChatTemplateError
from specdec.data.surroundings import Switches
from specdec.data.template import XML_END, Rendered, Template, TextSpan
from specdec.data.turns import Rows, Turns, rows_of

MANY = 64  # words that a text is searched for
MISSES = 8  # in a row, after which a shape is given up
SHAPES = 4096  # that are kept
TEXTS = ("reasoning_content", "content")  # of a message
# of trial texts, so that a template that counts characters is noticed
FILLINGS = ("", " and so on" * 500)
GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
STRIPPING = {"strip", "lstrip", "rstrip"}  # methods of texts
LOOKING = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "replace", "find", "rfind", "index",
           "count", "removeprefix", "removesuffix"}  # fmt: skip

# of each message: its role, whether it has a thought, its weight
Shape = tuple[tuple[str, bool, int | None], ...]


class Skeleton(NamedTuple):
    """The text that a template writes around the texts of a conversation of one shape."""

    switches: Switches
    # number of the message and key of the text, in the row's order
    slots: tuple[tuple[int, str], ...]
    parts: tuple[str, ...]  # of the row: before, between and behind the texts
    closing: str  # with which the rendering ends instead of the last part
    # part and offset of the first character, and of the one past the last
    spans: tuple[tuple[int, int, int, int], ...]


@dataclass
class _Known:
    """The skeleton of a shape, how often the shape was met, and how often the skeleton did not fit."""

    count: int = 0
    misses: int = 0
    skeleton: Skeleton | None = None


class Shapes:
    """Makes rows of conversations by their shapes.

    Args:
        turns: as of :func:`specdec.data.turns.rows_of`.
        often: conversations of a shape, with the last of which it is learned.
        checked: the next ones, which are made both ways.
        every: of all others, one in ``every`` is made both ways.
    """

    def __init__(
        self,
        template: Template,
        turns: Turns = "auto",
        often: int = 8,
        checked: int = 8,
        every: int = 64,
    ) -> None:
        self.template = template
        self.often = often
        self.checked = checked
        self.every = every
        self.turns: Turns = turns
        closed = [
            f"<{match[1]}>" for token in template.special if (match := XML_END.fullmatch(token))
        ]
        source = template.renderer.source()
        self.watched = shortest(
            {"<think>", "</think>", *template.special, *closed, *looked_for(source)}
        )
        self.constants = constants(source)
        self.known: dict[Shape, _Known] = {}

    def rows(self, conversation: ChatConversation) -> Rows:
        """The rows of a conversation, equal to those of :func:`specdec.data.turns.rows_of`."""
        shape = self._shape(conversation)
        if shape is None or (len(self.known) >= SHAPES and shape not in self.known):
            return rows_of(self.template, conversation, self.turns)
        known = self.known.setdefault(shape, _Known())
        known.count += 1
        if known.count == self.often:
            known.skeleton = self._learned(conversation.messages)
        filled = (
            None if known.skeleton is None else self._filled(known.skeleton, conversation.messages)
        )
        is_checked = known.count <= self.often + self.checked or known.count % self.every == 0
        if filled is not None and not is_checked:
            known.misses = 0
            return filled
        rows = rows_of(self.template, conversation, self.turns)
        known.misses += known.skeleton is not None and filled is None
        is_wrong = filled is not None and filled != rows
        if is_wrong or known.misses > MISSES:
            known.skeleton = None
        return rows

    def _shape(self, conversation: ChatConversation) -> Shape | None:
        """The shape of a conversation; None if it goes turn by turn."""
        if conversation.tools or last_turn(conversation.messages) is None:
            return None
        shape = []
        for message in conversation.messages:
            if message.keys() - {"role", "weight", *TEXTS}:
                return None
            if not all(self._is_plain(message[key]) for key in TEXTS if key in message):
                return None
            shape.append((message["role"], "reasoning_content" in message, message.get("weight")))
        return tuple(shape)

    def _is_plain(self, text: str) -> bool:
        """Whether a template can do nothing with a text but write it."""
        is_bare = bool(text) and text == text.strip() and text not in self.constants
        return is_bare and not any(word in text for word in self.watched)

    # learning

    def _learned(self, messages: Sequence[Message]) -> Skeleton | None:
        """The skeleton of a shape; None if it has none."""
        first, *others = [self._trial(messages, filling) for filling in FILLINGS]
        return first if all(other == first for other in others) else None

    def _trial(self, messages: Sequence[Message], filling: str) -> Skeleton | None:
        """The skeleton by one conversation whose texts occur nowhere else."""
        words = {
            (number, key): f"Zy{number}{key}{filling} zy{number}"
            for number, message in enumerate(messages)
            for key in TEXTS
            if key in message
        }
        trial = [
            message | {key: words[number, key] for key in TEXTS if key in message}
            for number, message in enumerate(messages)
        ]
        rows = rows_of(self.template, ChatConversation("", trial, None, ""), self.turns)
        if rows.refused or len(rows.pieces) != 1 or not isinstance(rows.pieces[0], Rendered):
            return None
        piece = rows.pieces[0]
        heard = trial[: (last_turn(trial) or 0) + 1]
        slots = [slot for slot in words if slot[0] < len(heard)]
        if any(piece.text.count(words[slot]) != 1 for slot in slots):
            return None
        slots.sort(key=lambda slot: piece.text.index(words[slot]))
        parts = split_at(piece.text, [words[slot] for slot in slots])
        starts = starts_of(parts, [words[slot] for slot in slots])
        spans = [
            (*place_in(start, parts, starts), *place_in(end, parts, starts))
            for start, end in piece.spans
        ]
        body = piece.text[: starts[-1]]
        for switches in self._states():
            whole = self._whole(heard, switches) or ""
            if whole.startswith(body) and all(len(span) == 4 for span in spans):
                quadruples = cast(list[tuple[int, int, int, int]], spans)
                after = whole[len(body) :]
                return Skeleton(switches, tuple(slots), tuple(parts), after, tuple(quadruples))
        return None

    def _states(self) -> list[Switches]:
        switch = self.template.form.switch
        return [{}] if switch is None else [{switch: False}, {switch: True}, {}]

    def _whole(self, messages: Sequence[Message], switches: Switches) -> str | None:
        """Messages as the template writes them at once; None if it refuses them."""
        try:
            return self.template.renderer.render(
                self.template.form.messages(messages), None, False, **switches
            )
        except ChatTemplateError:
            return None

    # use

    def _filled(self, skeleton: Skeleton, messages: Sequence[Message]) -> Rows | None:
        """The row of a conversation by its shape's skeleton; None if the template does not write it so."""
        texts = [messages[number][key] for number, key in skeleton.slots]
        text = "".join(
            word for pair in zip_longest(skeleton.parts, texts, fillvalue="") for word in pair
        )
        body = text[: len(text) - len(skeleton.parts[-1])]
        heard = messages[: max(number for number, _ in skeleton.slots) + 1]
        if self._whole(heard, skeleton.switches) != body + skeleton.closing:
            return None
        starts = starts_of(skeleton.parts, texts)
        spans = [TextSpan(starts[a] + b, starts[c] + d) for a, b, c, d in skeleton.spans]
        return Rows([Rendered(text, spans)], [])


def last_turn(messages: Sequence[Message]) -> int | None:
    """The number of the last message that is to be supervised."""
    turns = (
        n
        for n, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight") != 0
    )
    return max(turns, default=None)


def split_at(text: str, words: Sequence[str]) -> list[str]:
    """Return what stands before, between and behind words, each of which stands in the text once."""
    parts = []
    for word in words:
        part, _, text = text.partition(word)
        parts.append(part)
    return [*parts, text]


def starts_of(parts: Sequence[str], texts: Sequence[str]) -> list[int]:
    """Return where each part begins when the texts stand in between."""
    starts = [0]
    for part, text in zip(parts, texts, strict=False):
        starts.append(starts[-1] + len(part) + len(text))
    return starts


def place_in(position: int, parts: Sequence[str], starts: Sequence[int]) -> tuple[int, ...]:
    """The part and the offset of a position; empty if it is inside a text."""
    for number, (part, start) in enumerate(zip(parts, starts, strict=True)):
        if start <= position <= start + len(part):
            return (number, position - start)
    return ()


# what a template looks for


def parse_template(source: str) -> nodes.Template:
    """A template's syntax, without the tags that mark what is generated."""
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
        GENERATION_TAGS.sub("", source)
    )


def constants(source: str) -> set[str]:
    """Every string in a template's expressions; a text equal to one may be compared with it."""
    return {
        node.value
        for node in parse_template(source).find_all(nodes.Const)
        if isinstance(node.value, str)
    }


def looked_for(source: str) -> set[str]:
    """The strings that a template may look for inside a text: operands of ``in``, and arguments of methods.

    Names of fields are none, since ``'name' in message`` looks for a key. Where an operand is a variable, every string
    that the template gives a variable counts.
    """
    tree = parse_template(source)
    operands = operands_of(tree)
    if any(
        isinstance(node, nodes.Name) or next(node.find_all(nodes.Name), None) for node in operands
    ):
        operands += [
            assign.node
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.node, nodes.Const)
        ]
    words = {node.value for node in operands if isinstance(node, nodes.Const)}
    words |= {inner.value for node in operands for inner in node.find_all(nodes.Const)}
    return {word for word in words if isinstance(word, str) and word} - fields(tree)


def operands_of(tree: nodes.Template) -> list[nodes.Node]:
    """The expressions that a template looks for inside others; white space to be stripped is none."""
    operands: list[nodes.Node] = []
    for compare in tree.find_all(nodes.Compare):
        is_membership = any(item.op in ("in", "notin") for item in compare.ops)
        operands += [compare.expr] if is_membership else []
    for call in tree.find_all(nodes.Call):
        method = call.node.attr if isinstance(call.node, nodes.Getattr) else ""
        if method in STRIPPING:
            operands += [
                item
                for item in call.args
                if not isinstance(item, nodes.Const) or str(item.value).strip()
            ]
        elif method in LOOKING:
            operands += call.args
    for item in tree.find_all(nodes.Filter):
        operands += item.args if item.name == "replace" else []
    return operands


def fields(tree: nodes.Template) -> set[str]:
    """Return the names by which a template reads fields."""
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    keys = [node.arg for node in tree.find_all(nodes.Getitem)]
    keys += [call.args[0] for call in tree.find_all(nodes.Call) if call.args]
    values = {key.value for key in keys if isinstance(key, nodes.Const)}
    return names | {value for value in values if isinstance(value, str) and value.isidentifier()}


def shortest(words: set[str]) -> tuple[str, ...]:
    """Words of which one stands in every text that has one of these, or of many words their beginnings."""
    lengths = iter((8, 4, 2, 1))
    while len(words) > MANY and (length := next(lengths, 0)):
        words = {word[:length] for word in words}
    return tuple(
        sorted(word for word in words if not any(other in word for other in words - {word}))
    )
