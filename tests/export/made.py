"""Drafters and checkpoints that these tests share."""

from pathlib import Path

import torch
from torch import Tensor

from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, Narrow
from specdec.target import Target


def made_drafter(
    spec: DrafterSpec, target: Target, *, seed: int = 0, own_embedding: bool = False, bias: bool = False
) -> Drafter:
    """A random drafter of a target; what it has of the target's is the target's.

    Args:
        bias: give a narrow entry a bias that is not zero.
    """
    torch.manual_seed(seed)
    config = DrafterConfig.for_target(
        spec, target.config, vocab_size=target.vocab_size, num_target_layers=target.num_layers, identity=target.identity
    )
    ids_D = torch.randperm(target.vocab_size)[: config.draft_vocab_size].sort().values
    drafter = Drafter(config, ids_D).to(target.dtype).requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
        if name == "entry.feature_fc.bias" and not bias:
            parameter.zero_()
    if config.head == "target":
        drafter.lm_head.weight.copy_(target.head_weight())
    if not own_embedding and config.hidden_size == target.hidden_size:
        drafter.embed_tokens.weight.copy_(target.embedding_weight())
    return drafter


def unbiased(spec: DrafterSpec) -> bool:
    """Whether nothing of the design is lost where fc.bias is."""
    return not isinstance(spec.entry, Narrow) or not spec.entry.bias


def same_state(one: Drafter, two: Drafter) -> bool:
    """Whether two drafters have the same weights to the last bit, in the same dtypes."""
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and _bits(a[n], b[n]) for n in a)


def _bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(a.contiguous().view(torch.uint8).eq(b.contiguous().view(torch.uint8)).all())


def names(directory: Path) -> list[str]:
    """What lies in a directory."""
    return sorted(path.name for path in directory.iterdir())
