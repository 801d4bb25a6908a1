"""A saved drafter and its target, ready to decode."""

from pathlib import Path
from typing import NamedTuple

from specdec.decoding import check_pair, warn_unless_made_for
from specdec.drafter import Drafter, load
from specdec.embedded.source import TargetSource
from specdec.target import Target


class Pair(NamedTuple):
    """In one dtype, on one device."""

    target: Target
    drafter: Drafter
    made_for_each_other: bool  # else the drafter was trained for another target of the same shape


def load_pair(source: TargetSource, drafter_directory: Path | str, device: str = "cpu") -> Pair:
    """Load both; the target proves itself.

    Raises:
        ValueError: one cannot be loaded, the target is not what it should be, or they do not match.
    """
    drafter = load(drafter_directory)
    target = source.load(device)
    target.prove()
    return paired(target, drafter)


def paired(target: Target, drafter: Drafter) -> Pair:
    """A drafter, moved to where its target is.

    Raises:
        ValueError: they do not match.
    """
    drafter.to(device=target.device, dtype=target.dtype)
    check_pair(target, drafter)
    return Pair(target, drafter, warn_unless_made_for(target, drafter))
