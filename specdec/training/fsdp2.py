"""``--trainer.strategy fsdp2``: weights, gradients, optimizer state and checkpoints in shards over the processes."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint import load as load_shards
from torch.distributed.checkpoint import save as save_shards
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from specdec.files import staged_directory
from specdec.sums import write_sums
from specdec.training.checkpoint_io import AtomicCheckpointIO
from specdec.training.seals import ALIKE, verify


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
        """Write every process's shards; the directory appears when all have.

        Raises:
            ValueError: on every process, if any cannot write.
        """
        path, shards = Path(self.broadcast(filepath)), dict[str, torch.Tensor]()
        alike = _take(checkpoint, "", shards)
        with contextlib.ExitStack() as stack:
            temporary = self._first(lambda: stack.enter_context(staged_directory(path, replace=True)))
            with _told(path):
                writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
                save_shards(shards, storage_writer=writer)

            def finish() -> None:
                AtomicCheckpointIO().save_checkpoint(alike, temporary / ALIKE)
                write_sums(temporary)
                stack.close()

            self._first(finish)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Take up weights and optimizer state; returns the rest.

        Raises:
            ValueError: a file is missing or damaged, or the checkpoint is of another drafter, or none of this strategy.
        """
        path = Path(self.broadcast(checkpoint_path))
        self._first(lambda: verify(path))
        alike = AtomicCheckpointIO().load_checkpoint(path / ALIKE)
        assert self.lightning_module is not None and self.model is not None
        self.lightning_module.on_load_checkpoint(alike)  # before torch complains of shapes
        optimizers = [get_optimizer_state_dict(self.model, optimizer) for optimizer in self.optimizers]
        shards: dict[str, torch.Tensor] = {}
        _take({"state_dict": get_model_state_dict(self.model), "optimizer_states": optimizers}, "", shards)
        with _told(path):
            load_shards(shards, storage_reader=HuggingFaceStorageReader(str(path)))
        found = _put(alike, "", shards)
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


def _take(tree: Any, name: str, shards: dict[str, torch.Tensor]) -> Any:
    """The tree without its shards, which go into ``shards`` by name."""
    if isinstance(tree, DTensor):
        shards[name] = tree
        return None
    if isinstance(tree, dict):
        return {key: _take(value, f"{name}/{key}", shards) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_take(value, f"{name}/{i}", shards) for i, value in enumerate(tree)]
    return tree


def _put(tree: Any, name: str, shards: dict[str, torch.Tensor]) -> Any:
    """The inverse."""
    if name in shards:
        return shards[name]
    if isinstance(tree, dict):
        return {key: _put(value, f"{name}/{key}", shards) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_put(value, f"{name}/{i}", shards) for i, value in enumerate(tree)]
    return tree


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Tell in one line what torch tells for every process with its traceback."""
    try:
        yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"{path}: {' '.join(str(reason).split())}") from error


StrategyRegistry.register("fsdp2", FSDP2, description="FSDP2 over all processes")
