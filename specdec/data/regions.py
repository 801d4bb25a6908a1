"""Which tokens of a target's answer are thought, tool call, code or other text.

Drafters accept more where text is regular. A figure over whole answers says little about an agent, whose answers are
mostly calls and thoughts, so evaluation gives one for each region.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from specdec.data.answers import CallFrame, ThoughtFrame
from specdec.data.form import Tools

TEXT = "text"
THOUGHT = "thought"
CALL = "tool call"
CODE = "code"
REGIONS = (TEXT, THOUGHT, CALL, CODE)

TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")  # <tool_call>, <|python_tag|>, [TOOL_CALLS]
FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
UNFINISHED = "\ufffd"  # what a tokenizer writes for some bytes of a character


class Span(NamedTuple):
    """A region of a text that is not :data:`TEXT`, by its characters."""

    region: str
    start: int
    end: int


class Marks(NamedTuple):
    """What thoughts and calls of an answer begin and end with."""

    # None where the template has no thoughts, or the prompt has closed its own
    thought: ThoughtFrame | None
    # what a call begins with; None where there are no tools, or the template's calls are not known
    call: re.Pattern[str] | None

    @classmethod
    def of(
        cls,
        thought: ThoughtFrame | None,
        call: CallFrame | None,
        prompt: str,
        before_text: str,
        tools: Tools,
    ) -> Self:
        """Return the marks of the answers to a prompt.

        Args:
            thought: of the template; its opening is empty where the template's prompts may open the thought.
            call: of the template.
            before_text: what the template writes before an answer's text, in which no call begins.
            tools: that the target can call.
        """
        if thought is not None and not thought.opening:
            closed = prompt.rstrip().endswith(thought.closing)
            thought = None if closed else thought
        return cls(thought, _call_mark(call, before_text, tools) if call and tools else None)


def _call_mark(call: CallFrame, before_text: str, tools: Tools) -> re.Pattern[str] | None:
    """Return what a call begins with: a tag at the beginning of a line, or else the opening and a tool's name."""
    opening = call.opening.strip()
    tag = TAG.match(opening)
    if tag is not None:
        return None if tag[0] in before_text else re.compile(rf"^[ \t]*{re.escape(tag[0])}", re.M)
    functions = [tool.get("function", tool) for tool in tools or ()]
    names = [re.escape(str(function.get("name"))) for function in functions]
    # targets write JSON with more or less white space than their templates
    words = re.findall(r"\w+|[^\w\s]", opening)
    spaced = r"\s*".join(map(re.escape, words))
    return re.compile(rf"{spaced}\s*(?:{'|'.join(names)})\b") if names else None


def spans(text: str, marks: Marks) -> list[Span]:
    """Return the regions of an answer's text, in order.

    A thought lasts up to its closing mark, or to the end of an answer that was cut off. A call begins at its mark,
    whether or not what follows can be read, and lasts to the end, because templates write calls last. Code is what
    stands between fences of three backticks.
    """
    regions = list[Span]()
    start = 0
    thought = marks.thought
    if thought is not None and text.lstrip().startswith(thought.opening) and text:
        closing = text.find(thought.closing)
        start = len(text) if closing < 0 else closing + len(thought.closing)
        regions.append(Span(THOUGHT, 0, start))
    code = [Span(CODE, *match.span()) for match in FENCED.finditer(text, start)]
    calls = marks.call.finditer(text, start) if marks.call is not None else ()
    outside = [
        match.start()
        for match in calls
        if not any(fence.start <= match.start() < fence.end for fence in code)
    ]
    if not outside:
        return regions + code
    end = outside[0]
    return [*regions, *(fence for fence in code if fence.end <= end), Span(CALL, end, len(text))]


def token_regions(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], marked: Sequence[Span]
) -> list[str]:
    """Return the region of every token; a token on the border of two belongs to the later one.

    Args:
        decode: the text of some tokens.
        marked: regions of the text of all tokens.
    """
    regions = [TEXT] * len(ids)
    if not marked:
        return regions
    ends = token_ends(ids, decode)
    for span in marked:
        first = bisect_right(ends, span.start)
        end = bisect_right(ends, span.end)
        regions[first:end] = [span.region] * (end - first)
    return regions


def token_ends(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return how many characters of the answer's text there are once each token is read.

    Each token is decoded together with the one before it, by which tokenizers write white space. A token that ends
    within a character adds nothing until the character is complete.
    """
    ends = []
    length = 0
    context = 0  # the token that the text since `done` is decoded with
    done = 0  # tokens whose characters are complete
    for count in range(1, len(ids) + 1):
        text = decode(ids[context:count])
        if not text.endswith(UNFINISHED):
            length += len(text) - len(decode(ids[context:done]))
            context = done
            done = count
        ends.append(length)
    return ends
