"""How tokens are drawn: probabilities from logits, and randomness that is a function of seed and place in the text.

There is no random state to carry, and no sequence sees another. The target's noise at a place is the same whichever
pass comes to it, and it is used once nevertheless: a pass uses only the noise of tokens that it commits. So plain
decoding and :class:`specdec.decoding.accept.OneHot` draw the same tokens from one seed. The noise of drafts and of
their acceptance belongs to one pass, that is, to the place of its root.

Legend: B sequences, N tree nodes with the root, P places, X independent numbers at one place, L levels, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.nn.backend import wide

COLDEST = 1e-5  # so that logits divided by it stay far from float32's end


@dataclass(frozen=True)
class LogitsProcessor:
    """From logits to the probabilities that tokens are drawn from; meaning and order are Hugging Face transformers'.

    1. ``temperature`` T: logits are divided by it; 0 is greedy decoding, nothing after it matters then;
    2. ``top_k``: tokens less likely than the k-th are dropped, those as likely as it stay;
    3. ``top_p``: the least likely tokens are dropped as long as they together have at most 1 - top_p;
    4. ``min_p``: tokens less likely than ``min_p`` times the most likely are dropped.

    Steps 3 and 4 look at what the steps before left, renormalized. Of equally likely tokens at the edge of step 3 the
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

    def __post_init__(self) -> None:
        most = float("inf")
        for name, good, wanted in (
            (
                "temperature",
                self.temperature == 0 or COLDEST <= self.temperature < most,
                f"0 (greedy) or >= {COLDEST}",
            ),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1], 1 for all tokens"),
            (
                "top_k",
                isinstance(self.top_k, int) and self.top_k >= 0,
                "a whole number, 0 for all tokens",
            ),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1], 0 for all tokens"),
        ):
            if not good:
                raise ValueError(f"sampling: {name} must be {wanted}, not {getattr(self, name)}")

    def probs(self, logits_BNV: Tensor) -> Tensor:
        """The next token's probabilities at each position, the shape of the logits; float32, or float64 for float64.

        Greedy, it is one at the first of the greatest logits and zero elsewhere.

        Args:
            logits_BNV: any floating dtype, any leading dimensions.
        """
        x_BNV = logits_BNV.to(wide(logits_BNV.dtype))
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
            x_BNV = x_BNV.masked_fill(
                p_BNV < self.min_p * p_BNV.amax(-1, keepdim=True), float("-inf")
            )
        return x_BNV.softmax(-1)

    def _outside_nucleus(self, x_BNV: Tensor) -> Tensor:
        order = torch.sort(x_BNV, descending=True, stable=True)
        rising_BNV = order.values.flip(-1)
        index_BNV = order.indices.flip(-1)
        drop_BNV = rising_BNV.softmax(-1).cumsum(-1) <= 1 - self.top_p
        drop_BNV[..., -1] = False  # rounding must not drop them all
        return torch.zeros_like(drop_BNV).scatter(-1, index_BNV, drop_BNV)


WORD = 0xFFFFFFFF
# Streams: independent noise for independent uses. Drafts have one for each level of a tree, from DRAFT on, so that
# every other stream, those of the diagnostics among them, has a smaller number.
TOKEN = 0
ACCEPTANCE = 1
DRAFT = 16


class AcceptanceNoise(NamedTuple):
    """All randomness in accepting, independent of the randomness in drafting."""

    uniform_BN: Tensor  # in [0, 1), one for each node
    # Exp(1), for :func:`draw`; one a level: the root's draws the token after the root
    exponential_BLV: Tensor


