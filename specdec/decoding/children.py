"""How the drafter's laws become draft tokens.

Legend: B sequences, K frontier nodes, R children of a node, D draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.noise import draft_races
from specdec.decoding.rules import Greedy, Rule


@dataclass(frozen=True)
class Children:
    """Finds the children of nodes as an acceptance rule wants them: the most likely ones, or drawn at random.

    Args:
        rule: whose :meth:`Rule.children` decides.
        temperature: of the drafter, where children are drawn.
        seed_B: int64, of each sequence's noise; read only where children are drawn, as is the next.
        place_B: int64, where the root stands in each text.
    """

    rule: Rule
    temperature: float = 1.0
    seed_B: Tensor = torch.zeros(1, dtype=torch.int64)  # noqa: RUF009  read only
    place_B: Tensor = torch.zeros(1, dtype=torch.int64)  # noqa: RUF009

    def law(self, logits_BKD: Tensor) -> Tensor:
        """What children are found from, and what the rule must be told if they are drawn."""
        if not self.rule.sampled:
            return logits_BKD  # in the law's order
        return (logits_BKD / self.temperature).softmax(-1)

    def find(self, law_BKD: Tensor, width: int, level: int) -> Tensor:
        """The children of nodes at a level of the tree (the root's is 0), in order, (B, K, width) draft ids."""
        B, K, D = law_BKD.shape
        races = self.rule.races(width)
        race_BKRD = law_BKD.new_empty(B, K, 0, D)
        if races:
            race_BKRD = draft_races(self.seed_B, self.place_B + level, K, races, D)
        found = self.rule.children(law_BKD.flatten(0, 1), width, race_BKRD.flatten(0, 1))
        return found.unflatten(0, (B, K))


LIKELIEST = Children(Greedy())
