"""A drafter that has read every token before: what its first layer needs of one is looked up.

Legend: V vocabulary, W width of what is read of a token.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafter.drafter import Drafter

MOST = 2**28  # bytes of a table: a matrix and a norm less in every step are not worth more memory


class WellRead(Drafter):
    """All parts and weights of another drafter, which stays as it is and must not change. Inference only.

    Args:
        drafter: whose :meth:`Drafter.read` depends on the token alone.
    """

    read_VW: Tensor

    def __init__(self, drafter: Drafter) -> None:
        nn.Module.__init__(self)
        table_VW = _table(drafter)
        self.__dict__.update(drafter.__dict__)
        self._buffers = dict(self._buffers)  # the table is no buffer of the other's
        self._non_persistent_buffers_set = set(self._non_persistent_buffers_set)
        self.register_buffer("read_VW", table_VW, persistent=False)

    def read(self, ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids_BT, self.read_VW).to(dtype)


@torch.no_grad()
def tabled(drafter: Drafter) -> Drafter:
    """The drafter with a table of what it reads; itself if that would be large, or if it may read more than tokens, as
    other classes do.
    """
    if type(drafter) is not Drafter:
        return drafter
    config, weight = drafter.config, drafter.embed_tokens.weight
    first = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    width = drafter.read(first, weight.dtype).shape[-1]
    return drafter if config.vocab_size * width * weight.element_size() > MOST else WellRead(drafter)


def _table(drafter: Drafter) -> Tensor:
    weight = drafter.embed_tokens.weight
    return drafter.read(torch.arange(len(weight), device=weight.device)[None], weight.dtype)[0]
