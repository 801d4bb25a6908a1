"""AcceptanceNoise that is a function of seed and place.

Legend: B sequences, N nodes, L levels, V vocabulary.
"""

import math

import torch

from specdec.decoding.accept import DraftTree, OneHot
from specdec.decoding.sampling import (
    ACCEPTANCE,
    TOKEN,
    acceptance_noise,
    draw,
    exponential,
    philox,
    token_noise,
    uniform,
)

V = 50


def test_philox_gives_the_known_answers() -> None:
    """Of Random123, the reference implementation."""
    for counter, key, answer in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        words = philox(tuple(torch.tensor(x) for x in counter), tuple(torch.tensor(x) for x in key))
        assert tuple(int(word) for word in words) == answer


def test_noise_is_uniform_and_exponential() -> None:
    seed_B, place_BP = torch.tensor([5, -7]), torch.arange(2000).expand(2, -1)
    coin = uniform(seed_B, place_BP, ACCEPTANCE, 101).flatten().double()
    time = exponential(seed_B, place_BP, TOKEN, 101).flatten().double()
    for found in (coin, 1 - torch.exp(-time)):
        assert found.min() >= 0 and coin.max() < 1 and time.min() > 0 and time.isfinite().all()
        bins = torch.histc(found, 1000, 0, 1)
        each = len(found) / 1000
        statistic = ((bins - each) ** 2 / each).sum()
        assert torch.special.gammaincc(torch.tensor(499.5).double(), statistic / 2) > 1e-6


def test_every_seed_place_stream_and_lane_has_noise_of_its_own() -> None:
    seed_B = torch.tensor([0, 1, 2**32, -1, 2**40 + 1])
    place_BP = torch.tensor([0, 1, 2, 70_000, 2**33]).expand(5, -1)
    everything = torch.cat(
        [exponential(seed_B, place_BP, stream, 40).flatten() for stream in range(3)]
    )
    assert len(everything.unique()) > 0.999 * len(everything)
    halves = everything.view(2, -1)
    correlation = torch.corrcoef(halves)[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(halves.shape[1])


def test_one_hot_passes_draw_the_very_tokens_of_a_plain_decode() -> None:
    """Whatever is drafted: here a chain that often is what the target will draw, so that passes differ in length."""
    generator = torch.Generator().manual_seed(0)
    p_VV = (2 * torch.randn(V, V, generator=generator)).softmax(-1)  # the law after a token
    seed, length = torch.tensor([11]), 60
    plain = [0]
    while len(plain) < length:
        place = torch.tensor([[len(plain)]])
        plain.append(int(draw(p_VV[plain[-1]], token_noise(seed, place, V)[0, 0])))
    text, passes = [0], 0
    while len(text) < length:
        hopes = (plain + [0] * 4)[len(text) : len(text) + 3]
        wrong = torch.rand(3, generator=generator) < 0.3
        tokens = torch.tensor([[text[-1], *torch.where(wrong, 1, torch.tensor(hopes)).tolist()]])
        noise = acceptance_noise(seed, torch.tensor([len(text) - 1]), 4, 4, V)
        path_BN, next_B = OneHot().accept(
            DraftTree(tokens, torch.tensor([[0, 0, 1, 2]])), p_VV[tokens], noise
        )
        text += [*tokens[0, 1:][path_BN[0, 1:]].tolist(), int(next_B)]
        passes += 1
    assert text[:length] == plain and passes < 0.6 * length
