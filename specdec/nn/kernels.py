"""Which of the unroll's kernels a device gets."""

import torch

from specdec.nn.flex import Flex
from specdec.nn.unroll import Blocked, Dense, UnrollKernel


def unroll_kernel(name: str, device: torch.device) -> tuple[str, UnrollKernel]:
    """The kernel and its name; ``auto`` is flex on CUDA and blocked elsewhere.

    Raises:
        ValueError: there is no such kernel, or not on this device.
    """
    chosen = ("flex" if device.type == "cuda" else "blocked") if name == "auto" else name
    if chosen == "flex" and device.type != "cuda":
        raise ValueError(
            f"model.attention=flex needs CUDA: torch has no backward pass for it on {device.type}; use auto"
        )
    kernels = {"dense": Dense, "blocked": Blocked, "flex": Flex}
    if chosen not in kernels:
        raise ValueError(f"model.attention must be auto or one of {', '.join(kernels)}, not {name!r}")
    return chosen, kernels[chosen]()
