"""Several processes: the strategies that a run trains under, and weights and checkpoints in shards (FSDP2)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint import load as load_shards
from torch.distributed.checkpoint import save as save_shards
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from specdec.drafter import Drafter
from specdec.training.checkpoint import ALIKE, AtomicCheckpointIO, verify
from specdec.training.step import TrainStep
from specdec.utils.files import staged_directory, write_sums

STRATEGIES = {"auto": "ddp", "ddp": "ddp", "ddp_fork": "ddp", "fsdp2": "fsdp2"}


def strategy_kind(given: Any) -> str:
    """``ddp`` or ``fsdp2``, from ``trainer.strategy`` as a config has it; ValueError for another, whose processes do
    not find the run again, or whose checkpoints are pickles."""
    kind = STRATEGIES.get(given) if isinstance(given, str) else None
    if kind is None:
        name = given if isinstance(given, str) else given.class_path
        raise ValueError(f"trainer.strategy={name}: specdec does not train under it: set {', '.join(STRATEGIES)}")
    return kind


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether the trainer's strategy shards weights."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def shard(step: TrainStep, mesh: DeviceMesh) -> None:
    """Shard all weights of a training step over the processes of ``mesh``, in place; the first process's are taken.

    Every unroll step reads all of the drafter but its embedding, so that is one group: gathered at the first step,
    its gradients reduced after the last. A frozen embedding is its own: gathered once a batch, and let go at once.
    Computing with the weights is the step's forward.
    """
    drafter = step.drafter
    for tensor in (*drafter.parameters(), *drafter.buffers()):
        torch.distributed.broadcast(tensor.detach(), src=0)
    if not drafter.embed_tokens.weight.requires_grad:
        fully_shard(drafter.embed_tokens, mesh=mesh)
    fully_shard(step, mesh=mesh)


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


class FSDP2(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy over all processes, with checkpoints that are whole or absent.

    A checkpoint is a directory: the shards as safetensors, all that is no shard in one file read with
    ``weights_only``, and their hashes. All nodes must see it. Only the same number of processes goes on with
    it exactly.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1)

    def setup_environment(self) -> None:
        """Shard over all processes of all nodes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        """Write every process's shards; the directory appears when all have. ValueError on all if any cannot."""
        path = Path(self.broadcast(filepath))
        alike, shards = _split(checkpoint)
        with contextlib.ExitStack() as stack:
            temporary = self._first(lambda: stack.enter_context(staged_directory(path, replace=True)))
            with _one_line(path):
                save_shards(shards, storage_writer=HuggingFaceStorageWriter(str(temporary), save_distributed=True))

            def finish() -> None:
                AtomicCheckpointIO().save_checkpoint(alike, temporary / ALIKE)
                write_sums(temporary)
                stack.close()

            self._first(finish)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Take up weights and optimizer state; returns the rest. ValueError if it is damaged or of another drafter."""
        path = Path(self.broadcast(checkpoint_path))
        self._first(lambda: verify(path))
        alike = AtomicCheckpointIO().load_checkpoint(path / ALIKE)
        assert self.lightning_module is not None and self.model is not None
        self.lightning_module.on_load_checkpoint(alike)  # before torch complains of shapes
        optimizers = [get_optimizer_state_dict(self.model, optimizer) for optimizer in self.optimizers]
        _, shards = _split({"state_dict": get_model_state_dict(self.model), "optimizer_states": optimizers})
        with _one_line(path):
            load_shards(shards, storage_reader=HuggingFaceStorageReader(str(path)))
        found = _named(alike, lambda name, value: shards.get(name, value))
        set_model_state_dict(self.model, found["state_dict"])
        for optimizer, state in zip(self.optimizers, found["optimizer_states"], strict=False):
            set_optimizer_state_dict(self.model, optimizer, state)
        return alike

    def _first(self, act: Callable[[], Any]) -> Any:
        """What ``act`` returns on the first process; what it raises, on all."""
        found, said = None, None
        if self.global_rank == 0:
            try:
                found = act()
            except ValueError as error:
                said = str(error)
        found, said = self.broadcast((found, said))
        if said is not None:
            raise ValueError(said)
        return found


def _named(tree: Any, leaf: Callable[[str, Any], Any], name: str = "") -> Any:
    """The tree with ``leaf`` of all that is no dict or list, by its path in the tree."""
    if isinstance(tree, dict):
        return {key: _named(value, leaf, f"{name}/{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [_named(value, leaf, f"{name}/{i}") for i, value in enumerate(tree)]
    return leaf(name, tree)


def _split(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tree with None for its shards, and these by their paths."""
    shards: dict[str, torch.Tensor] = {}

    def leaf(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        shards[name] = value
        return None

    return _named(tree, leaf), shards


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Tell in one line what torch tells for every process with its traceback."""
    try:
        yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"{path}: {' '.join(str(reason).split())}") from error


StrategyRegistry.register("fsdp2", FSDP2, description="FSDP2 over all processes")
