"""Draws have the laws they should, and the noise makes them exact.

Legend: V vocabulary, M draws.
"""

import torch

from specdec.decoding.sampling import draw, draw_distinct

LAW = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25])
M = 400_000


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Pearson's chi-square; what is expected less than ten times is one bin."""
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected.clamp_min(1e-9)).sum()
    freedom = torch.tensor(len(counts) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed))


def test_a_draw_has_the_law() -> None:
    counts = torch.bincount(draw(LAW, noise(M, 5)), minlength=5)
    assert counts[2] == 0 and p_value(counts.double(), M * LAW.double()) > 1e-6
    assert torch.equal(draw(7 * LAW, noise(9, 5)), draw(LAW, noise(9, 5)))


def test_distinct_draws_are_sequential_draws_from_what_is_left() -> None:
    pairs = draw_distinct(LAW, noise(M, 5), 2)
    law = LAW.double()
    wanted = law[:, None] * law / (1 - law)[:, None]
    wanted.fill_diagonal_(0)
    counts = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).double()
    assert counts[wanted.flatten() == 0].sum() == 0
    assert p_value(counts, M * wanted.flatten()) > 1e-6
