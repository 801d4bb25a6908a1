"""Several processes: the strategies that a run trains under, and weights in shards (FSDP2)."""

import atexit
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from specdec.drafter import Drafter
from specdec.training.checkpoint import AtomicCheckpointIO, read_training_checkpoint, verify
from specdec.training.step import TrainStep

STRATEGIES = {"auto": "ddp", "ddp": "ddp", "ddp_fork": "ddp", "fsdp2": "fsdp2"}


def wait_for_gloo() -> None:
    """Let gloo's threads end what they are at; without a job, do nothing.

    They need Python's lock to let go of a finished reduction. Where Python ends before they have it, the process aborts
    after its work is done, and its launcher says that it failed (https://github.com/pytorch/pytorch/issues/190489):
    6 of 50 jobs of two processes that ended right after a step, and none of 40 with this pause.
    """
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_initialized and torch.distributed.get_backend() == "gloo":
        time.sleep(0.5)  # seconds; whoever sleeps lets go of the lock


atexit.register(wait_for_gloo)


def strategy_kind(strategy: Any) -> str:
    """``ddp`` or ``fsdp2``, from ``trainer.strategy`` as a config has it; ValueError for another, whose processes do
    not find the run again, or whose checkpoints are pickles."""
    kind = STRATEGIES.get(strategy) if isinstance(strategy, str) else None
    if kind is None:
        name = strategy if isinstance(strategy, str) else strategy.class_path
        raise ValueError(
            f"trainer.strategy={name}: specdec does not train under it: set {', '.join(STRATEGIES)}"
        )
    return kind


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether the trainer's strategy shards weights."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def shard(step: TrainStep, device: str, nodes: int, products: torch.dtype) -> None:
    """Shard all weights of a training step over the processes of each node, in place; the first process's are taken.

    Nodes hold the same shards and exchange gradients alone: within one the wires are faster. Weights are gathered in
    the dtype of products, norms' and the embedding's too, which autocast leaves alone; gradients are summed in their
    own.

    Every unroll step reads all of the drafter but its embedding, so that is one group: gathered at the first step,
    its gradients reduced after the last. A frozen embedding is its own: gathered once a batch, twice where a recurrence
    has a mask, and let go at once.
    Computing with the weights is the step's forward.
    """
    drafter = step.drafter
    world = torch.distributed.get_world_size()
    if nodes > 1:
        mesh = init_device_mesh(
            device, (nodes, world // nodes), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(device, (world,))
    gathered = MixedPrecisionPolicy(
        products, drafter.lm_head.weight.dtype, cast_forward_inputs=False
    )
    for tensor in (*drafter.parameters(), *drafter.buffers()):
        torch.distributed.broadcast(tensor.detach(), src=0)
    if not drafter.embed_tokens.weight.requires_grad:
        fully_shard(drafter.embed_tokens, mesh=mesh, mp_policy=gathered)
    fully_shard(step, mesh=mesh, mp_policy=gathered)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unsharded(drafter: Drafter) -> Drafter:
    """The drafter; where it lies in shards, a copy with all of its weights, for which every process has to ask."""
    tensors = drafter.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return drafter
    full = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }
    weight = full["lm_head.weight"]
    with torch.random.fork_rng(devices=[]):  # the copy's first weights are drawn, and then replaced
        out = Drafter(drafter.config, full["vocab.target_ids_D"].cpu()).to(
            device=weight.device, dtype=weight.dtype
        )
    out.load_state_dict(full)
    return out.train(drafter.training)


class FSDP2(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy over all processes. A checkpoint is one file, gathered on the first process, as
    under any other strategy; only the same number of processes resumes it exactly."""

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Data is split over all processes of all nodes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write one file; ValueError if it would lie elsewhere, before Lightning removes a folder of shards there."""
        path = self.broadcast(filepath)
        if isinstance(self.checkpoint_io, AtomicCheckpointIO):
            self.checkpoint_io.check(path)
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Take up weights and optimizer state; ValueError if they are damaged or of another drafter."""
        path = Path(checkpoint_path)
        verify(path)
        checkpoint = read_training_checkpoint(path)
        assert self.lightning_module is not None
        self.lightning_module.on_load_checkpoint(checkpoint)  # before torch complains of shapes
        super().load_checkpoint(path, weights_only=True)
        return checkpoint


StrategyRegistry.register("fsdp2", FSDP2, description="FSDP2 over the processes of each node")
