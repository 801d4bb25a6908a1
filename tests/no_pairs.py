"""A guard against tensors that grow with the square of the length."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoPairs(TorchDispatchMode):
    """Fails at the first operation that makes a tensor of a quarter of length x length elements.

    A view of fewer numbers, such as an expanded one, takes no memory and passes.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.most = length * length // 4

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                count = x.untyped_storage().nbytes() // x.element_size()
                assert count < self.most, f"{func} made {tuple(x.shape)}, {count} elements"
        return out
