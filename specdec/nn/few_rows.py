"""Products of a few rows with a weight matrix, as a compiled graph computes them fastest on a CPU.

A verified chain has as many rows as it has nodes: two to eight. Such a product should take the time of reading the
weights once, but the libraries' products are made for many rows: on an AMD processor they read the weights of four
rows at a quarter of the speed of the memory. Written as one sum for each row and output, the compiler reads each weight
once, multiplies it by all rows, and keeps the sums in registers.

Legend: R rows, I inputs, O outputs.
"""

from weakref import WeakSet

import torch
from torch import Tensor, nn

from specdec.nn.backend import widened

# rows up to which the sums of all fit in the registers of a processor with AVX2
MOST_ROWS = 8
# Layers that have the hook. It is never removed: torch compiles a graph again when a module's hooks have changed.
_prepared: WeakSet[nn.Module] = WeakSet()


def sum_few_rows(*modules: nn.Module) -> None:
    """Have graphs that are compiled for a CPU compute these modules' linear layers as :func:`sums`.

    That is up to :data:`MOST_ROWS` rows, for good, and changes nothing where no graph is compiled.
    """
    for module in modules:
        for layer in module.modules():
            if type(layer) is nn.Linear and layer not in _prepared:
                layer.register_forward_hook(_replace_output)
                _prepared.add(layer)


def _replace_output(layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
    """Give the sums in place of the layer's own output, which the compiler then leaves out."""
    if not torch.compiler.is_compiling() or output.device.type != "cpu":
        return None
    (x,) = inputs
    rows = output.numel() // layer.out_features
    if rows > MOST_ROWS or x.dtype != layer.weight.dtype:
        return None
    return sums(x, layer.weight, layer.bias)


def sums(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``F.linear`` of rows (..., I) to (..., O), summed in float32 at least; the dtype is kept."""
    # as_strided has the compiler write the rows to memory; it would else compute them again for every output
    x_RI = x.reshape(-1, x.shape[-1]).contiguous()
    x_RI = widened(torch.as_strided(x_RI, x_RI.shape, x_RI.stride()))
    weight_OI = widened(weight_OI)
    out_RO = torch.stack([(weight_OI * x_I).sum(-1) for x_I in x_RI])
    if bias_O is not None:
        out_RO = out_RO + bias_O
    return out_RO.to(x.dtype).view(*x.shape[:-1], len(weight_OI))