NO_NOISE = AcceptanceNoise(torch.empty(0), torch.empty(0))  # for a rule that reads none


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Philox 4x32-10 (https://doi.org/10.1145/2063384.2063405): four 32-bit words from four and a key of two, int64."""
    a, b, c, d = counter
    j, k = key
    for _ in range(10):
        # a product of two words fills 64 bits; the sign it may get wrong is masked away
        left = a * 0xD2511F53
        right = c * 0xCD9E8D57
        a = (right >> 32 & WORD) ^ b ^ j
        b = right & WORD
        c = (left >> 32 & WORD) ^ d ^ k
        d = left & WORD
        j = j + 0x9E3779B9 & WORD
        k = k + 0xBB67AE85 & WORD
    return a, b, c, d


def _words(seed_B: Tensor, place_BP: Tensor, stream: int, count: int) -> Tensor:
    """(B, P, count) int64, uniform in 0..2^32 - 1."""
    block_X = torch.arange(-(-count // 4), device=place_BP.device)
    place_BP1 = place_BP[..., None]
    zero = torch.zeros_like(place_BP1)
    counter = (block_X, place_BP1 & WORD, place_BP1 >> 32 & WORD, zero + stream)
    key_B11 = seed_B[:, None, None]
    words = philox(counter, (key_B11 & WORD, key_B11 >> 32 & WORD))
    return torch.stack(words, -1).flatten(2)[..., :count]


def uniform(seed_B: Tensor, place_BP: Tensor, stream: int, count: int) -> Tensor:
    """(B, P, count) float32, uniform in [0, 1), multiples of 2^-24.

    Args:
        seed_B: int64, any value.
        place_BP: int64, not negative.
    """
    return (_words(seed_B, place_BP, stream, count) >> 8).to(torch.float32) * 2**-24


def exponential(seed_B: Tensor, place_BP: Tensor, stream: int, count: int) -> Tensor:
    """(B, P, count) float32, Exp(1), positive; fine enough for probabilities down to 1e-9. See :func:`uniform`."""
    u_BPX = (_words(seed_B, place_BP, stream, count).to(torch.float32) + 0.5) * 2**-32
    return -torch.log1p(-u_BPX.clamp_max(1 - 2**-24))


def token_noise(seed_B: Tensor, place_BP: Tensor, vocab_size: int) -> Tensor:
    """Return the noise that the target draws the tokens at these places with, (B, P, V); text starts at 0."""
    return exponential(seed_B, place_BP, TOKEN, vocab_size)


def acceptance_noise(
    seed_B: Tensor, root_B: Tensor, nodes: int, levels: int, vocab_size: int
) -> AcceptanceNoise:
    """The noise of a pass whose root stands at place ``root_B``."""
    place_BL = root_B[:, None] + 1 + torch.arange(levels, device=root_B.device)
    uniform_BN = uniform(seed_B, root_B[:, None], ACCEPTANCE, nodes)[:, 0]
    return AcceptanceNoise(uniform_BN, token_noise(seed_B, place_BL, vocab_size))


def _keys(probs_V: Tensor, exponential_V: Tensor) -> Tensor:
    # the greatest p / E stands at token x with probability p(x): the Gumbel-max trick (https://arxiv.org/abs/1411.0030),
    # the greatest log p + G, without its logarithm, since -log E is Gumbel noise G
    return probs_V / exponential_V.clamp_min(torch.finfo(exponential_V.dtype).tiny)


def draw(probs_V: Tensor, exponential_V: Tensor) -> Tensor:
    """One token, int64, over the last dimension, by the Gumbel-max trick; no wait for the device.

    Args:
        probs_V: not negative, and some of them positive; they need not sum to one.
        exponential_V: independent Exp(1) noise, broadcastable to the probabilities.
    """
    return _keys(probs_V, exponential_V).argmax(-1)


def draw_distinct(probs_V: Tensor, exponential_V: Tensor, count: int) -> Tensor:
    """``count`` tokens one after another without replacement, in order, (..., count) int64.

    The greatest keys in order are sequential draws from what is left: the Gumbel-top-k trick
    (https://arxiv.org/abs/1903.06059). Once all tokens of positive probability are drawn, the rest are arbitrary tokens
    of probability zero.
    """
    return _keys(probs_V, exponential_V).topk(count).indices
