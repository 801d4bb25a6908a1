"""How tokens are drawn: logits processors, the draws of target and drafter, and the randomness of each text.

Legend: B sequences, N tree nodes with the root, M tokens, K frontier nodes, V vocabulary, D draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specdec.decoding.accept import RULES, Accepted, Greedy, Rule
from specdec.decoding.noise import (
    AcceptanceNoise,
    acceptance_noise,
    draft_races,
    draw,
    draw_distinct,
    likeliest,
    token_races,
)
from specdec.decoding.tree import DraftTree
from specdec.nn.backend import wide

COLDEST = 1e-5  # so that logits divided by it stay far from float32's end


@dataclass(frozen=True)
class LogitsProcessor:
    """From logits to the probabilities that tokens are drawn from; meaning and order are Hugging Face transformers'.

    1. ``repetition_penalty`` r: logits of tokens seen before are divided by r if positive, else multiplied by it;
    2. ``temperature`` T: logits are divided by it; 0 is greedy decoding, nothing after it matters then;
    3. ``top_k``: tokens less likely than the k-th are dropped, those as likely as it stay;
    4. ``top_p``: the least likely tokens are dropped as long as they together have at most 1 - top_p;
    5. ``min_p``: tokens less likely than ``min_p`` times the most likely are dropped.

    Steps 4 and 5 look at what the steps before left, renormalised. Of equally likely tokens at the edge of step 4 the
    lower ids stay; transformers leaves it to an unstable sort. vLLM takes min-p before top-k and top-p, and refuses it
    with speculative decoding; it takes temperatures between 0 and 0.01 for 0.01.

    Defaults change nothing but the temperature: they are greedy decoding.

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0  # 1: all tokens
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0  # 0: all tokens
    repetition_penalty: float = 1.0  # 1: none; above 1 discourages

    def __post_init__(self) -> None:
        most = float("inf")
        for name, good, wanted in (
            ("temperature", self.temperature == 0 or COLDEST <= self.temperature < most, f"0 (greedy) or >= {COLDEST}"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1], 1 for all tokens"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 for all tokens"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1], 0 for all tokens"),
            ("repetition_penalty", 0 < self.repetition_penalty < most, "a positive number, 1 for none"),
        ):
            if not good:
                raise ValueError(f"sampling: {name} must be {wanted}, not {getattr(self, name)}")

    @property
    def needs_seen(self) -> bool:
        """Whether :meth:`probs` wants to know which tokens came before."""
        return self.repetition_penalty != 1

    def probs(self, logits_BNV: Tensor, seen_BNV: Tensor | None) -> Tensor:
        """The next token's probabilities at each position, the shape of the logits; float32, or float64 for float64.

        Greedy, it is one at the first of the greatest logits and zero elsewhere.

        Args:
            logits_BNV: any floating dtype, any leading dimensions.
            seen_BNV: bool, see :func:`seen_tokens`; not read unless ``needs_seen``.

        Raises:
            ValueError: there is a repetition penalty, and ``seen_BNV`` is None.
        """
        x_BNV = logits_BNV.to(wide(logits_BNV.dtype))
        if self.needs_seen:
            if seen_BNV is None:
                raise ValueError("sampling: a repetition penalty must be told which tokens were seen: give seen_BNV")
            penalised_BNV = torch.where(x_BNV < 0, x_BNV * self.repetition_penalty, x_BNV / self.repetition_penalty)
            x_BNV = torch.where(seen_BNV, penalised_BNV, x_BNV)
        if self.temperature == 0:
            return torch.zeros_like(x_BNV).scatter(-1, x_BNV.argmax(-1, keepdim=True), 1.0)
        x_BNV = x_BNV / self.temperature
        if 0 < self.top_k < x_BNV.shape[-1]:
            least_BN1 = x_BNV.topk(self.top_k).values[..., -1:]
            x_BNV = x_BNV.masked_fill(x_BNV < least_BN1, float("-inf"))
        if self.top_p < 1:
            x_BNV = x_BNV.masked_fill(self._outside_nucleus(x_BNV), float("-inf"))
        if self.min_p > 0:
            p_BNV = x_BNV.softmax(-1)
            x_BNV = x_BNV.masked_fill(p_BNV < self.min_p * p_BNV.amax(-1, keepdim=True), float("-inf"))
        return x_BNV.softmax(-1)

    def _outside_nucleus(self, x_BNV: Tensor) -> Tensor:
        order = torch.sort(x_BNV, descending=True, stable=True)
        rising_BNV, index_BNV = order.values.flip(-1), order.indices.flip(-1)
        drop_BNV = rising_BNV.softmax(-1).cumsum(-1) <= 1 - self.top_p
        drop_BNV[..., -1] = False  # rounding must not drop them all
        return torch.zeros_like(drop_BNV).scatter(-1, index_BNV, drop_BNV)


