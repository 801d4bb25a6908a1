"""Turn the switches of a trained drafter one by one: a switch that changes nothing is connected to nothing.

Legend: B sequences, T tokens, N aux layers, H hidden.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specdec.decoding import Growth, Proposer, SpeculativeDecoder
from specdec.drafter import Drafter, DrafterConfig, Norms, PostNorm, PreNorm
from specdec.nn.view import View
from specdec.target import Target

CHOICES: dict[str, tuple[Any, ...]] = {"aux": ("none", "each", "concat"), "residual": ("raw", "normed")}  # else a bool
OPPOSITES = {PreNorm: PostNorm(), PostNorm: PreNorm()}

Proposal = tuple[list[int], list[int]]
"""Tokens and parents of a draft tree."""


class Flip(NamedTuple):
    """A switch, and another value of it."""

    switch: str
    trained: str
    value: str
    config: DrafterConfig | None  # the drafter's, with that value
    reason: str | None  # why there is none


class Probed(NamedTuple):
    """What the drafter does with one switch turned, beside what it does as it was trained."""

    switch: str
    trained: str
    flipped: str
    length_trained: float  # acceptance length, the bonus token included
    length_flipped: float | None  # None: it cannot be turned
    changed: float | None  # share of the places of the text at which another tree is proposed
    dead: bool  # no proposal changed
    reason: str | None  # why it cannot be turned


@torch.inference_mode()
def probe_switches(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    prompts: Sequence[list[int]],
    max_new_tokens: int = 32,
    on_switch: Callable[[str], None] = lambda what: None,
) -> list[Probed]:
    """Decode greedily with every norm and the recurrence turned in turn, the weights being kept.

    A norm that the trained drafter lacks has unit weight where it is turned on. Proposals are compared at every place
    of the target's own text, each made from the target's true features.

    Raises:
        ValueError: there is no prompt, the growth drafts one level only, which no recurrence reaches, or drafter and
            target do not match.
    """
    if not prompts:
        raise ValueError("probe: no prompt given")
    if growth.depth < 2:
        raise ValueError(f"probe: {growth.name} drafts one level, which no recurrence reaches: take a deeper growth")
    length, texts = _decode(target, drafter, growth, prompts, max_new_tokens)
    proposals, found = _proposals(target, drafter, growth, texts), list[Probed]()
    for flip in flips(drafter.config):
        on_switch(f"{flip.switch}: {flip.trained} -> {flip.value}")
        begin = flip.switch, flip.trained, flip.value, length
        if flip.config is None:
            found.append(Probed(*begin, None, None, False, flip.reason))
            continue
        other = rebuilt(drafter, flip.config)
        now = _proposals(target, other, growth, texts)
        changed = sum(a != b for a, b in zip(proposals, now, strict=True)) / len(proposals)
        other_length = _decode(target, other, growth, prompts, max_new_tokens)[0]
        found.append(Probed(*begin, other_length, changed, changed == 0, None))
    return found


def flips(config: DrafterConfig) -> Iterator[Flip]:
    """Every other value of every norm and of the recurrence; those that are not legal say why."""
    for field in dataclasses.fields(Norms):
        now = getattr(config.norms, field.name)
        for value in CHOICES.get(field.name, (False, True)):
            if value != now:
                norms = dataclasses.replace(config.norms, **{field.name: value})
                yield _flip(config, f"norms.{field.name}", str(now), str(value), norms=norms)
    name, opposite = type(config.recurrence).__name__, OPPOSITES.get(type(config.recurrence))
    if opposite is None:
        yield Flip("recurrence", name, "-", None, f"recurrence {name} has no opposite that is known here")
    else:
        yield _flip(config, "recurrence", name, type(opposite).__name__, recurrence=opposite)


def rebuilt(drafter: Drafter, config: DrafterConfig) -> Drafter:
    """A drafter of this config with all of another's weights that it has a place for; norms beside them are ones."""
    weights, head = drafter.state_dict(), drafter.lm_head.weight
    with torch.random.fork_rng(devices=[]):  # what is drawn here is overwritten
        out = Drafter(config, drafter.vocab.target_ids_D.cpu())
    out.to(device=head.device, dtype=head.dtype)
    kept = {name: weights[name] for name in out.state_dict() if name in weights}
    missing = out.load_state_dict(kept, strict=False).missing_keys
    assert all("norm" in name for name in missing), missing
    return out.eval().requires_grad_(False)


def _flip(config: DrafterConfig, switch: str, now: str, value: str, **parts: Any) -> Flip:
    try:
        return Flip(switch, now, value, dataclasses.replace(config, **parts), None)
    except ValueError as error:
        return Flip(switch, now, value, None, str(error))


def _decode(
    target: Target, drafter: Drafter, growth: Growth, prompts: Sequence[list[int]], max_new_tokens: int
) -> tuple[float, list[tuple[int, list[int]]]]:
    """The acceptance length, and every text with the length of its prompt."""
    decoder = SpeculativeDecoder(target, drafter, growth)
    made = [decoder.generate(prompt, max_new_tokens) for prompt in prompts]
    passes = [count for generation in made for count in generation.accepted]
    texts = [(len(prompt), [*prompt, *one.ids]) for prompt, one in zip(prompts, made, strict=True)]
    return 1 + sum(passes) / max(1, len(passes)), texts


def _proposals(
    target: Target, drafter: Drafter, growth: Growth, texts: Sequence[tuple[int, list[int]]]
) -> list[Proposal]:
    """What is proposed after every new token of every text."""
    config, found = drafter.config, list[Proposal]()
    one_B = torch.ones(1, dtype=torch.int64, device=target.device)
    for prompt_length, ids in texts:
        ids_1T = torch.tensor([ids], device=target.device)
        view = View.packed(torch.zeros_like(ids_1T))
        aux_1TNH = target.forward(ids_1T, view, config.aux_layers, config.aux_final_norm).aux_BTNH
        proposer = Proposer(drafter, growth, len(ids) + growth.depth)
        if prompt_length > 1:
            proposer.prefill(0, ids_1T[:, 1:prompt_length], aux_1TNH[:, : prompt_length - 1])
        for place in range(prompt_length, len(ids)):  # of the root
            root_11 = ids_1T[:, place : place + 1]
            start = proposer.extend(one_B * (place - 1), root_11, aux_1TNH[:, place - 1 : place], one_B)
            tree = proposer.propose(one_B * place, root_11[0], start)
            found.append((tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()))
    return found
