"""Which tokens of a target's answer are thought, tool call, code or other text.

Drafters accept more where text is regular. A figure over whole answers says little about an agent, whose answers are
mostly calls and thoughts, so evaluation gives one for each region.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.data.answers import CallFrame, ThoughtFrame

TEXT = "text"
THOUGHT = "thought"
CALL = "tool call"
CODE = "code"
REGIONS = (TEXT, THOUGHT, CALL, CODE)

TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")  # <tool_call>, <|python_tag|>, [TOOL_CALLS]
FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)


class Span(NamedTuple):
    """A region of a text that is not :data:`TEXT`, by its characters."""

    region: str
    start: int
    end: int


def spans(text: str, thought: ThoughtFrame | None, call: CallFrame | None) -> list[Span]:
    """Return the regions of an answer's text, in order.

    A thought lasts up to its closing mark, or to the end of an answer that was cut off. A call begins at its opening
    mark, whether or not what follows can be read, and lasts to the end, because templates write calls last. Code is
    what stands between fences of three backticks.
    """
    regions = list[Span]()
    start = 0
    if thought is not None and text.lstrip().startswith(thought.opening):
        closing = text.find(thought.closing)
        start = len(text) if closing < 0 else closing + len(thought.closing)
        regions.append(Span(THOUGHT, 0, start))
    end = len(text)
    if call is not None:
        place = text.find(_first_mark(call.opening), start)
        end = place if place >= 0 else end
    regions += [Span(CODE, *match.span()) for match in FENCED.finditer(text, start, end)]
    if end < len(text):
        regions.append(Span(CALL, end, len(text)))
    return regions


def _first_mark(opening: str) -> str:
    """Return the tag that a call's opening begins with, or all of it where it has none."""
    stripped = opening.strip()
    tag = TAG.match(stripped)
    return tag[0] if tag else stripped


def token_regions(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], spans_of_text: Sequence[Span]
) -> list[str]:
    """Return the region of every token; a token on the border of two belongs to the later one.

    Args:
        decode: the text of the first tokens of the answer, which must grow with them.
    """
    regions = [TEXT] * len(ids)
    for span in spans_of_text:
        first = _token_at(span.start, ids, decode)
        end = _token_at(span.end, ids, decode)
        regions[first:end] = [span.region] * (end - first)
    return regions


def _token_at(character: int, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """Return the token that holds a character, by halving: the text of all tokens before it is no longer."""
    low = 0
    high = len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(ids[:middle])) <= character:
            low = middle
        else:
            high = middle - 1
    return low