@dataclass(frozen=True)
class Sampling(LogitsProcessor):
    """How tokens are drawn and drafts are judged; greedy unless a temperature is given.

    Args:
        rule: ``auto`` is greedy at temperature 0 and else ``one_hot``, which takes the drafter's most likely tokens;
            ``without_replacement`` draws the drafts.
        draft_temperature: of the drafter where drafts are drawn; None for the target's, and 1 beside a greedy target.
        seed: of all the noise. With ``one_hot`` the tokens are those that plain decoding draws from the same seed.

    Raises:
        ValueError: a value is out of its range, or the rule would change what the target says.
    """

    rule: Literal["auto", "greedy", "one_hot", "without_replacement"] = "auto"
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
        """Whether speculative decoding yields plain decoding's tokens, and not only their distribution."""
        return not self.acceptance.sampled

    def children(self, seed_B: Tensor, place_B: Tensor) -> "ChildSampling":
        """How the children of trees are found whose roots stand at ``place_B``."""
        return ChildSampling(self.acceptance, self.draft_temperature or self.temperature or 1.0, seed_B, place_B)


@dataclass(frozen=True)
class ChildSampling:
    """Finds the children of tree nodes as an acceptance rule wants them: the most likely ones, or drawn at random.

    Args:
        rule: children are drawn if it is ``sampled``; the rest is read only then.
        temperature: of the drafter.
        seed_B: int64, of each sequence's noise.
        place_B: int64, where the root stands in each text.
    """

    rule: Rule
    temperature: float = 1.0
    seed_B: Tensor = torch.zeros(1, dtype=torch.int64)  # noqa: RUF009  read only
    place_B: Tensor = torch.zeros(1, dtype=torch.int64)  # noqa: RUF009

    def find(self, logits_BKD: Tensor, width: int, level: int) -> tuple[Tensor, Tensor | None]:
        """The children of nodes at a level of the tree (the root's is 0), in order, (B, K, width) draft ids; and what
        they were drawn from, (B, K, D), if they were."""
        if not self.rule.sampled:
            return likeliest(logits_BKD, width)[1], None
        q_BKD = (logits_BKD / self.temperature).softmax(-1)
        race_BKD = draft_races(self.seed_B, self.place_B + level, *q_BKD.shape[1:])
        return draw_distinct(q_BKD, race_BKD, width), q_BKD


LIKELIEST = ChildSampling(Greedy())
NO_NOISE = AcceptanceNoise(torch.empty(0), torch.empty(0))  # for a rule that reads none


class SamplerState(NamedTuple):
    """What the draws of B texts depend on besides logits: their seeds, and the tokens that are in them."""

    sampling: Sampling
    seed_B: Tensor  # int64
    seen_BV: Tensor  # bool, the tokens of each text; V = 0 where the sampling does not ask

    def row(self, b: int) -> "SamplerState":
        """That of one text, in the same memory."""
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
        probs_BV = self.sampling.probs(logits_BV, self.seen_BV)
        if self.sampling.temperature == 0:
            return probs_BV.argmax(-1)
        return draw(probs_BV, token_races(self.seed_B, place_B[:, None], logits_BV.shape[-1])[:, 0])

    def judge(
        self, tree: DraftTree, ancestors_BNN: Tensor, levels: int, logits_BNV: Tensor, place_B: Tensor
    ) -> Accepted:
        """Judge trees whose roots stand at ``place_B``.

        Args:
            levels: of the deepest path, the root's included.
        """
        rule, needs_seen, noise = self.sampling.acceptance, self.sampling.needs_seen, NO_NOISE
        p_BNV = logits_BNV  # greedy, they have the probabilities' order
        if needs_seen or not isinstance(rule, Greedy):
            seen_BNV = seen_tokens(tree.tokens_BN, ancestors_BNN, self.seen_BV) if needs_seen else None
            p_BNV = self.sampling.probs(logits_BNV, seen_BNV)
        if not isinstance(rule, Greedy):
            noise = acceptance_noise(self.seed_B, place_B, tree.tokens_BN.shape[1], levels, logits_BNV.shape[-1])
        return rule.accept(tree, p_BNV, noise)


def seen_tokens(tokens_BN: Tensor, ancestors_BNN: Tensor, history_BV: Tensor) -> Tensor:
    """Which tokens a plain decode would have behind it when it draws after each node, (B, N, V) bool.

    A draft on the path to a node counts as any other token: had the target drawn it, it would count.

    Args:
        tokens_BN: int64 target ids.
        ancestors_BNN: bool, column j is an ancestor of row i or i itself; see :func:`specdec.decoding.tree.ancestors`.
        history_BV: bool, the tokens of the prompt and of what is committed; the root may be among them.
    """
    B, N = tokens_BN.shape
    V = history_BV.shape[-1]
    # node i's own row takes its path's tokens; those off the path go to a column past the end
    column_BNN = torch.where(ancestors_BNN, tokens_BN[:, None, :], V)
    on_path_BNW = torch.zeros(B, N, V + 1, dtype=torch.bool, device=tokens_BN.device).scatter(-1, column_BNN, True)
    return on_path_BNW[..., :V] | history_BV[:, None]
