"""Drawing the target's tokens, plainly and by judging drafts, with noise that depends on seed and place alone.

Legend: B sequences, here one, N tree nodes with the root, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdec.decoding.children import Children
from specdec.decoding.draws import draw
from specdec.decoding.noise import acceptance_noise, token_races
from specdec.decoding.rules import Drafts, Greedy, Noise, OneHot, Rule, Verdict, WithoutReplacement, WithReplacement
from specdec.decoding.warp import Warp, seen

RULES: dict[str, Rule] = {
    "greedy": Greedy(),
    "one_hot": OneHot(),
    "with_replacement": WithReplacement(),
    "without_replacement": WithoutReplacement(),
}


@dataclass(frozen=True)
class Sampling(Warp):
    """How tokens are drawn and drafts are judged; greedy unless a temperature is given.

    Args:
        rule: ``auto`` is greedy at temperature 0 and else ``one_hot``, which takes the drafter's most likely tokens;
            the other two draw the drafts: a chain is judged alike by both.
        draft_temperature: of the drafter where drafts are drawn; None for the target's, and 1 beside a greedy target.
        seed: of all the noise. With ``one_hot`` the tokens are those that plain decoding draws from the same seed.

    Raises:
        ValueError: a value is out of its range, or the rule would change what the target says.
    """

    rule: Literal["auto", "greedy", "one_hot", "with_replacement", "without_replacement"] = "auto"
    draft_temperature: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule == "greedy" and self.temperature > 0:
            raise ValueError(
                f"sampling: the rule greedy is not lossless at temperature {self.temperature}: use auto or one_hot"
            )
        if self.draft_temperature is not None and not 0 < self.draft_temperature < float("inf"):
            raise ValueError(f"sampling: draft_temperature must be above 0, not {self.draft_temperature}")

    @property
    def acceptance(self) -> Rule:
        """The rule that judges drafts."""
        name = self.rule if self.rule != "auto" else "greedy" if self.temperature == 0 else "one_hot"
        return RULES[name]

    @property
    def repeatable(self) -> bool:
        """Whether speculative decoding yields plain decoding's tokens, and not only their law."""
        return not self.acceptance.sampled

    def children(self, seed: int, place: int) -> Children:
        """How the children of a tree are found whose root stands at ``place``."""
        return Children(self.acceptance, self.draft_temperature or self.temperature or 1.0, seed, place)


class Chance:
    """The chance in one text: its noise, and the tokens that are in it.

    Args:
        seed: of this text.
        vocab_size: V.
    """

    def __init__(self, sampling: Sampling, seed: int, vocab_size: int, device: torch.device) -> None:
        self.sampling, self.vocab_size = sampling, vocab_size
        self.seed_1 = torch.tensor([seed], device=device)
        self.history_1V = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)

    def see(self, ids: Sequence[int] | Tensor) -> None:
        """Note the prompt, or what was committed."""
        if self.sampling.needs_seen:
            self.history_1V[0, torch.as_tensor(ids, device=self.history_1V.device)] = True

    def draw(self, logits_1V: Tensor, place: int) -> Tensor:
        """The token at ``place``, (1,) int64."""
        if self._plainly_greedy:
            return logits_1V.argmax(-1)
        law_1V = self.sampling.law(logits_1V, self.history_1V)
        if self.sampling.temperature == 0:
            return law_1V.argmax(-1)
        return draw(law_1V, token_races(self.seed_1, self._at(place)[:, None], self.vocab_size)[:, 0])

    def judge(self, drafts: Drafts, ancestors_NN: Tensor, levels: int, logits_NV: Tensor, place: int) -> Verdict:
        """Judge a tree whose root stands at ``place``.

        Args:
            levels: of the deepest path, the root's included.
        """
        sampling, rule = self.sampling, self.sampling.acceptance
        if self._plainly_greedy:
            p_1NV = logits_NV[None]
        else:
            seen_1NV = None
            if sampling.needs_seen:
                seen_1NV = seen(drafts.tokens_BN, ancestors_NN[None], self.history_1V)
            p_1NV = sampling.law(logits_NV[None], seen_1NV)
        none = logits_NV.new_empty(0)
        noise = Noise(none, none)
        if not isinstance(rule, Greedy):
            nodes = drafts.tokens_BN.shape[1]
            noise = acceptance_noise(self.seed_1, self._at(place), nodes, levels, self.vocab_size)
        return rule.accept(drafts, p_1NV, noise)

    @property
    def _plainly_greedy(self) -> bool:
        return isinstance(self.sampling.acceptance, Greedy) and not self.sampling.needs_seen

    def _at(self, place: int) -> Tensor:
        return torch.tensor([place], device=self.seed_1.device)
