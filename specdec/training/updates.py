"""How far an optimizer step moves each part of the drafter, as a share of that part's size."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from specdec.drafter import Drafter
from specdec.nn.backend import wide
from specdec.training.distributed import local_part

PARTS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "mlp": "mlp",
    "attention": "attention",
    "token_qkv_proj": "attention",
    "self_attn": "attention",
    "linear_attn": "attention",
}
"""Parts of a parameter's name that decide its group; ``token_qkv_proj`` is the half of queries, keys and values that
reads tokens, and the last two are transformers' names."""
Weights = dict[str, Tensor]  # by the parameters' names


def group_of(name: str) -> str:
    """Return a parameter's group by its name in the drafter: ``fusion`` (EAGLE's ``fc`` and ``fc_norm``), ``entry``,
    ``attention``, ``mlp``, ``norms``, ``head`` or ``embedding``; of a custom part, the place that it has."""
    words = name.split(".")
    if words[0] == "fusion" or words[:2] == ["norms", "aux"]:
        return "fusion"
    if any("norm" in word for word in words):
        return "norms"
    return next((PARTS[word] for word in words if word in PARTS), words[0])


def copied_weights(drafter: Drafter) -> Weights:
    """Return copies of all trained parameters; of sharded ones (FSDP2), of this process's shards."""
    return {
        name: local_part(parameter.detach()).clone()
        for name, parameter in drafter.named_parameters()
        if parameter.requires_grad
    }


@torch.no_grad()
def relative_updates(before: Weights, drafter: Drafter) -> dict[str, Tensor]:
    """Return ``||new - old|| / ||old||`` of every group, Frobenius norms over all its trained parameters, as scalars.

    Infinite for a group that was all zero and moved. Where parameters are sharded (FSDP2) every process has to ask.

    Args:
        before: the weights before the step, from :func:`copied_weights`, which are written over.
    """
    parameters = dict(drafter.named_parameters())
    squares: dict[str, list[Tensor]] = {}
    for name, old in before.items():
        size = _square(old)
        change = _square(old.sub_(local_part(parameters[name])))
        squares.setdefault(group_of(name), []).append(torch.stack([change, size]))
    sums_G2 = torch.stack([torch.stack(rows).sum(0) for rows in squares.values()])
    if any(isinstance(parameters[name], DTensor) for name in before):
        torch.distributed.all_reduce(sums_G2)  # nodes that hold the same shards count alike in both
    change_G, size_G = sums_G2.sqrt().unbind(1)
    shares_G = torch.where(change_G > 0, change_G / size_G, 0.0)
    return dict(zip(squares, shares_G, strict=True))


def _square(weight: Tensor) -> Tensor:
    """Return the sum of a weight's squares, in float32 at least."""
    norm: Tensor = torch.linalg.vector_norm(weight, dtype=wide(weight.dtype))
    return norm.square()
