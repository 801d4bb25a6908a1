"""The floor of a step: nothing but the matrix products that no way of computing it can leave out.

Forward, backward by the input and backward by the weight of what is trained. What depends on tokens alone (the
embedding's half of queries, keys and values) is done once for all unroll steps; a step runs the slots that it or a
later one trains, and the first gives all slots their keys; attention meets tiles of 256 rows with the keys they may
see; only supervised rows reach the head; and the target's whole head is multiplied once for every position that is
learnt from. Operands stand in memory before, results are overwritten; nothing else is computed.
"""

import contextlib

import torch
from torch import Tensor

from benchmarks.training_step import recipe
from benchmarks.training_step.worker import Job, System
from specdec.nn.products import fast_products

TILE = 256


class Products:
    """A list of products to do, and how many operations they are; results of one shape share one place."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.todo, self.operations = dtype, list[tuple[Tensor, Tensor, Tensor]](), 0
        self._drawn: dict[tuple[int, ...], Tensor] = {}
        self._results: dict[tuple[int, ...], Tensor] = {}

    def tensor(self, *shape: int) -> Tensor:
        """An operand."""
        if shape not in self._drawn:
            self._drawn[shape] = torch.randn(*shape).to(self.dtype)
        return self._drawn[shape]

    def add(self, a: Tensor, b: Tensor) -> None:
        """One product, of matrices or of batches of them."""
        shape = (*a.shape[:-1], b.shape[-1])
        if shape not in self._results:
            self._results[shape] = torch.empty(*shape, dtype=self.dtype)
        self.todo.append((a, b, self._results[shape]))
        self.operations += 2 * a.numel() * b.shape[-1]

    def linear(self, rows: int, width_in: int, width_out: int, by_input: bool = True, trained: bool = True) -> None:
        """A linear layer, forward and backward."""
        x, weight, grad = self.tensor(rows, width_in), self.tensor(width_out, width_in), self.tensor(rows, width_out)
        self.add(x, weight.T)
        if by_input:
            self.add(grad, weight)
        if trained:
            self.add(grad.T, x)

    def attention(self, size: recipe.Workload, slots: Tensor) -> None:
        """Scores and sums of some slots, ascending, over the causal block, forward and backward."""
        g, r, d = size.kv_heads, size.heads // size.kv_heads, size.head_dim
        for tile in slots.split(TILE):
            end = int(tile[-1]) + 1
            rows, keys = self.tensor(g, r * len(tile), d), self.tensor(g, end, d)
            weights = self.tensor(g, r * len(tile), end)
            for _ in range(2):  # scores, and gradient by the weights
                self.add(rows, keys.mT)
            for _ in range(2):  # output, and gradient by the queries
                self.add(weights, keys)
            for _ in range(2):  # gradients by keys and by values
                self.add(weights.mT, rows)

    def __call__(self) -> None:
        """Do them all."""
        for a, b, out in self.todo:
            torch.matmul(a, b, out=out)


def products(size: recipe.Workload, mask: str, dtype: torch.dtype) -> Products:
    """The products of one step."""
    T, H, qkv = size.tokens, size.hidden, (size.heads + 2 * size.kv_heads) * size.head_dim
    positions, out = recipe.taught(size, mask), Products(dtype)
    out.linear(T, 3 * H, H, by_input=False)
    out.linear(T, H, qkv)  # of the embeddings; the norm before it is trained
    out.linear(len(positions), H, size.vocab, by_input=False, trained=False)  # the target's
    for k in range(size.unroll):
        slots = needed(size, positions, k)
        rows = len(slots)
        out.linear(rows if k else T, H, qkv)
        out.attention(size, slots)
        out.linear(rows, size.heads * size.head_dim, H)
        for _ in range(2):
            out.linear(rows, H, size.feed_forward)
        out.linear(rows, size.feed_forward, H)
        out.linear(int((positions >= 1 + k).sum()), H, size.draft_vocab)
    return out


def needed(size: recipe.Workload, positions: Tensor, step: int) -> Tensor:
    """Slots that this unroll step or a later one trains, ascending."""
    later = [positions[positions >= 1 + k] - 1 - k for k in range(step, size.unroll)]
    return torch.cat(later).unique()


UNTIL_THE_END = contextlib.ExitStack()


def build(job: Job) -> System:
    """No options."""
    name = UNTIL_THE_END.enter_context(fast_products())
    todo = products(recipe.WORKLOADS[job.workload], job.mask, getattr(torch, job.dtype))
    step = torch.no_grad()(todo.__call__)
    return System(step, list, 0, ("specdec-lightning",), name, {"operations": todo.operations})
