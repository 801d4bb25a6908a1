"""Our own decoder in place of an engine: what a sound engine would be recorded to propose."""

from collections.abc import Sequence

from specdec.decoding import PlainDecoder
from specdec.diagnostics.anchors import AnchoredText
from specdec.drafter import Drafter
from specdec.engines.proposals import RecordedAnswer, RecordedPass
from specdec.target import Target


def recorded_answer(
    target: Target, drafter: Drafter, prompt: list[int], tokens: int, drafts: int
) -> RecordedAnswer:
    """The target's greedy answer, and the drafter's proposals behind each of its tokens."""
    ids = PlainDecoder(target).generate(prompt, tokens).ids
    text = [*prompt, *ids]
    places = list(range(len(prompt), len(text)))
    anchored = AnchoredText(target, drafter, text, drafts)
    proposals = [
        row for group in anchored.groups(places) for row in anchored.draft(group).tokens_AK.tolist()
    ]
    passes = [
        RecordedPass(place, text[place], row) for place, row in zip(places, proposals, strict=True)
    ]
    return RecordedAnswer(prompt, ids, passes)


def recorded_answers(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], tokens: int, drafts: int
) -> list[RecordedAnswer]:
    """One for each prompt."""
    return [recorded_answer(target, drafter, prompt, tokens, drafts) for prompt in prompts]


def with_draft(answer: RecordedAnswer, number: int, position: int, token: int) -> RecordedAnswer:
    """The same answer with another token proposed in one pass."""
    passes = list(answer.passes)
    drafts = list(passes[number].drafts)
    drafts[position] = token
    passes[number] = passes[number]._replace(drafts=drafts)
    return answer._replace(passes=passes)
