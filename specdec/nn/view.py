"""Who sees whom: positions, and the visibility that attention masks are made from. Both are made here and nowhere else.

Every forward in speculative decoding appends nodes that see the committed prefix and their own ancestors:
a prompt is a chain, a level of drafting is ``top_k`` nodes, a verification is the whole draft tree. Runs of keys are
kept as two numbers a node; a mask is made where someone needs it, whole or tile by tile.

Legend: B batch, T new nodes, M some of them, Q drafted nodes (the last T of them are new), S key slots, h query heads,
g key heads, d head width.
"""

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor


class Spans(NamedTuple):
    """Each node sees a run of keys at consecutive positions: those of a document, or of a committed prefix; and with
    attention sinks a second run before it."""

    first_BT: Tensor  # int64, the first key seen
    last_BT: Tensor  # int64, the last one; one before the first or less where the node sees none
    columns: int  # S
    sinks: "Spans | None" = None

    @property
    def mask_B1TS(self) -> Tensor:  # noqa: N802  shapes are part of names
        """bool, True where the node sees the key."""
        columns_S = torch.arange(self.columns, device=self.first_BT.device)
        return self.part(slice(None), columns_S, slice(None))

    def part(self, rows: slice, keys: slice | Tensor, sequences: slice) -> Tensor:
        """This part of the mask, (sequences, 1, rows, keys); ``keys`` from a number to a number, or int64 (K,)."""
        keys_K = (
            torch.arange(keys.start, keys.stop, device=self.first_BT.device)
            if isinstance(keys, slice)
            else keys
        )
        first_BR1 = self.first_BT[sequences, rows, None]
        last_BR1 = self.last_BT[sequences, rows, None]
        seen_B1RK = ((keys_K >= first_BR1) & (keys_K <= last_BR1))[:, None]
        return (
            seen_B1RK
            if self.sinks is None
            else seen_B1RK | self.sinks.part(rows, keys_K, sequences)
        )

    def of(self, nodes_BM: Tensor) -> Self:
        """Return the visibility of some of the nodes, int64 (B, M)."""
        first_BM = self.first_BT.gather(1, nodes_BM)
        last_BM = self.last_BT.gather(1, nodes_BM)
        return self._replace(
            first_BT=first_BM, last_BT=last_BM, sinks=self.sinks and self.sinks.of(nodes_BM)
        )

    def cut(self, columns: int) -> Self:
        """The first ``columns`` keys alone."""
        last_BT = self.last_BT.clamp(max=columns - 1)
        sinks = self.sinks and self.sinks.cut(columns)
        return self._replace(last_BT=last_BT, columns=columns, sinks=sinks)

    def within(
        self, positions_BT: Tensor, key_positions_BS: Tensor, window: int, sinks: int = 0
    ) -> Self:
        """Without the keys that stand ``window`` positions or more before the node, at ``sinks`` or a later one."""
        inside = (0, self.columns - 1)
        key_positions_BS = key_positions_BS.expand(len(self.last_BT), -1)
        # no take_along_dim, with which torch compiles for a single number of keys
        last_position_BT = key_positions_BS.gather(1, self.last_BT.clamp(*inside))
        nearest_BT = self.last_BT - last_position_BT + positions_BT - window + 1
        narrow = self._replace(first_BT=torch.maximum(self.first_BT, nearest_BT))
        if not sinks:
            return narrow
        first_position_BT = key_positions_BS.gather(1, self.first_BT.clamp(*inside))
        end_BT = torch.minimum(self.first_BT - first_position_BT + sinks, narrow.first_BT)
        return narrow._replace(
            sinks=Spans(self.first_BT, torch.minimum(end_BT - 1, self.last_BT), self.columns)
        )


class Pairs(NamedTuple):
    """Any visibility at all, pair by pair: that of a draft tree. Its methods are those of :class:`Spans`."""

    mask_B1TS: Tensor  # bool, True where the node sees the key
    columns: int  # S

    def of(self, nodes_BM: Tensor) -> Self:
        return self._replace(
            mask_B1TS=self.mask_B1TS.take_along_dim(nodes_BM[:, None, :, None], dim=2)
        )

    def cut(self, columns: int) -> Self:
        return self._replace(mask_B1TS=self.mask_B1TS[..., :columns], columns=columns)

    def within(
        self, positions_BT: Tensor, key_positions_BS: Tensor, window: int, sinks: int = 0
    ) -> Self:
        near_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :] < window
        if sinks:
            near_BTS = near_BTS | (key_positions_BS < sinks)[:, None]
        return self._replace(mask_B1TS=self.mask_B1TS & near_BTS[:, None])


Visibility = Spans | Pairs
"""Which of S keys each of T nodes sees."""


class KVCache(Protocol):
    """Stores the keys of new nodes and lets their queries attend to all the keys they may see."""

    def attend(
        self,
        layer: int,
        q_BhTd: Tensor,
        k_BgTd: Tensor,
        v_BgTd: Tensor,
        visible: Visibility,
        slots_BT: Tensor | None,
    ) -> Tensor:
        """Attention output of the new nodes, shape (B, h, T, d)."""
        ...


