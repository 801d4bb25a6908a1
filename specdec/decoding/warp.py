"""The law tokens are drawn from: the model's, warped by temperature, top-k, top-p and so on.

Legend: B sequences, N tree nodes, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.nn.unroll import wide

COLDEST = 1e-5  # so that logits divided by it stay far from float32's end


def seen(tokens_BN: Tensor, ancestors_BNN: Tensor, history_BV: Tensor) -> Tensor:
    """Which tokens a plain decode would have behind it when it draws after each node, (B, N, V) bool.

    A draft on the path to a node counts as any other token: had the target drawn it, it would count.

    Args:
        tokens_BN: int64 target ids.
        ancestors_BNN: bool, column j is an ancestor of row i or i itself; see :func:`rules.ancestors`.
        history_BV: bool, the tokens of the prompt and of what is committed; the root may be among them.
    """
    B, N = tokens_BN.shape
    V = history_BV.shape[-1]
    # node i's own row takes its path's tokens; those off the path go to a column past the end
    column_BNN = torch.where(ancestors_BNN, tokens_BN[:, None, :], V)
    on_path_BNW = torch.zeros(B, N, V + 1, dtype=torch.bool, device=tokens_BN.device).scatter(-1, column_BNN, True)
    return on_path_BNW[..., :V] | history_BV[:, None]


@dataclass(frozen=True)
class Warp:
    """How logits become the law that tokens are drawn from; meaning and order are Hugging Face transformers'.

    1. ``repetition_penalty`` r: logits of tokens seen before are divided by r if positive, else multiplied by it;
    2. ``temperature`` T: logits are divided by it; 0 is greedy decoding, nothing after it matters then;
    3. ``top_k``: tokens less likely than the k-th are dropped, those as likely as it stay;
    4. ``top_p``: the least likely tokens are dropped as long as they together have at most 1 - top_p;
    5. ``min_p``: tokens less likely than ``min_p`` times the most likely are dropped.

    Steps 4 and 5 look at what the steps before left, renormalised. Of equally likely tokens at the edge of step 4 the
    lower ids stay; transformers leaves it to an unstable sort. vLLM has the same steps but takes min-p before top-k
    and top-p, so that with both min-p and top-p its nucleus may be smaller; and with speculative decoding it refuses
    min-p. It takes temperatures between 0 and 0.01 for 0.01.

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
        """Whether :meth:`law` wants to know which tokens came before."""
        return self.repetition_penalty != 1

    def law(self, logits_BNV: Tensor, seen_BNV: Tensor | None) -> Tensor:
        """The law of the next token at each position, the shape of the logits; float32, or float64 for float64.

        Greedy, it is one at the first of the greatest logits and zero elsewhere.

        Args:
            logits_BNV: any floating dtype, any leading dimensions.
            seen_BNV: bool, see :func:`seen`; not read unless ``needs_seen``.

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
