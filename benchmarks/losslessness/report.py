"""The dated Markdown file and the JSON beside it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.losslessness.greedy import Case
from benchmarks.losslessness.sampled import SUSPECT, Count, D, V
from benchmarks.report import conditions
from specdec.evaluation.greedy_check import MOST_TIES, TOLERANCE

LEAST_ACCEPTED = 0.2  # accepted drafts per pass; with fewer a case tests nothing

NOTES = f"""\
- **Targets**: tiny random ones of four families, 256 positions, whose head makes every token's successor likely and
  whose layers lead astray; and the embedded target. The same weights, rounded to each dtype.
- **Drafters** are fitted by specdec's own objective for seconds, in float32: EAGLE-3.1 (llama, gemma3, embedded),
  EAGLE-3 with a cut vocabulary (qwen3) and EAGLE-1 (mixtral). They are right often and wrong often, see *acceptance*.
- **Prompts** have from one token up to within 6 or 8 of the last position that the target has. Every prompt is decoded
  twice: to its limit, and with an end token. That is chosen so that a chain accepts it in the midst of a run; *ended
  inside* counts the runs in which it was a draft with further accepted drafts behind it.
- **Batch 4** decodes prompts of all these lengths side by side; plain decoding decodes each alone.
- **Compiled** decoding is compared with the same eager plain decoding as eager is.
- **Near-tie**: a token that differs from plain decoding's, where the plain logits of both lie within
  {TOLERANCE[torch.float32]:g} (float32), {TOLERANCE[torch.float64]:g} (float64) or {TOLERANCE[torch.bfloat16]:g}
  (bfloat16, which has eight binary digits) of the greatest logit's size below it, or of 1 if that is smaller. More than
  {MOST_TIES:.0%} of a case's tokens are a fault. *Wrong*: any other that differs. Behind either, decoding goes on from
  plain decoding's text, so that every token is compared. In 16 bits a mixture of experts has wrong ones: where two
  experts nearly tie, rounding routes a token otherwise, and its logits are others altogether.
- **Draws**: texts of two tokens after a root, each from a seed of its own, by the rounds of decoding with its own
  growths, rules and noise; random laws over {V} tokens stand for the target and, over {D} of them, for the drafter.
  p-values are of Pearson's chi-square over all {V * V} pairs, and over the first tokens; a failure is one below
  {SUSPECT:g}.
