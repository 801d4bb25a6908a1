"""What a drafter has of its target's, embedding and head: as the target has it, or rounded to a training's dtype."""

import logging

import torch
from torch import Tensor

from specdec.drafter import Drafter
from specdec.export.switches import EMBEDDING, HEAD, Subject
from specdec.target import Target

log = logging.getLogger(__name__)

ROUNDED = (torch.float32, torch.bfloat16, torch.float16)  # what a target is loaded in, beside float64


def is_targets(ours: Tensor, theirs: Tensor) -> bool:
    """Whether weights are the target's, though one of the two was rounded to another dtype, as a whole.

    A float32 checkpoint loaded in bfloat16 is the same target; so its fingerprint says too. A drafter copies what it
    was trained with, and may be stored wider or be exported with the target loaded wider or narrower. Trained weights
    are another thing: all of their numbers would have to be such roundings.
    """
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
    return _equal(ours, theirs) or _rounding(ours, theirs) is not None or _equal(ours.to(theirs.dtype), theirs)


def rounded(drafter: Drafter, target: Target, subject: Subject) -> str:
    """``embed_tokens.weight to bfloat16``: what stays with the target but is rounded in the drafter; else nothing."""
    state, theirs = drafter.state_dict(), weights(target)
    found = {name: _rounding(state[name].cpu(), theirs[name].cpu()) for name in subject.shared}
    return " and ".join(f"{name} to {str(dtype).removeprefix('torch.')}" for name, dtype in found.items() if dtype)


def warn_if_rounded(drafter: Drafter, target: Target, subject: Subject) -> str:
    """:func:`rounded`; warns that what is served is not what was trained, to the last bit."""
    if found := rounded(drafter, target, subject):
        log.warning(
            "this drafter has weights of the target rounded, %s: an engine reads them as the target has them, and "
            "close drafts may fall otherwise than in training; specdec parity --target.dtype compares in that dtype",
            found,
        )
    return found


def weights(target: Target) -> dict[str, Tensor]:
    """The target's, by the drafter's names."""
    return {EMBEDDING: target.embedding_weight(), HEAD: target.head_weight()}


def _rounding(ours: Tensor, theirs: Tensor) -> torch.dtype | None:
    """The dtype to which ours are theirs rounded; None if they are not, or equal."""
    if _equal(ours, theirs):
        return None
    return next((dtype for dtype in ROUNDED if _equal(ours, theirs.to(dtype))), None)


def _equal(one: Tensor, two: Tensor) -> bool:
    """Number by number, of any dtypes."""
    dtype = torch.promote_types(one.dtype, two.dtype)
    return torch.equal(one.to(dtype), two.to(dtype))
