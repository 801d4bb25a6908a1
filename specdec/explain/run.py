"""The measurement: answers, levels, decoding, and what lies beyond it, under one progress bar."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from specdec.evaluation.pair import Pair
from specdec.explain.answers import Answered, answered
from specdec.explain.beyond import EXPORTED, PERTURBED, Perturbed, exported, observed, under
from specdec.explain.levels import OWN_FEATURES, PERFECT, TRUE_FEATURES, VOCABULARY, Runs, measure, passes
from specdec.explain.waterfall import OBSERVED, OWN_TOKENS, Level, Waterfall
from specdec.nn.products import fast_products
from specdec.parity.reference import Served
from specdec.progress import progress


class Asked(NamedTuple):
    """Prompts as token ids, and how they are answered."""

    prompts: Sequence[list[int]]
    prompt_ids: Sequence[str]
    max_new_tokens: int
    depth: int


class Measured(NamedTuple):
    """Levels, and what they were measured on."""

    waterfall: Waterfall
    texts: list[Answered]
    prompt_ids: list[str]
    """Those with a target pass, in the levels' order."""


def explain(pair: Pair, asked: Asked, others: Sequence[Perturbed] = (), served: Served | None = None) -> Measured:
    """Measure every level.

    Args:
        others: conditions to decode the same prompts under.
        served: an exported checkpoint as an engine has it.

    Raises:
        ValueError: no answer comes to a target pass, a prompt leaves no room for its answer, or the drafter's window
            hides drafts of a pass, which the unroll sees.
    """
    target, drafter, _ = pair
    depth, most, window = asked.depth, asked.max_new_tokens, drafter.config.attention_window
    if not isinstance(window, str) and window < depth:
        raise ValueError(f"the drafter's attention_window {window} is less than {depth} drafts: ask for fewer")
    stages = 3 + len(others) + (served is not None)
    with contextlib.ExitStack() as stack:
        on_prompt = stack.enter_context(progress("explaining", "prompts", stages * len(asked.prompts)))
        if target.device.type == "cpu":
            stack.enter_context(fast_products())
        every = answered(target, asked.prompts, most, depth, on_prompt)
        used = [number for number, text in enumerate(every) if text.anchors]
        if not used:
            raise ValueError("no answer comes to a target pass: all end with their first token")
        on_prompt((stages - 1) * (len(every) - len(used)))
        texts = [every[number] for number in used]
        runs = measure(target, drafter, texts, depth, on_prompt)
        levels = [_level(name, runs, name, name) for name in (PERFECT, VOCABULARY, TRUE_FEATURES)]
        levels.append(_level(OWN_FEATURES, runs, OWN_FEATURES, TRUE_FEATURES))
        levels.append(_level(OWN_TOKENS, runs, OWN_FEATURES, OWN_FEATURES))
        prompts = [asked.prompts[number] for number in used]
        levels.append(Level(OBSERVED, observed(target, drafter, prompts, most, depth, on_prompt)))
        for other in others:
            these = Perturbed(other.condition, [other.asked[number] for number in used])
            accepted = under(these, target, drafter, most, depth, on_prompt)
            levels.append(Level(f"{PERTURBED} {other.condition.name}", accepted))
        if served is not None:
            of_export = list[list[int]]()
            for text, run in zip(texts, runs, strict=True):
                of_export.append(exported(target, served, text, depth, passes(run[OWN_FEATURES])))
                on_prompt(1)
            levels.append(Level(EXPORTED, of_export))
    return Measured(Waterfall(levels), texts, [asked.prompt_ids[number] for number in used])


def _level(name: str, runs: Sequence[Runs], drafts: str, begun: str) -> Level:
    """The drafts of one level at the passes of another."""
    accepted = [[run[drafts][place] for place in passes(run[begun])] for run in runs]
    return Level(name, accepted, [run[drafts] for run in runs] if name == drafts else None)
