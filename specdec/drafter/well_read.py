"""A drafter that has read every token before: what its first layer needs of one is looked up.

Legend: B batch, T nodes, V vocabulary.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specdec.drafter.drafter import Drafter
from specdec.host import multiplies_bfloat16
from specdec.nn.versions import versions

MOST = 2**28  # bytes of a table: a matrix and a norm less in every step are not worth more memory
PIECE = 4096  # tokens read at once


class WellRead(Drafter):
    """All parts and weights of another drafter, which stays as it is and must not change. Inference only."""

    read_V: Tensor  # (V, anything)

    def __init__(self, drafter: Drafter) -> None:
        nn.Module.__init__(self)
        ids_V = torch.arange(drafter.config.vocab_size, device=drafter.lm_head.weight.device)
        read_V = torch.cat([_read(drafter, ids) for ids in ids_V.split(PIECE)])
        self.__dict__.update(drafter.__dict__)
        self._buffers = dict(self._buffers)  # the table is no buffer of the other's
        self._non_persistent_buffers_set = set(self._non_persistent_buffers_set)
        self.register_buffer("read_V", read_V, persistent=False)

    def read(self, ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
        return self.read_V[ids_BT].to(dtype)


_made: WeakKeyDictionary[Drafter, tuple[list[tuple[int, int]], WellRead]] = WeakKeyDictionary()


@torch.no_grad()
def tabled(drafter: Drafter) -> Drafter:
    """The drafter with a table of what it reads, the same one for all who ask while its weights are what they are.

    The drafter itself if that would be large, if it may read more than tokens, as other classes do, or if a CPU would
    take long to make it in 16 bits.
    """
    weight = drafter.lm_head.weight
    slow = weight.device.type == "cpu" and weight.dtype.itemsize == 2 and not multiplies_bfloat16()
    if type(drafter) is not Drafter or slow:
        return drafter
    one = _read(drafter, torch.zeros(1, dtype=torch.int64, device=weight.device))
    if drafter.config.vocab_size * one.nbytes > MOST:
        return drafter
    now = versions([*drafter.parameters(), *drafter.buffers()])
    before, made = _made.get(drafter, (None, None))
    if made is None or before != now:
        made = WellRead(drafter)
        _made[drafter] = now, made
    return made


def _read(drafter: Drafter, ids_V: Tensor) -> Tensor:
    """What the drafter reads of tokens, (V, anything)."""
    return drafter.read(ids_V[:, None], drafter.lm_head.weight.dtype)[:, 0]
