"""Whether a drafter and a target were made for each other."""

import logging

import torch

from specdec.drafter import Drafter
from specdec.target import Target

log = logging.getLogger(__name__)


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raise ValueError unless the drafter was made for a target of this shape."""
    config = drafter.config
    for what, has, wants in (
        ("hidden size", target.hidden_size, config.target_hidden_size),
        ("vocabulary size", target.vocab_size, config.vocab_size),
        ("number of layers", target.num_layers, config.num_target_layers),
    ):
        if has != wants:
            raise ValueError(
                f"drafter and target do not match: the target's {what} is {has}, the drafter was made for {wants}"
            )
    weight = drafter.lm_head.weight
    if (weight.dtype, weight.device) != (target.dtype, target.device):
        raise ValueError(
            f"the drafter is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}: "
            "load both alike"
        )


def check_made_for(target: Target, drafter: Drafter) -> None:
    """Raise ValueError if the drafter says that it was trained for another target of the same shape.

    A target in float16 has a fingerprint of its own, so that it is let through.
    """
    trained_for, given = drafter.config.target, target.identity
    if target.dtype == torch.float16 or trained_for.get("fingerprint") in (None, given["fingerprint"]):
        return
    which, this = trained_for.get("source"), given["source"]
    raise ValueError(
        f"this drafter was trained for another target of the same shape, {which}: the weights or the configuration of "
        f"{this} are others{', of another build or version' if which == this else ''}; give it its own target, or "
        "--other_target true (also if it was trained with its target in float16)"
    )


def warn_unless_made_for(target: Target, drafter: Drafter) -> bool:
    """Whether the drafter was trained for this very target; warns if it was for another of the same shape, or does not
    say for which."""
    trained_for = drafter.config.target
    made = trained_for.get("fingerprint") == target.identity["fingerprint"]
    if not made and trained_for.get("fingerprint") is None:
        log.warning("this drafter does not say which target it was trained for")
    elif not made:
        log.warning("this drafter was trained for another target (%s) of the same shape", trained_for.get("source"))
    return made
