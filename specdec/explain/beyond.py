"""What lies at the end of the waterfall and beyond it: decoding, other ways to ask, the export, a real engine.

Legend: A places, K drafts.
"""

from collections.abc import Callable, Sequence

import torch

from specdec.decoding import Chain, Request, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.explain.answers import TOGETHER, Answered
from specdec.parity.asked import Answer
from specdec.parity.exported import engine
from specdec.parity.reference import Served
from specdec.parity.texts import Text
from specdec.target import Target

PERTURBED, EXPORTED, ENGINE = "perturbed", "exported", "engine"
SYSTEM = "You are a helpful assistant."
Done = Callable[[int], None]


def observed(
    target: Target,
    drafter: Drafter,
    asked: Sequence[list[int]],
    max_new_tokens: int,
    depth: int,
    on_prompt: Done = lambda done: None,
) -> list[list[int]]:
    """Drafts that every pass of greedy decoding with a chain accepts, by prompt."""
    decoder = SpeculativeDecoder(target, drafter, Chain(depth), batch=min(TOGETHER, len(asked)))
    found: dict[int, list[int]] = {}
    for number, made in decoder.generate_all([Request(ids, max_new_tokens) for ids in asked], target.eos_token_ids):
        found[number] = list(made.accepted)
        on_prompt(1)
    return [found[number] for number in range(len(asked))]


def no_bos(prompt: Prompt, target: Target) -> list[int]:
    """The prompt without the token that begins every text."""
    ids = Conversation(prompt, target.tokenizer).next_ids() or []
    if len(ids) < 2 or ids[0] != target.tokenizer.bos_token_id:
        raise ValueError(f"prompt {prompt.prompt_id} does not begin with the tokenizer's BOS token")
    return ids[1:]


def no_template(prompt: Prompt, target: Target) -> list[int]:
    """The last thing the user says, as raw text."""
    said = prompt.turns or [one["content"] for one in prompt.messages or [] if one["role"] == "user"]
    if not said:
        raise ValueError(f"prompt {prompt.prompt_id} is raw text, which no template writes")
    said = said[:1] if prompt.turns else said[-1:]
    raw = Prompt(prompt.prompt_id, prompt.category, None, None, said[0])
    return Conversation(raw, target.tokenizer).next_ids() or []


def system(prompt: Prompt, target: Target) -> list[int]:
    """With a system prompt that the drafter may never have seen."""
    return Conversation(prompt, target.tokenizer, SYSTEM).next_ids() or []


PERTURBATIONS: dict[str, Callable[[Prompt, Target], list[int]]] = {
    "no_bos": no_bos,
    "no_template": no_template,
    "system": system,
}


def perturbed(name: str, prompts: Sequence[Prompt], target: Target) -> list[list[int]]:
    """The prompts as they are asked under a perturbation.

    Raises:
        ValueError: there is none of this name, or it does not apply to a prompt.
    """
    if name not in PERTURBATIONS:
        raise ValueError(f"perturb: there is no {name!r}, choose from {', '.join(PERTURBATIONS)}")
    try:
        return [PERTURBATIONS[name](prompt, target) for prompt in prompts]
    except ValueError as error:
        raise ValueError(f"perturb {name}: {error}") from error


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
