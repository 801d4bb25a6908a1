"""A statement that speculative decoding says what the target says: greedy tokens compared, sampled ones counted.

Legend: B rows, T tokens, V vocabulary.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from specdec.decoding import Growth, PlainDecoder, Request, Sampling, SpeculativeDecoder
from specdec.decoding.decoder import GREEDY
from specdec.drafter import Drafter
from specdec.files import sha256, write_json
from specdec.nn.view import View
from specdec.target import Target

log = logging.getLogger(__name__)

# of the greatest logit's size, or of 1 if that is smaller: what rounding in another order may amount to
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LEAST_EXPECTED = 5.0  # draws in a cell of the chi-square; rarer continuations are counted together
TOGETHER = 32
SUSPECT = 1e-6  # a p-value below it fails


class Difference(NamedTuple):
    """A token that differs from plain decoding's, and how close the choice was."""

    prompt: int
    position: int  # among the new tokens
    token: int
    plain_token: int
    gap: float  # how far the less likely of the two lies below the greatest logit after plain decoding's text
    allowed: float

    @classmethod
    @torch.inference_mode()
    def of(cls, target: Target, prompt: int, ids: list[int], position: int, token: int, plain_token: int) -> Self:
        """Look at the logits after ``ids``; a token that is missing, -1, is as far off as any."""
        logits_V = _logits(target, torch.tensor([ids]))[0].double()
        best = float(logits_V.max())
        chosen = [float(logits_V[one] if one >= 0 else logits_V.min()) for one in (token, plain_token)]
        allowed = TOLERANCE[target.dtype] * max(1.0, abs(best))
        return cls(prompt, position, token, plain_token, best - min(chosen), allowed)

    @property
    def near_tie(self) -> bool:
        """Whether rounding may have decided."""
        return self.gap <= self.allowed


@dataclass(frozen=True)
class GreedyCheck:
    """Greedy tokens compared with plain decoding's.

    Where a token differs, decoding goes on from plain decoding's text, so that every token is compared.
    """

    growth: str
    tokens: int
    near_ties: tuple[Difference, ...]  # within the tolerance: rounding decided
    wrong: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing but rounding made a difference."""
        return not self.wrong


@dataclass(frozen=True)
class SampledCheck:
    """Sampled continuations counted against the target's exact law of them, by Pearson's chi-square."""

    growth: str
    rule: str
    sampling: dict[str, Any]  # all of it, with the top-k of the check
    runs: int
    vocabulary: int  # tokens that the law leaves at each place
    length: int  # tokens of a continuation
    chi_square: float
    degrees: int
    p_value: float
    impossible: int  # draws that the target's law excludes

    @property
    def holds(self) -> bool:
        """Whether the draws could be the target's."""
        return self.impossible == 0 and self.p_value > SUSPECT


def check_greedy(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    batch: int = 1,
    compiled: bool = False,
) -> GreedyCheck:
    """Decode every prompt plainly and speculatively, without an end token, and compare all tokens.

    Plain decoding is the eager one; ``batch`` and ``compiled`` are speculative decoding's.
    """
    asked = [Request(prompt, max_new_tokens) for prompt in prompts]
    plain = {number: made.ids for number, made in PlainDecoder(target, batch=batch).generate_all(asked)}
    decoder = SpeculativeDecoder(target, drafter, growth, batch=batch, compiled=compiled)
    ties, wrong = list[Difference](), list[Difference]()
    left = [(number, 0) for number in range(len(prompts))]  # and how many tokens of it are compared
    while left:
        rest = [Request([*prompts[n], *plain[n][:done]], max_new_tokens - done) for n, done in left]
        made = dict(decoder.generate_all(rest))
        further = []
        for index, (number, done) in enumerate(left):
            pairs = zip(made[index].ids, plain[number][done:], strict=True)
            agreed = next((i for i, (token, wanted) in enumerate(pairs) if token != wanted), None)
            if agreed is None:
                continue
            at = done + agreed
            text = [*prompts[number], *plain[number][:at]]
            found = Difference.of(target, number, text, at, made[index].ids[agreed], plain[number][at])
            (ties if found.near_tie else wrong).append(found)
            if at + 1 < max_new_tokens:
                further.append((number, at + 1))
        left = further
    return GreedyCheck(growth.name, len(prompts) * max_new_tokens, tuple(ties), tuple(wrong))


