"""Whether a request can be served, and whether drafter and target belong together."""

import logging

import torch

from specdec.drafter import Drafter
from specdec.target import Target
from specdec.target.identity import TOKENIZER, target_difference
from specdec.utils.numbers import Tokens, check_numbers
from specdec.utils.text import how_many

log = logging.getLogger(__name__)


def check_length(target: Target, prompt: list[int], max_new_tokens: Tokens, nodes: int = 1) -> None:
    """Raise ValueError for a request that no decoding can serve.

    Args:
        nodes: of the largest tree to verify, the root included.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
        raise ValueError(
            f"the prompt has token ids outside 0..{target.vocab_size - 1}: is the tokenizer the target's?"
        )
    check_numbers(check_length, {"max_new_tokens": max_new_tokens})
    most = target.config.max_position_embeddings
    if len(prompt) + max_new_tokens > most:
        raise ValueError(
            f"a prompt of {how_many(len(prompt), 'token')} and {max_new_tokens} new ones exceed the target's {most} "
            "positions"
        )
    slots = len(prompt) + max_new_tokens + nodes
    most_slots = target.most_slots
    if most_slots is not None and slots > most_slots:
        raise ValueError(
            f"a prompt of {how_many(len(prompt), 'token')}, {max_new_tokens} new ones and a tree of {nodes} exceed "
            f"{most_slots} positions, where this target's rotary frequencies start to depend on the text's length"
        )


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raise ValueError unless the drafter was made for a target of this shape, and both have one dtype and device."""
    config = drafter.config
    weight = drafter.lm_head.weight
    for what, has, wants in (
        ("hidden size", target.hidden_size, config.target_hidden_size),
        ("vocabulary size", target.vocab_size, config.vocab_size),
        ("number of layers", target.num_layers, config.num_target_layers),
        ("dtype", target.dtype, weight.dtype),
        ("device", target.device, weight.device),
    ):
        if has != wants:
            raise ValueError(
                f"drafter and target do not match: the target's {what} is {has}, the drafter was made for {wants}"
            )


def warn_unless_made_for(target: Target, drafter: Drafter, refuse: bool = False) -> bool:
    """Whether the drafter was trained for this very target; warns if it was not, or does not say for which.

    Args:
        refuse: raise ValueError for a drafter that says it was trained for another target of the same shape, except
            where the target is in float16, which has a different fingerprint.
    """
    trained_for = drafter.config.target
    identity = target.identity
    which = trained_for.get("source")
    difference = target_difference(identity, trained_for)
    if difference is None:
        return True
    if trained_for.get("fingerprint") is None and trained_for.get("parts") is None:
        log.warning("this drafter does not say which target it was trained for")
    elif not refuse or (target.dtype == torch.float16 and difference != TOKENIZER):
        log.warning(
            "this drafter was trained for another target (%s) of the same shape: its %s differs", which, difference
        )  # fmt: skip
    else:
        adapted = f" with {target.adapter}" if target.adapter is not None else ""
        same = ""
        if which == identity["source"] and not adapted:
            same = ", of another build or version"
        in_half = " (also if it was trained with its target in float16)"
        raise ValueError(
            f"this drafter was trained for another target of the same shape, {which}: the {difference} "
            f"of {identity['source']}{adapted} differs{same}; give it its own target, or --other_target true"
            f"{in_half if difference != TOKENIZER else ''}"
        )
    return False
