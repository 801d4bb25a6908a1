"""Siblings drawn independently of each other.

Legend: B sequences, V vocabulary, D draft vocabulary, R draws.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.decoding.draws import draw_repeatedly
from specdec.decoding.rules.rounds import Rounds


@dataclass(frozen=True)
class WithReplacement(Rounds):
    """SpecInfer's multi-round rule (https://arxiv.org/abs/2305.09781): all children come from the same q.

    Siblings may be equal; the second of two is never accepted, and costs a node.
    """

    def races(self, width: int) -> int:
        return width

    def children(self, law_BD: Tensor, width: int, race_BRD: Tensor) -> Tensor:
        return draw_repeatedly(law_BD, race_BRD[:, :width])

    def left(self, q_BV: Tensor, x_B1: Tensor) -> Tensor:
        return q_BV
