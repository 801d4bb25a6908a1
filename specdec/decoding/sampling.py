"""Drawing the target's tokens, plainly and by judging drafts, with noise that depends on seed and place alone.

Legend: B sequences, N tree nodes with the root, M tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

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

    def children(self, seed_B: Tensor, place_B: Tensor) -> Children:
        """How the children of trees are found whose roots stand at ``place_B``."""
        return Children(self.acceptance, self.draft_temperature or self.temperature or 1.0, seed_B, place_B)


class Chance(NamedTuple):
    """The chance in B texts: their noise, and the tokens that are in them."""

    sampling: Sampling
    seed_B: Tensor  # int64
    seen_BV: Tensor  # bool, the tokens of each text; V = 0 where the sampling does not ask

    @property
    def plainly_greedy(self) -> bool:
        """Whether the logits alone decide."""
        return isinstance(self.sampling.acceptance, Greedy) and not self.sampling.needs_seen

    def row(self, b: int) -> "Chance":
        """The chance of one text, in the same memory."""
        return self._replace(seed_B=self.seed_B[b : b + 1], seen_BV=self.seen_BV[b : b + 1])

    def begin(self, prompt: list[int], seed: int) -> None:
        """Another text, where B is 1."""
        self.seed_B.fill_(seed)
        if self.sampling.needs_seen:
            self.seen_BV.zero_()
            self.see(self.seed_B.new_tensor([prompt]))

    def see(self, ids_BM: Tensor) -> None:
        """Note what was committed."""
        if self.sampling.needs_seen:
            self.seen_BV.scatter_(1, ids_BM, True)

    def draw(self, logits_BV: Tensor, place_B: Tensor) -> Tensor:
        """The tokens at ``place_B``, (B,) int64."""
        if self.plainly_greedy:
            return logits_BV.argmax(-1)
        law_BV = self.sampling.law(logits_BV, self.seen_BV)
        if self.sampling.temperature == 0:
            return law_BV.argmax(-1)
        return draw(law_BV, token_races(self.seed_B, place_B[:, None], logits_BV.shape[-1])[:, 0])

    def judge(self, drafts: Drafts, ancestors_BNN: Tensor, levels: int, logits_BNV: Tensor, place_B: Tensor) -> Verdict:
        """Judge trees whose roots stand at ``place_B``.

        Args:
            levels: of the deepest path, the root's included.
        """
        sampling, rule = self.sampling, self.sampling.acceptance
        p_BNV = logits_BNV
        if not self.plainly_greedy:
            seen_BNV = seen(drafts.tokens_BN, ancestors_BNN, self.seen_BV) if sampling.needs_seen else None
            p_BNV = sampling.law(logits_BNV, seen_BNV)
        none = logits_BNV.new_empty(0)
        noise = Noise(none, none)
        if not isinstance(rule, Greedy):
            noise = acceptance_noise(self.seed_B, place_B, drafts.tokens_BN.shape[1], levels, logits_BNV.shape[-1])
        return rule.accept(drafts, p_BNV, noise)
