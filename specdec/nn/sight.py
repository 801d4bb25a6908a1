"""Who sees which keys, said without a mask: the mask is made where someone needs it, whole or tile by tile.

Legend: B batch, T nodes, S key columns, M some of the nodes.
"""

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor


class Sight(Protocol):
    """Which of S keys each of T nodes sees."""

    @property
    def mask_B1TS(self) -> Tensor:  # noqa: N802  shapes are part of names
        """bool, True where the node sees the key."""
        ...

    @property
    def columns(self) -> int:
        """S."""
        ...

    def part(self, rows: slice, keys: slice) -> Tensor:
        """This part of the mask, (B, 1, rows, keys)."""
        ...

    def sees(self, b: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Whether node t of sequence b sees key s; indices of any shapes that broadcast."""
        ...

    def spans(self) -> "Spans":
        """For each node the shortest run of keys that holds all it sees."""
        ...

    def of(self, nodes_BM: Tensor) -> Self:
        """That of some of the nodes, int64 (B, M)."""
        ...

    def cut(self, columns: int) -> Self:
        """The first ``columns`` keys alone."""
        ...

    def within(self, positions_BT: Tensor, key_positions_BS: Tensor, window: int) -> Self:
        """Without the keys that stand ``window`` positions or more before the node."""
        ...


class Spans(NamedTuple):
    """A run of keys for each node, at consecutive positions: of a document, or of a committed prefix.

    Two numbers a node, however many the keys.
    """

    first_BT: Tensor  # int64, the first key seen
    last_BT: Tensor  # int64, the last one; one before the first or less where the node sees none
    columns: int  # S

    @property
    def mask_B1TS(self) -> Tensor:  # noqa: N802  shapes are part of names
        """See :class:`Sight`."""
        return self.part(slice(None), slice(0, self.columns))

    def part(self, rows: slice, keys: slice) -> Tensor:
        """See :class:`Sight`; ``keys`` from a number to a number."""
        keys_K = torch.arange(keys.start, keys.stop, device=self.first_BT.device)
        first_BR1, last_BR1 = self.first_BT[:, rows, None], self.last_BT[:, rows, None]
        return ((keys_K >= first_BR1) & (keys_K <= last_BR1))[:, None]

    def row(self, b: int) -> Self:
        """That of one sequence."""
        return self._replace(first_BT=self.first_BT[b : b + 1], last_BT=self.last_BT[b : b + 1])

    def sees(self, b: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """See :class:`Sight`."""
        return (s >= self.first_BT[b, t]) & (s <= self.last_BT[b, t])

    def spans(self) -> Self:
        """Itself."""
        return self

    def of(self, nodes_BM: Tensor) -> Self:
        """See :class:`Sight`."""
        return self._replace(first_BT=self.first_BT.gather(1, nodes_BM), last_BT=self.last_BT.gather(1, nodes_BM))

    def cut(self, columns: int) -> Self:
        """See :class:`Sight`."""
        return self._replace(last_BT=self.last_BT.clamp(max=columns - 1), columns=columns)

    def within(self, positions_BT: Tensor, key_positions_BS: Tensor, window: int) -> Self:
        """See :class:`Sight`."""
        last_BT = self.last_BT.clamp(0, self.columns - 1)
        # no take_along_dim, with which torch compiles for a single number of keys
        last_position_BT = key_positions_BS.expand(len(last_BT), -1).gather(1, last_BT)
        nearest_BT = self.last_BT - last_position_BT + positions_BT - window + 1
        return self._replace(first_BT=torch.maximum(self.first_BT, nearest_BT))


class Pairs(NamedTuple):
    """Any sight at all, pair by pair: that of a draft tree."""

    mask_B1TS: Tensor  # bool, True where the node sees the key

    @property
    def columns(self) -> int:
        """See :class:`Sight`."""
        return self.mask_B1TS.shape[-1]

    def part(self, rows: slice, keys: slice) -> Tensor:
        """See :class:`Sight`."""
        return self.mask_B1TS[:, :, rows, keys]

    def sees(self, b: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """See :class:`Sight`."""
        return self.mask_B1TS[b, 0, t, s]

    def spans(self) -> Spans:
        """See :class:`Sight`."""
        seen_BTS = self.mask_B1TS[:, 0].to(torch.uint8)
        S = seen_BTS.shape[-1]
        last_BT = S - 1 - seen_BTS.flip(-1).argmax(-1)
        return Spans(seen_BTS.argmax(-1), torch.where(self.mask_B1TS.any(-1)[:, 0], last_BT, -1), S)

    def of(self, nodes_BM: Tensor) -> Self:
        """See :class:`Sight`."""
        return self._replace(mask_B1TS=self.mask_B1TS.take_along_dim(nodes_BM[:, None, :, None], dim=2))

    def cut(self, columns: int) -> Self:
        """See :class:`Sight`."""
        return self._replace(mask_B1TS=self.mask_B1TS[..., :columns])

    def within(self, positions_BT: Tensor, key_positions_BS: Tensor, window: int) -> Self:
        """See :class:`Sight`."""
        distance_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
        return self._replace(mask_B1TS=self.mask_B1TS & (distance_BTS < window)[:, None])
