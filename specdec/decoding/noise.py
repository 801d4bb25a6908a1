"""Randomness as a function of the seed and the place in the text: no state to carry, and no sequence sees another.

The noise at a place is the same whichever pass comes to it, and it is used once nevertheless: a pass uses only the
noise of tokens that it commits. So plain decoding and :class:`specdec.decoding.accept.OneHot` draw the same tokens from
one seed.

Legend: B sequences, P places, X lanes (independent numbers at one place), N nodes, L levels, V vocabulary, K parents.
"""

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
TOKEN, COIN, DRAFT = range(3)  # streams: independent noise for independent uses


class AcceptanceNoise(NamedTuple):
    """All randomness in accepting, independent of the randomness in drafting."""

    coin_BN: Tensor  # uniform in [0, 1), one for each node
    race_BLV: Tensor  # Exp(1): argmax(p / race) draws from p; one a level: the root's draws the token after the root


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10 (https://doi.org/10.1145/2063384.2063405): four 32-bit words from four and a key of two, int64."""
    a, b, c, d = counter
    j, k = key
    for _ in range(10):
        # a product of two words fills 64 bits; the sign it may get wrong is masked away
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32 & WORD) ^ b ^ j, right & WORD, (left >> 32 & WORD) ^ d ^ k, left & WORD
        j, k = j + 0x9E3779B9 & WORD, k + 0xBB67AE85 & WORD
    return a, b, c, d


def _words(seed_B: Tensor, place_BP: Tensor, stream: int, lanes: int) -> Tensor:
    """(B, P, lanes) int64, uniform in 0..2^32 - 1."""
    block_X = torch.arange(-(-lanes // 4), device=place_BP.device)
    place_BP1 = place_BP[..., None]
    zero = torch.zeros_like(place_BP1)
    counter = (block_X, place_BP1 & WORD, place_BP1 >> 32 & WORD, zero + stream)
    key_B11 = seed_B[:, None, None]
    words = philox(counter, (key_B11 & WORD, key_B11 >> 32 & WORD))
    return torch.stack(words, -1).flatten(2)[..., :lanes]


def coins(seed_B: Tensor, place_BP: Tensor, stream: int, lanes: int) -> Tensor:
    """(B, P, lanes) float32, uniform in [0, 1), multiples of 2^-24.

    Args:
        seed_B: int64, any value.
        place_BP: int64, not negative.
    """
    return (_words(seed_B, place_BP, stream, lanes) >> 8).to(torch.float32) * 2**-24


def races(seed_B: Tensor, place_BP: Tensor, stream: int, lanes: int) -> Tensor:
    """(B, P, lanes) float32, Exp(1), positive; fine enough for probabilities down to 1e-9. See :func:`coins`."""
    u_BPX = (_words(seed_B, place_BP, stream, lanes).to(torch.float32) + 0.5) * 2**-32
    return -torch.log1p(-u_BPX.clamp_max(1 - 2**-24))


def token_races(seed_B: Tensor, place_BP: Tensor, vocab_size: int) -> Tensor:
    """What the target draws the tokens at these places with, (B, P, V); places count from the start of the text."""
    return races(seed_B, place_BP, TOKEN, vocab_size)


def draft_races(seed_B: Tensor, place_B: Tensor, parents: int, vocab_size: int) -> Tensor:
    """What a drafter draws the children of K parents at one place with, (B, K, vocab_size)."""
    return races(seed_B, place_B[:, None], DRAFT, parents * vocab_size).view(len(seed_B), parents, vocab_size)


def acceptance_noise(seed_B: Tensor, root_B: Tensor, nodes: int, levels: int, vocab_size: int) -> AcceptanceNoise:
    """The noise of a pass whose root stands at place ``root_B``."""
    place_BL = root_B[:, None] + 1 + torch.arange(levels, device=root_B.device)
    coin_BN = coins(seed_B, root_B[:, None], COIN, nodes)[:, 0]
    return AcceptanceNoise(coin_BN, token_races(seed_B, place_BL, vocab_size))


def _arrivals(probs_V: Tensor, race_V: Tensor) -> Tensor:
    """Tokens race, each at the pace of its probability: greater is earlier, zero never arrives."""
    return probs_V / race_V.clamp_min(torch.finfo(race_V.dtype).tiny)


def draw(probs_V: Tensor, race_V: Tensor) -> Tensor:
    """One token, int64, over the last dimension: an exponential race, also known as Gumbel-max; no wait for the device.

    Args:
        probs_V: not negative, and some of them positive; they need not sum to one.
        race_V: independent Exp(1) noise, broadcastable to the probabilities.
    """
    return _arrivals(probs_V, race_V).argmax(-1)


def draw_distinct(probs_V: Tensor, race_V: Tensor, count: int) -> Tensor:
    """``count`` tokens one after another without replacement, in order, (..., count) int64.

    The order of arrival in one race is that of sequential draws from what is left (https://arxiv.org/abs/1903.06059).
    Once all tokens of positive probability are drawn, the rest are arbitrary tokens of probability zero.
    """
    return _arrivals(probs_V, race_V).topk(count).indices


def likeliest(scores_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest scores in order, and their tokens, (..., count) each; of one alone, the first of its equals."""
    values, tokens = scores_V.max(-1, keepdim=True) if count == 1 else scores_V.topk(count)
    return values, tokens
