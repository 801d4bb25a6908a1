"""Actors of a Ray cluster, and what all processes of training agree on."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import distributed

from specdec.features.producers import NAMESPACE
from specdec.utils.cluster import last_line

log = logging.getLogger(__name__)

TIMEOUT = 60.0  # seconds of waiting between two lines of the log
Value = TypeVar("Value")


class Actors:
    """Starts the actors of one run, whose names end in its id."""

    def __init__(self, ray: Any, run: str) -> None:
        self.ray = ray
        self.run = run

    def full_name(self, name: str) -> str:
        """Return the name of an actor in the cluster."""
        return f"{name}-{self.run}"

    def start_actor(self, kind: type, name: str, *arguments: Any, **options: Any) -> Any:
        """Return the handle of an actor that is started again whenever it dies."""
        options |= {"name": self.full_name(name), "namespace": NAMESPACE, "max_restarts": -1}
        return self.ray.remote(kind).options(**options).remote(*arguments)

    def on_this_node(self) -> Any:
        """Return the strategy that places an actor on this machine."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self.ray.get_runtime_context().get_node_id()
        return NodeAffinitySchedulingStrategy(node, soft=False)


def answers_of(actors: Sequence[Any], method: str, wrong: str) -> list[Any]:
    """Return the answers of actors that start; ValueError in their words, behind ``wrong``, if one cannot."""
    import ray

    waiting = [getattr(actor, method).remote() for actor in actors]
    answers = []
    while waiting:
        ready, waiting = ray.wait(waiting, timeout=TIMEOUT)
        if not ready:
            log.warning("still waiting; the cluster has free: %s", ray.available_resources())
        try:
            answers += ray.get(ready)
        except ray.exceptions.RayError as error:
            raise ValueError(f"{wrong}: {last_line(error)}") from error
    return answers


def rank() -> int:
    """Return the number of this process among those that train together."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def agreed(make: Callable[[], Value]) -> Value:
    """Return what the first process makes, on every process; raise ValueError on all if it fails there."""
    if not distributed.is_initialized():
        return make()
    box: list[Any] = [None]
    if rank() == 0:
        try:
            box = [(make(), None)]
        except Exception as error:  # noqa: BLE001  whatever it is, the others wait
            box = [(None, str(error) if isinstance(error, ValueError) else last_line(error))]
    distributed.broadcast_object_list(box)
    value, wrong = box[0]
    if wrong is not None:
        raise ValueError(wrong)
    return value
