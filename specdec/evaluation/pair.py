"""A saved drafter and its target, ready to decode."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.decoding import check_made_for, check_pair, warn_unless_made_for
from specdec.drafter import Drafter, load
from specdec.embedded.source import TargetSource
from specdec.host import multiplies_bfloat16
from specdec.target import Target

log = logging.getLogger(__name__)


class Pair(NamedTuple):
    """In one dtype, on one device."""

    target: Target
    drafter: Drafter
    made_for_each_other: bool  # else the drafter was trained for another target of the same shape


def load_pair(
    source: TargetSource, drafter_directory: Path | str, device: str = "cpu", other_target: bool = False
) -> Pair:
    """:func:`load_pairs` of one drafter."""
    (pair,) = load_pairs(source, [drafter_directory], device, other_target)
    return pair


def load_pairs(
    source: TargetSource, drafter_directories: Sequence[Path | str], device: str = "cpu", other_target: bool = False
) -> list[Pair]:
    """Load drafters, and the target of them all, which proves itself.

    Args:
        other_target: whether a drafter may be one that was trained for another target of the same shape.

    Raises:
        ValueError: one cannot be loaded, the target is not what it should be, or they do not match.
    """
    drafters = [load(directory) for directory in drafter_directories]
    target = source.load(device)
    target.prove()
    if target.device.type == "cpu" and target.dtype == torch.bfloat16 and not multiplies_bfloat16():
        log.warning("bfloat16 may take many times as long as float32 here: this processor does not multiply it")
    return [_paired(target, drafter, other_target) for drafter in drafters]


def _paired(target: Target, drafter: Drafter, other_target: bool) -> Pair:
    drafter.to(device=target.device, dtype=target.dtype)
    check_pair(target, drafter)
    if not other_target:
        check_made_for(target, drafter)
    return Pair(target, drafter, warn_unless_made_for(target, drafter))
