"""Telling whether tensors are what they were."""

from collections.abc import Iterable

from torch import Tensor


def versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Where each lies, and how often it was written to; the latter is 0 of inference tensors, which do not count."""
    return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]
