"""How the drafter's laws become draft tokens.

Legend: K frontier nodes, R children of a node, D draft vocabulary.
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
        seed: of the noise.
        place: where the root stands in the text.
    """

    rule: Rule
    temperature: float = 1.0
    seed: int = 0
    place: int = 0

    def law(self, log_probs_KD: Tensor) -> Tensor:
        """What children are found from, and what the rule must be told if they are drawn."""
        if not self.rule.sampled:
            return log_probs_KD
        return (log_probs_KD / self.temperature).softmax(-1)

    def find(self, law_KD: Tensor, width: int, level: int) -> Tensor:
        """The children of nodes at a level of the tree (the root's is 0), in order, (K, width) draft ids."""
        K, D = law_KD.shape
        races = self.rule.races(width)
        if not races:
            return self.rule.children(law_KD, width, law_KD.new_empty(K, 0, D))
        seed_1 = torch.tensor([self.seed], device=law_KD.device)
        place_1 = torch.tensor([self.place + level], device=law_KD.device)
        return self.rule.children(law_KD, width, draft_races(seed_1, place_1, K, races, D)[0])


LIKELIEST = Children(Greedy())
