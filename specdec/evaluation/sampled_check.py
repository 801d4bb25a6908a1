"""Sampled continuations counted against the target's exact law.

Legend: B rows, T tokens, V vocabulary.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from specdec.decoding import Growth, Request, Sampling, SpeculativeDecoder, check_length
from specdec.drafter import Drafter
from specdec.evaluation.greedy_check import logits_after
from specdec.target import Target

LEAST_EXPECTED = 5.0  # draws in a cell of the chi-square; rarer continuations are counted together
TOGETHER = 32
TOP_K, LENGTH = 3, 3  # tokens that the law leaves at each place; tokens of a continuation
LOOKED_AT = 16  # prompts, for the one after which most can be told
SUSPECT = 1e-6  # a p-value below it fails


@dataclass(frozen=True)
class SampledCheck:
    """Sampled continuations counted against the target's exact law of them, by Pearson's chi-square."""

    growth: str
    rule: str
    sampling: dict[str, Any]  # all of it, with the top-k of the check
    runs: int
    vocabulary: int  # tokens that the law leaves at each place: ``TOP_K``
    length: int  # tokens of a continuation
    continuations: int  # that the law allows
    chi_square: float
    degrees: int
    p_value: float
    impossible: int  # draws that the target's law excludes
    accepted: int  # drafts that were taken
    passes: int

    @property
    def fault(self) -> str | None:
        """Why the draws cannot be the target's, or are too few to tell."""
        if self.impossible:
            return f"{self.impossible} of {self.runs} draws are such as the target never makes"
        if self.continuations > 1 and not self.degrees:
            return (
                f"{self.runs} draws are too few to tell any two of {self.continuations} continuations apart: draw more"
            )
        return f"p-value {self.p_value:.1e}" if self.p_value <= SUSPECT else None


def check_sampled(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    sampling: Sampling,
    prompt: list[int],
    runs: int,
) -> SampledCheck:
    """Draw ``runs`` continuations from seeds of their own, under a top-k so small that all of them can be listed."""
    sampling = replace(sampling, top_k=TOP_K)
    decoder = SpeculativeDecoder(target, drafter, growth, sampling, batch=min(runs, TOGETHER))
    requests = [Request(prompt, LENGTH, sampling.seed + run) for run in range(runs)]
    made = [one for _, one in decoder.generate_all(requests)]
    counts = Counter(tuple(one.ids) for one in made)
    law = _continuations(target, sampling, prompt)
    cells = _cells([(counts[path], p * runs) for path, p in law.items()])
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    halves = torch.tensor([max(1, len(cells) - 1) / 2, chi_square / 2], dtype=torch.float64)
    return SampledCheck(
        growth=growth.name,
        rule=type(sampling.acceptance).__name__,
        sampling=asdict(sampling),
        runs=runs,
        vocabulary=TOP_K,
        length=LENGTH,
        continuations=len(law),
        chi_square=chi_square,
        degrees=len(cells) - 1,
        p_value=float(torch.special.gammaincc(halves[0], halves[1])),
        impossible=runs - sum(counts[path] for path in law),
        accepted=sum(sum(one.accepted) for one in made),
        passes=sum(len(one.accepted) for one in made),
    )


def most_open(target: Target, sampling: Sampling, prompts: Sequence[list[int]], runs: int, nodes: int) -> int:
    """Of the first :data:`LOOKED_AT` prompts with room for it, the number of the one whose draws tell most.

    Args:
        nodes: of a growth, as of :func:`~specdec.decoding.check_length`.

    Raises:
        ValueError: none has room.
    """
    sampling = replace(sampling, top_k=TOP_K)
    cells = dict[int, int]()
    for number, prompt in enumerate(prompts):
        with contextlib.suppress(ValueError):
            check_length(target, prompt, LENGTH, nodes)
            law = _continuations(target, sampling, prompt)
            cells[number] = len(_cells([(0, p * runs) for p in law.values()]))
        if len(cells) == LOOKED_AT:
            break
    if not cells:
        raise ValueError(f"certify: no prompt leaves room for {LENGTH} more tokens in the target's positions")
    return max(cells, key=lambda number: cells[number])


def _cells(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Pairs of draws and how many were expected; those that expect less than ``LEAST_EXPECTED`` are one together."""
    cells = [(0, 0.0)]
    for seen, wanted in sorted(pairs, key=lambda pair: pair[1]):
        if cells[-1][1] >= LEAST_EXPECTED and wanted >= LEAST_EXPECTED:
            cells.append((0, 0.0))
        cells[-1] = cells[-1][0] + seen, cells[-1][1] + wanted
    return cells


@torch.inference_mode()
def _continuations(target: Target, sampling: Sampling, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Every continuation that the warped target can say, with its probability."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        paths = list(found)
        ids_BT = torch.tensor([[*prompt, *path] for path in paths])
        seen_BV = None
        if sampling.needs_seen:
            seen_BV = torch.zeros(len(paths), target.vocab_size, dtype=torch.bool).scatter(1, ids_BT, True)
        law_BV = sampling.law(logits_after(target, ids_BT).cpu(), seen_BV).double()
        longer: dict[tuple[int, ...], float] = {}
        for row, path in enumerate(paths):
            for token in law_BV[row].nonzero().flatten().tolist():
                longer[(*path, token)] = found[path] * float(law_BV[row, token])
        found = longer
    return found