"""


def faults(
    asked: Mapping[str, int], targets: Sequence[str], cases: Sequence[Case], counts: Sequence[Count]
) -> list[str]:
    """What is wrong, in words; nothing if all is well.

    Args:
        asked: tokens to compare in each dtype, at least.
        targets: names of those to compare in each.
    """
    return [*_faults(asked, targets, cases, counts)]


def _faults(
    asked: Mapping[str, int], targets: Sequence[str], cases: Sequence[Case], counts: Sequence[Count]
) -> Iterator[str]:
    for dtype, least in asked.items():
        for target in targets:
            if not any((case.target, case.dtype) == (target, dtype) for case in cases):
                yield f"{dtype}: {target} was not come to"
        if (tokens := sum(case.tokens for case in cases if case.dtype == dtype)) < least:
            yield f"{dtype}: {tokens} tokens compared, asked were {least}"
    for case in cases:
        name = f"{case.target}, {case.dtype}, {case.growth}, batch {case.batch}, {case.how}"
        if case.wrong:
            yield f"{name}: {len(case.wrong)} wrong tokens, the first {case.wrong[0]}"
        if len(case.near_ties) > MOST_TIES * case.tokens:
            yield f"{name}: {len(case.near_ties)} near-ties in {case.tokens} tokens: rounding is not that rough"
        if case.dtype == "float64" and case.near_ties:
            yield f"{name}: {len(case.near_ties)} tokens differ in float64"
        if case.accepted < LEAST_ACCEPTED * case.passes:
            yield f"{name}: acceptance length {case.acceptance_length:.2f}: nothing is tested"
        if not case.ended_inside:
            yield f"{name}: no end token fell inside an accepted run: that is not tested"
    for count in counts:
        if not count.holds:
            yield f"{count.rule}, {count.growth}, seed {count.seed}: p {min(count.p_pairs, count.p_first):.1e}"


def to_json(about: dict[str, Any], cases: Sequence[Case], counts: Sequence[Count]) -> dict[str, Any]:
    """All figures."""
    return {
        "run": about,
        "faults": faults(about["asked"], about["targets"], cases, counts),
        "greedy": [case.to_json() for case in cases],
        "sampled": [count.to_json() for count in counts],
    }


def markdown(about: dict[str, Any], cases: Sequence[Case], counts: Sequence[Count]) -> str:
    """The dated file."""
    parts = [
        f"# Speculative decoding beside plain decoding, {about['date'][:10]}\n",
        *conditions(about, about["versions"], f"; {about['seconds']} s in all"),
        "\n## Result\n",
    ]
    for dtype, how in dict.fromkeys((case.dtype, case.how) for case in cases):
        some = [case for case in cases if (case.dtype, case.how) == (dtype, how)]
        tokens, wrong, ties = sum(c.tokens for c in some), sum(len(c.wrong) for c in some), [*_ties(some)]
        lengths = [case.acceptance_length for case in some]
        gaps = f" (gaps up to {max(ties):.1e})" if ties else ""
        parts.append(
            f"- {dtype}, {how}: {tokens:,} greedy tokens compared, **{wrong} wrong**, {len(ties)} near-ties{gaps}; "
            f"{sum(c.accepted for c in some):,} accepted drafts, acceptance length {min(lengths):.2f} to "
            f"{max(lengths):.2f}; {sum(c.ended_inside for c in some)} texts ended inside an accepted run."
        )
    if counts:
        worst = min(min(count.p_pairs, count.p_first) for count in counts)
        parts.append(
            f"- {sum(count.draws for count in counts):,} texts drawn, {counts[0].draws:,} for each rule, growth and "
            f"seed: the least of {2 * len(counts)} p-values is **{worst:.2g}**."
        )
    parts += [f"- **Fault**: {fault}." for fault in faults(about["asked"], about["targets"], cases, counts)]
    parts += ["\n## How to read it\n", NOTES, "## Greedy\n"]
    columns = "target|dtype|growth|batch|decoded|prompts|tokens|wrong|near-ties|acceptance|ended inside"
    parts.append(f"| {columns.replace('|', ' | ')} |")
    parts.append("|---|---|---|---:|---|---:|---:|---:|---:|---:|---:|")
    parts += [
        f"| {c.target} | {c.dtype} | {c.growth} | {c.batch} | {c.how} | {c.prompts} | {c.tokens:,} | {len(c.wrong)} "
        f"| {len(c.near_ties)} | {c.acceptance_length:.2f} | {c.ended_inside} |"
        for c in cases
    ]
    if counts:
        parts += ["\n## Sampled\n", "| rule | growth | draws | seeds | worst p, pairs | worst p, first | accepted |"]
        parts.append("|---|---|---:|---:|---:|---:|---:|")
    for rule, growth in dict.fromkeys((count.rule, count.growth) for count in counts):
        some_counts = [count for count in counts if (count.rule, count.growth) == (rule, growth)]
        pairs, first = min(c.p_pairs for c in some_counts), min(c.p_first for c in some_counts)
        accepted = sum(c.accepted for c in some_counts) / len(some_counts)
        draws = sum(c.draws for c in some_counts)
        parts.append(
            f"| {rule} | {growth} | {draws:,} | {len(some_counts)} | {pairs:.2g} | {first:.2g} | {accepted:.2f} |"
        )
    return "\n".join(parts) + "\n"


def _ties(cases: Sequence[Case]) -> Iterator[float]:
    for case in cases:
        yield from (tie.gap for tie in case.near_ties)
