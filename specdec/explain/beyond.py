"""What lies at the end of the waterfall and beyond it: decoding, other ways to ask, the export, a real engine.

Legend: A places, K drafts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from specdec.decoding import Chain, Request, Sampling, SpeculativeDecoder
from specdec.decoding.decoder import GREEDY
from specdec.drafter import Drafter
from specdec.explain.answers import TOGETHER, Answered
from specdec.parity.asked import Answer
from specdec.parity.exported import engine
from specdec.parity.reference import Served
from specdec.parity.texts import Text
from specdec.robustness.conditions import Condition
from specdec.robustness.run import plan
from specdec.robustness.setting import Setting
from specdec.target import Target

PERTURBED, EXPORTED, ENGINE = "perturbed", "exported", "engine"
Done = Callable[[int], None]


def observed(
    target: Target,
    drafter: Drafter,
    asked: Sequence[list[int]],
    max_new_tokens: int,
    depth: int,
    on_prompt: Done = lambda done: None,
    sampling: Sampling = GREEDY,
) -> list[list[int]]:
    """Drafts that every pass of decoding with a chain accepts, by prompt."""
    if not asked:
        return []
    decoder = SpeculativeDecoder(target, drafter, Chain(depth), sampling, batch=min(TOGETHER, len(asked)))
    found: dict[int, list[int]] = {}
    for number, made in decoder.generate_all([Request(ids, max_new_tokens) for ids in asked], target.eos_token_ids):
        found[number] = list(made.accepted)
        on_prompt(1)
    return [found[number] for number in range(len(asked))]


class Perturbed(NamedTuple):
    """A condition, and what the target is asked under it."""

    condition: Condition
    asked: list[list[int] | None]
    """Of every prompt; None where the condition leaves it as it is, or it cannot be decoded so."""


def perturbed(conditions: Sequence[Condition], setting: Setting) -> list[Perturbed]:
    """What the prompts of a setting become.

    Raises:
        ValueError: a condition applies to none of them; the message says why.
    """
    found = []
    for condition in conditions:
        what = plan(condition, setting)
        if what.skipped is not None:
            raise ValueError(f"perturb {condition.name}: {what.skipped}")
        fit = {prompt.prompt_id for prompt in what.prompts}
        asked = [
            setting.first_ids(condition.conversation(prompt, setting)) if prompt.prompt_id in fit else None
            for prompt in setting.prompts
        ]
        found.append(Perturbed(condition, [ids if isinstance(ids, list) else None for ids in asked]))
    return found


def under(
    one: Perturbed, target: Target, drafter: Drafter, max_new_tokens: int, depth: int, on_prompt: Done
) -> list[list[int]]:
    """:func:`observed` under a condition; no pass of a prompt that it does not apply to."""
    fit = [ids for ids in one.asked if ids is not None]
    sampling, other = one.condition.sampling(Sampling()), one.condition.drafter(drafter, Sampling().seed)
    made = iter(observed(target, other, fit, max_new_tokens, depth, on_prompt, sampling))
    on_prompt(len(one.asked) - len(fit))
    return [[] if ids is None else next(made) for ids in one.asked]


@torch.no_grad()
def exported(target: Target, served: Served, text: Answered, depth: int, guess: Sequence[int]) -> list[int]:
    """What every pass accepts if the export's reference drafts.

    Args:
        guess: places where our own drafter's passes begin. They are asked first and, only if a pass of the export's
            begins elsewhere, all others.
    """
    places, most = range(len(text.anchors)), text.most(depth)
    known, place, accepted = _drafts(target, served, text, depth, guess), 0, list[int]()
    while place < len(places):
        if place not in known:
            known |= _drafts(target, served, text, depth, [n for n in places[place:] if n not in known])
        accepted.append(min(most[place], known[place]))
        place += accepted[-1] + 1
    return accepted


def _drafts(target: Target, served: Served, text: Answered, depth: int, places: Sequence[int]) -> dict[int, int]:
    """Right drafts before the first wrong one, at these places."""
    if not places:
        return {}
    anchors = [text.anchors[n] for n in places]
    said = engine(target, served, Text(text.ids, text.prompt), anchors, depth - 1)
    due = torch.tensor([text.ids[anchor + 2 : anchor + 2 + depth] for anchor in anchors], device=target.device)
    right_AK = said.log_probs_AKV.argmax(-1) == due
    return dict(zip(places, right_AK.cumprod(1).sum(1).tolist(), strict=True))


def of_engine(answer: Answer, text: Answered, max_new_tokens: int, end: frozenset[int]) -> list[int]:
    """What every pass of an engine accepts, up to the end of the answer as decoding counts it.

    The engine goes on behind end tokens. One behind the kept tokens is known only where it said what our target says.
    """
    length = next((n for n, token in enumerate(answer.ids, start=1) if token in end), None)
    ours = text.ids[text.prompt : text.prompt + text.kept]
    if length is None and answer.ids[:max_new_tokens] == ours:
        length = text.end
    if length is None:
        return list(answer.accepted)
    passes = zip(answer.known, answer.accepted, strict=True)
    return [min(count, length - n - 1) for n, count in passes if n < min(length, max_new_tokens)]
