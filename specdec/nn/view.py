"""Who sees whom: the one place where positions are made, and the sight that attention masks are made from.

Every forward in speculative decoding appends nodes that see the committed prefix and their own ancestors:
a prompt is a chain, a level of drafting is ``top_k`` nodes, a verification is the whole draft tree.

Legend: B batch, T new nodes, Q drafted nodes (the last T of them are new), S key slots.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from specdec.nn.cache import KVCache
from specdec.nn.sight import Pairs, Sight, Spans


class View(NamedTuple):
    """Positions, visibility and key storage of T new nodes."""

    positions_BT: Tensor  # int64, RoPE positions
    sight: Sight  # which keys each node may attend to
    key_positions_BS: Tensor  # int64, position of every key column; what sliding windows measure from
    slots_BT: Tensor | None = None  # int64, where the nodes' keys are written; None without a static cache
    cache: KVCache | None = None  # None: attend to the nodes' own keys only
    asked_BM: Tensor | None = None  # int64, the nodes whose last state is wanted; None for all

    @property
    def mask_B1TS(self) -> Tensor:  # noqa: N802  shapes are part of names
        """bool, True where the node may attend to the key; as many numbers as there are pairs."""
        return self.sight.mask_B1TS

    @property
    def columns(self) -> int:
        """S."""
        return self.key_positions_BS.shape[-1]

    @classmethod
    def packed(cls, documents_BT: Tensor, cache: KVCache | None = None) -> Self:
        """Causal attention inside each document, uncached; positions restart with every document.

        Args:
            documents_BT: int64 document number of each token. Runs of equal numbers are one document; padding
                carries ``-1`` and forms documents of its own, so that no row of the mask is empty.
            cache: where the unroll keeps its keys; see :class:`specdec.nn.cache.UnrollCache`.
        """
        T = documents_BT.shape[1]
        order_T = torch.arange(T, device=documents_BT.device)
        starts_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        starts_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        first_BT = torch.where(starts_BT, order_T, 0).cummax(dim=1).values
        positions_BT = order_T - first_BT
        return cls(positions_BT, Spans(first_BT, order_T.expand_as(first_BT), T), positions_BT, None, cache)

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
            capacity: S, how many of the cache's slots to look at: all, or the first that hold every node in sight and
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
        key_positions_BS = torch.where(is_node_BS, positions_BQ.take_along_dim(node_BS, dim=1), columns_S)
        positions_BT, slots_BT = (x.expand(len(mask_BTS), new) for x in (positions_BQ[:, drafted - new :], slots_BT))
        return cls(positions_BT, Pairs(mask_BTS[:, None]), key_positions_BS, slots_BT, cache)

    @classmethod
    def chain(cls, prefix: Tensor | int, length: int, capacity: int, cache: KVCache | None = None) -> Self:
        """``length`` nodes in a row after a committed prefix in a static cache, on the CPU or the prefix's device."""
        device = prefix.device if isinstance(prefix, Tensor) else torch.device("cpu")
        slots_BT = torch.as_tensor(prefix, device=device).reshape(-1, 1) + torch.arange(length, device=device)
        key_positions_BS = torch.arange(capacity, device=device).expand(len(slots_BT), capacity)
        sight = Spans(torch.zeros_like(slots_BT), slots_BT, capacity)
        return cls(slots_BT, sight, key_positions_BS, slots_BT, cache)

    def wanted(self, x: Tensor, dim: int = 1) -> Tensor:
        """What belongs to the nodes asked for, of ``x`` with the batch first and T nodes along ``dim``."""
        if self.asked_BM is None:
            return x
        shape = [1] * x.ndim
        shape[0], shape[dim] = self.asked_BM.shape
        return x.take_along_dim(self.asked_BM.view(shape), dim)

    @property
    def wanted_sight(self) -> Sight:
        """That of the nodes asked for."""
        return self.sight if self.asked_BM is None else self.sight.of(self.asked_BM)

    def of(self, nodes_BM: Tensor) -> Self:
        """Only these of the nodes, int64 (B, M), without slots; each stands where it stood and sees what it saw."""
        return self._replace(
            positions_BT=self.positions_BT.gather(1, nodes_BM),
            sight=self.sight.of(nodes_BM),
            slots_BT=None,
            asked_BM=None,
        )

    def within(self, window: int) -> Self:
        """The same nodes, each seeing of its keys only those at the last ``window`` positions, its own included.

        This is Mistral's convention (https://arxiv.org/abs/2310.06825): a node at position p sees keys at positions
        above ``p - window``. Nothing comes into sight that was not in it.
        """
        return self._replace(sight=self.sight.within(self.positions_BT, self.key_positions_BS, window))
