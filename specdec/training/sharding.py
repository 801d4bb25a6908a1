"""A drafter whose weights lie in shards over the processes: FSDP2, torch's ``fully_shard``."""

from collections.abc import Iterable

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from specdec.drafter import Drafter


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether the trainer's strategy shards weights."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def shard(drafter: Drafter, mesh: DeviceMesh) -> None:
    """Shard all weights over the processes of ``mesh``, in place; the first process's are taken.

    Every unroll step reads all of the drafter but its embedding, so that is one group: gathered at the first step,
    its gradients reduced after the last. A frozen embedding is its own: gathered once a batch, and let go at once.
    Whoever computes with the weights does so inside ``drafter(run, ...)``.
    """
    for tensor in (*drafter.parameters(), *drafter.buffers()):
        torch.distributed.broadcast(tensor.detach(), src=0)
    if not drafter.embed_tokens.weight.requires_grad:
        fully_shard(drafter.embed_tokens, mesh=mesh)
    fully_shard(drafter, mesh=mesh)


def whole(drafter: Drafter) -> Drafter:
    """The drafter; where it lies in shards, a copy with all of its weights, for which every process has to ask."""
    tensors = drafter.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return drafter
    full = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    weight = full["lm_head.weight"]
    with torch.random.fork_rng(devices=[]):  # the copy's first weights are drawn, and then replaced
        out = Drafter(drafter.config, full["vocab.target_ids_D"].cpu()).to(device=weight.device, dtype=weight.dtype)
    out.load_state_dict(full)
    return out.train(drafter.training)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of them; it shares their memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
