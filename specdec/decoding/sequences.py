"""What is known of sequences that are decoded side by side, on the device.

Legend: B sequences, P path nodes at most, N aux layers, H hidden, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.decoding.sampling import Chance, Sampling
from specdec.target import Target, TargetCache


class Sequences(NamedTuple):
    """B sequences, all updated in place.

    A sequence that is not live takes part in the arithmetic, for the shapes' sake, and in nothing else.
    """

    cache: TargetCache
    live_B: Tensor  # bool
    length_B: Tensor  # int64, tokens in the target's cache
    root_B: Tensor  # int64, the last committed token, which is in no cache yet
    fresh_BP: Tensor  # int64, the tokens that the last pass committed, the root last; what follows is padding
    count_B: Tensor  # int64, how many they are; 0 if not live
    aux_BPNH: Tensor  # the target's states before each of them
    path_BP: (
        Tensor  # int64, the nodes of the tree that they come after: where the target's keys of them lie until tidied
    )
    chance: Chance

    @classmethod
    def empty(
        cls, target: Target, sampling: Sampling, capacity: int, batch: int = 1, path: int = 1, layers: int = 0
    ) -> "Sequences":
        """None of them live.

        Args:
            capacity: of the target's cache.
            path: P.
            layers: N.
        """
        device = target.device
        zero_B = torch.zeros(batch, dtype=torch.int64, device=device)
        seen = target.vocab_size if sampling.needs_seen else 0
        return cls(
            cache=target.new_cache(capacity, batch),
            live_B=zero_B.bool(),
            length_B=zero_B,
            root_B=zero_B.clone(),
            fresh_BP=zero_B[:, None].repeat(1, path),
            count_B=zero_B.clone(),
            aux_BPNH=torch.zeros(batch, path, layers, target.hidden_size, dtype=target.dtype, device=device),
            path_BP=zero_B[:, None].repeat(1, path),
            chance=Chance(sampling, zero_B.clone(), torch.zeros(batch, seen, dtype=torch.bool, device=device)),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that is updated in place."""
        own = [x for x in self if isinstance(x, Tensor)]
        return [*own, *self.cache.tensors, self.chance.seed_B, self.chance.seen_BV]

    def begin(self, b: int, length: int, root_1: Tensor, aux_1NH: Tensor) -> None:
        """Sequence ``b`` has been prefilled with ``length`` tokens, the last of them with these states."""
        self.live_B[b], self.length_B[b], self.count_B[b] = True, length, 1
        self.root_B[b : b + 1] = self.fresh_BP[b, :1] = root_1
        self.aux_BPNH[b, :1] = aux_1NH

    def end(self, b: int) -> None:
        """Sequence ``b`` is done; its slots are free."""
        self.live_B[b], self.length_B[b], self.count_B[b] = False, 0, 0

    def tidy(self) -> None:
        """Move the target's keys of the paths just advanced by to where the next pass looks for them."""
        self.cache.commit(self.length_B - self.count_B, self.path_BP)

    def advance(self, nodes_BP: Tensor, count_B: Tensor, fresh_BP: Tensor, aux_BTNH: Tensor) -> None:
        """A pass has committed the nodes of its paths.

        Args:
            nodes_BP: int64, the path's nodes, the root first; any node where the path has ended.
            count_B: int64, how many of them are meant.
            fresh_BP: the tokens after each; the last that counts is the next root.
            aux_BTNH: states of all nodes.
        """
        self.path_BP.copy_(nodes_BP)
        self.chance.see(fresh_BP)
        self.length_B.add_(count_B)
        self.count_B.copy_(count_B)
        self.fresh_BP.copy_(fresh_BP)
        self.root_B.copy_(fresh_BP.take_along_dim((count_B - 1).clamp_min(0)[:, None], 1)[:, 0])
        self.aux_BPNH.copy_(aux_BTNH.take_along_dim(nodes_BP[..., None, None], 1))