class View(NamedTuple):
    """Positions, visibility and key storage of T new nodes."""

    positions_BT: Tensor  # int64, RoPE positions
    visibility: Visibility  # which keys each node may attend to
    # int64, position of every key column; what sliding windows measure from
    key_positions_BS: Tensor
    # int64, where the nodes' keys are written; None without a static cache
    slots_BT: Tensor | None = None
    cache: KVCache | None = None  # None: attend to the nodes' own keys only
    wanted_BM: Tensor | None = None  # int64, the nodes whose last state is wanted; None for all

    @classmethod
    def packed(cls, documents_BT: Tensor) -> Self:
        """Causal attention inside each document, uncached; positions restart with every document.

        Args:
            documents_BT: int64 document number of each token. Runs of equal numbers are one document; padding
                carries ``-1`` and forms separate documents, so that no row of the mask is empty.
        """
        T = documents_BT.shape[1]
        order_T = torch.arange(T, device=documents_BT.device)
        starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        first_BT = torch.where(starts_BT, order_T, 0).cummax(dim=1).values
        positions_BT = order_T - first_BT
        return cls(positions_BT, Spans(first_BT, order_T.expand_as(first_BT), T), positions_BT)

    @classmethod
    def append(
        cls,
        prefix: Tensor | int,
        seen_BTQ: Tensor,
        depth_BQ: Tensor,
        capacity: int,
        cache: KVCache | None = None,
    ) -> Self:
        """Nodes appended after the committed prefixes in a static cache.

        Args:
            prefix: number of committed slots, of every sequence (B,) or of all; slot ``i < prefix`` holds position
                ``i``. A tensor keeps a compiled graph free of recompilations.
            seen_BTQ: bool, which of the Q nodes drafted since the prefix each new node sees, itself included. The
                new nodes are the last T columns; column ``j`` lives in slot ``prefix + j``. As for the next, a first
                dimension of one, or none, stands for all sequences.
            depth_BQ: int64, depth of each drafted node; a node of depth d stands at position ``prefix + d``.
            capacity: S, how many of the cache's slots to look at: all, or the first that hold every visible node and
                the new ones.
        """
        new, drafted = seen_BTQ.shape[-2:]
        device = seen_BTQ.device
        first_B1 = torch.as_tensor(prefix, device=device).reshape(-1, 1)
        columns_S = torch.arange(capacity, device=device)
        node_BS = (columns_S - first_B1).clamp(0, drafted - 1)
        is_node_BS = (columns_S >= first_B1) & (columns_S < first_B1 + drafted)
        seen_BTS = seen_BTQ.view(-1, new, drafted).take_along_dim(node_BS[:, None], dim=2)
        mask_BTS = (columns_S < first_B1)[:, None] | (is_node_BS[:, None] & seen_BTS)
        slots_BT = first_B1 + torch.arange(drafted - new, drafted, device=device)
        positions_BQ = first_B1 + depth_BQ
        key_positions_BS = torch.where(
            is_node_BS, positions_BQ.take_along_dim(node_BS, dim=1), columns_S
        )
        positions_BT, slots_BT = (
            x.expand(len(mask_BTS), new) for x in (positions_BQ[:, drafted - new :], slots_BT)
        )
        return cls(
            positions_BT, Pairs(mask_BTS[:, None], capacity), key_positions_BS, slots_BT, cache
        )

    @classmethod
    def chain(
        cls, prefix: Tensor | int, length: int, capacity: int, cache: KVCache | None = None
    ) -> Self:
        """``length`` nodes in a row after a committed prefix in a static cache, on the CPU or the prefix's device."""
        device = prefix.device if isinstance(prefix, Tensor) else torch.device("cpu")
        slots_BT = torch.as_tensor(prefix, device=device).reshape(-1, 1) + torch.arange(
            length, device=device
        )
        key_positions_BS = torch.arange(capacity, device=device).expand(len(slots_BT), capacity)
        visible = Spans(torch.zeros_like(slots_BT), slots_BT, capacity)
        return cls(slots_BT, visible, key_positions_BS, slots_BT, cache)

    def of(self, nodes_BM: Tensor) -> Self:
        """Only these of the nodes, int64 (B, M), without slots; each stands where it stood and sees what it saw."""
        return self._replace(
            positions_BT=self.positions_BT.gather(1, nodes_BM),
            visibility=self.visibility.of(nodes_BM),
            slots_BT=None,
            wanted_BM=None,
        )

    def within(self, window: int, sinks: int = 0) -> Self:
        """The same nodes, each seeing of its keys only those at the last ``window`` positions, its own included, and at
        the text's first ``sinks`` (https://arxiv.org/abs/2309.17453), which keep their positions.

        This is Mistral's convention (https://arxiv.org/abs/2310.06825): a node at position p sees keys at positions
        above ``p - window``. Nothing becomes visible that was not.
        """
        seen = self.visibility.within(self.positions_BT, self.key_positions_BS, window, sinks)
        return self._replace(visibility=seen)