def check_sampled(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    sampling: Sampling,
    prompt: list[int],
    runs: int,
    vocabulary: int = 3,
    length: int = 3,
) -> SampledCheck:
    """Draw ``runs`` continuations from seeds of their own, under a top-k so small that all of them can be listed."""
    sampling = replace(sampling, top_k=vocabulary, temperature=sampling.temperature or 1.0)
    decoder = SpeculativeDecoder(target, drafter, growth, sampling, batch=min(runs, TOGETHER))
    requests = [Request(prompt, length, sampling.seed + run) for run in range(runs)]
    counts = Counter(tuple(made.ids) for _, made in decoder.generate_all(requests))
    law = _continuations(target, sampling, prompt, length)
    cells = [(counts[path], p * runs) for path, p in law.items() if p * runs >= LEAST_EXPECTED]
    rare = sum(counts[path] for path in law) - sum(seen for seen, _ in cells), runs - sum(wanted for _, wanted in cells)
    if rare[1] >= LEAST_EXPECTED:
        cells.append(rare)
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    degrees = max(1, len(cells) - 1)
    halves = torch.tensor([degrees / 2, chi_square / 2], dtype=torch.float64)
    return SampledCheck(
        growth=growth.name,
        rule=type(sampling.acceptance).__name__,
        sampling=asdict(sampling),
        runs=runs,
        vocabulary=vocabulary,
        length=length,
        chi_square=chi_square,
        degrees=degrees,
        p_value=float(torch.special.gammaincc(halves[0], halves[1])),
        impossible=runs - sum(counts[path] for path in law),
    )


@torch.inference_mode()
def _continuations(target: Target, sampling: Sampling, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """Every continuation that the warped target can say, with its probability."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        paths = list(found)
        ids_BT = torch.tensor([[*prompt, *path] for path in paths])
        seen_BV = None
        if sampling.needs_seen:
            seen_BV = torch.zeros(len(paths), target.vocab_size, dtype=torch.bool).scatter(1, ids_BT, True)
        law_BV = sampling.law(_logits(target, ids_BT).cpu(), seen_BV).double()
        longer: dict[tuple[int, ...], float] = {}
        for row, path in enumerate(paths):
            for token in law_BV[row].nonzero().flatten().tolist():
                longer[(*path, token)] = found[path] * float(law_BV[row, token])
        found = longer
    return found


def _logits(target: Target, ids_BT: Tensor) -> Tensor:
    """The target's logits after the last token of each row, (B, V)."""
    ids_BT = ids_BT.to(target.device)
    view = View.packed(torch.zeros_like(ids_BT))
    return target.logits(target.forward(ids_BT, view, ()).final_BTH[:, -1:])[:, 0]


def certify(
    target: Target,
    drafter: Drafter,
    growths: Sequence[Growth],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    runs: int,
    sampling: Sampling = GREEDY,
    batch: int = 1,
    compiled: bool = False,
    on_check: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Check every growth greedily on all prompts, and sampled, by every rule that can judge it, after the first one.

    The draws are made by the eager decoder, :data:`TOGETHER` sequences side by side.

    Args:
        sampling: how draws are made but for the rule and the top-k; at temperature 1 if it is greedy.

    Returns:
        The statement, JSON-ready: ``holds``, and what every check found.
    """
    checks: list[GreedyCheck | SampledCheck] = []
    for growth in growths:
        on_check(f"{growth.name}, greedy")
        checks.append(check_greedy(target, drafter, growth, prompts, max_new_tokens, batch=batch, compiled=compiled))
        for rule in ("one_hot", "with_replacement", "without_replacement"):
            drawn = replace(sampling, temperature=sampling.temperature or 1.0, rule=rule)
            try:
                growth.check_rule(drawn.acceptance)
            except ValueError:
                continue  # the rule is not for this growth, and decoding would refuse it
            on_check(f"{growth.name}, {rule}")
            checks.append(check_sampled(target, drafter, growth, drawn, prompts[0], runs))
    return {
        "statement": "what speculative decoding says is what the target says",
        "holds": all(check.holds for check in checks),
        "checks": [{"check": type(check).__name__, "holds": check.holds, **_plain(check)} for check in checks],
        "tolerance": {str(dtype).removeprefix("torch."): value for dtype, value in TOLERANCE.items()},
        "dtype": str(target.dtype).removeprefix("torch."),
        "greedy": {"compiled": compiled, "batch_size": batch},
        "sampled": {"compiled": False, "batch_size": TOGETHER},
        "seed": sampling.seed,
    }


def write_certificate(path: Path, statement: dict[str, Any], drafter_directory: Path, context: dict[str, Any]) -> None:
    """Write the statement with what it is about: hashes of target and drafter, settings, versions; or not at all."""
    weights = {file.name: sha256(file) for file in sorted(drafter_directory.glob("*.safetensors"))}
    about = {name: context[name] for name in ("target", "settings", "provenance")}
    write_json(path, {**statement, "drafter_sha256": weights, **about})
    if not statement["holds"]:
        log.error("the certificate does not hold: see %s", path)


def _plain(check: GreedyCheck | SampledCheck) -> dict[str, Any]:
    found = asdict(check)
    if isinstance(check, GreedyCheck):
        found |= {name: [d._asdict() for d in getattr(check, name)] for name in ("near_ties", "wrong")}
    return found
