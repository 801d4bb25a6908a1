"""What jobs that train nothing are expected to need: their weights, and a process."""

from specdec.embedded.source import TargetSource
from specdec.target.loading import DTYPES

PROCESS_BYTES = 700_000_000  # of Python, torch and Lightning, before a model


def of_weights(target: TargetSource, target_parameters: int, drafter_parameters: int = 0) -> int:
    """Bytes of a process that runs a target and a float32 drafter; caches and activations come on top.

    Raises:
        ValueError: there is no such dtype.
    """
    if target.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {target.dtype!r}: choose from {', '.join(DTYPES)}")
    return target_parameters * DTYPES[target.dtype].itemsize + 4 * drafter_parameters + PROCESS_BYTES
