"""Siblings drawn one after another, none twice.

Legend: B sequences, V vocabulary, D draft vocabulary, R draws.
"""

from dataclasses import dataclass

from torch import Tensor

from specdec.decoding.draws import draw_distinct
from specdec.decoding.rules.rounds import Rounds, normalised


@dataclass(frozen=True)
class WithoutReplacement(Rounds):
    """Recursive rejection (https://arxiv.org/abs/2402.14160, https://arxiv.org/abs/2402.12374): q loses each refused
    child and is renormalised.
    """

    def races(self, width: int) -> int:
        return 1

    def children(self, law_BD: Tensor, width: int, race_BRD: Tensor) -> Tensor:
        return draw_distinct(law_BD, race_BRD[:, 0], width)

    def left(self, q_BV: Tensor, x_B1: Tensor) -> Tensor:
        return normalised(q_BV.scatter(1, x_B1, 0.0))
