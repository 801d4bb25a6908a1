"""Which attention kernel the unroll runs."""

import torch

from specdec.nn.blocked import Blocked
from specdec.nn.merged import Flex
from specdec.nn.unroll import Dense, UnrollKernel


def unroll_kernel(name: str, device: torch.device) -> tuple[str, UnrollKernel]:
    """The kernel and its name; ``auto`` is flex on CUDA and blocked elsewhere.

    Raises:
        ValueError: there is no such kernel, or not on this device.
    """
    kernels = {"dense": Dense, "blocked": Blocked, "flex": Flex}
    cuda = device.type == "cuda"
    chosen = ("flex" if cuda else "blocked") if name == "auto" else name
    if chosen not in kernels:
        raise ValueError(
            f"model.attention must be auto or one of {', '.join(kernels)}, not {name!r}"
        )
    if chosen == "flex" and not cuda:
        raise ValueError(
            f"model.attention=flex needs CUDA: torch has no backward pass for it on {device.type}; use auto"
        )
    return chosen, kernels[chosen]()
