"""``specdec compare``: whether two evaluations differ by more than chance, prompt by prompt.

Legend: P prompts; R relabellings, in which A and B are swapped on some of the prompts.
"""

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.data.regions import REGIONS
from specdec.evaluation.metrics import (
    METRICS,
    Answer,
    answer_warnings,
    committed,
    looping,
    per_prompt,
    read_answers,
    target_passes,
)
from specdec.evaluation.summary import in_region
from specdec.report.statistics import HOW, POSITIVE, Array, Interval, interval, less, over, ratio
from specdec.report.tables import with_interval
from specdec.target.identity import TOKENIZER, target_difference
from specdec.utils.reading import check_sums, read_json
from specdec.utils.text import how_many

log = logging.getLogger(__name__)
# of the permutation test: drawn where there are more of them
RELABELLINGS = 10_000
SEED = 0
LEAST_PROMPTS = 2  # for an interval
B_THEN_A = [2, 3, 0, 1]  # columns of both's sums
# where or how fast, not what was decoded: neither acceptance nor the prompts hang on them
MAY_DIFFER = {
    "source", "prompts", "limit", "layouts", "shape", "plain", "baselines", "certify", "batch_size", "compile",
    "other_target", "intervals", "torch_threads", "suite",
}  # fmt: skip
# what another verifier may have otherwise
OF_TARGET = {"revision", "dtype", "trust_remote_code", "device_map", "adapter"}


class SavedEvaluation(NamedTuple):
    """Settings and answers of an evaluation, as its directory has them."""

    name: str
    target: dict[str, Any]  # its identity
    drafter: str  # its weights' hash
    settings: dict[str, Any]
    answers: dict[str, list[Answer]]  # by the draft shape's name


def compare(a: Path, b: Path) -> None:
    """Compare the acceptance lengths of two evaluations, prompt by prompt, for every draft shape that both have.

    Tells their difference and ratio with intervals, and the p-value of a paired permutation test; the difference in
    each region of the answers too (tool calls, thoughts, code) where there are several. Of two folders of suites every
    suite and temperature that both have is compared. Targets may differ where the drafter is one: this shows what it
    is worth to a fine-tune or a quantized model.

    Example: specdec compare runs/one runs/other

    Args:
        a: directory of an evaluation, or of those of suites.
        b: another of the same prompts, and of the same target or the same drafter.

    Raises:
        ValueError: an evaluation cannot be read, or the two are not of the same prompts and settings, or share neither
            target nor drafter.
    """
    texts = [f"A  {a}\nB  {b}"]
    parts_a = evaluations_in(a)
    parts_b = evaluations_in(b)
    shared = [name for name in parts_a if name in parts_b]
    if not shared:
        has = " and ".join(
            ", ".join(filter(None, parts)) or "none in folders" for parts in (parts_a, parts_b)
        )
        raise ValueError(f"{a} and {b} share no suite ({has})")
    if left_out := sorted(parts_a.keys() ^ parts_b.keys()):
        log.warning("in one of the two alone, and not compared: %s", ", ".join(left_out))
    for part in shared:
        evaluation_a = read_evaluation(parts_a[part])
        evaluation_b = read_evaluation(parts_b[part])
        texts += _compared(evaluation_a, evaluation_b, f"{part}, " if part else "")
    sys.stdout.write(
        "\n\n".join([*texts, f"Brackets: {HOW}; p: A and B swapped prompt by prompt."]) + "\n"
    )


def evaluations_in(directory: Path) -> dict[str, Path]:
    """The evaluations of suites in a folder by their names; of one evaluation that alone, under an empty name."""
    if (directory / METRICS).exists():
        return {"": directory}
    by_suite = {path.parent.name: path.parent for path in sorted(directory.glob(f"*/{METRICS}"))}
    return by_suite or {"": directory}  # whoever reads it says what is missing


def _compared(a: SavedEvaluation, b: SavedEvaluation, title: str) -> list[str]:
    """Return a text for every draft shape that both have."""
    check_comparable(a, b)
    shapes = [name for name in a.answers if name in b.answers]
    if not shapes:
        has = " and ".join(", ".join(run.answers) for run in (a, b))
        raise ValueError(f"{a.name} and {b.name} share no draft shape ({has})")
    return [_comparison_text(f"{title}{name}", a.answers[name], b.answers[name]) for name in shapes]


def _comparison_text(title: str, a: Sequence[Answer], b: Sequence[Answer]) -> str:
    """Say how the answers of two runs with one draft shape differ, with warnings of those that loop."""
    row = compare_answers(a, b)
    lines = [
        f"{title}, {how_many(row.prompts, 'prompt')}",
        f"acceptance length  A {row.a:.3f}, B {row.b:.3f}",
        f"B - A              {with_interval(*row.difference, '{:+.3f}'.format)}, p = {row.p_value:.2g}",
        f"B / A              {with_interval(*row.ratio, '{:.3f}'.format)}",
    ]
    for letter, answers, mean in (("A", a, row.a), ("B", b, row.b)):
        lines += answer_warnings(letter, {"acceptance_length": {"mean": mean}, **looping(answers)})
    return "\n  ".join([*lines, *_region_lines(a, b)])


def _region_lines(a: Sequence[Answer], b: Sequence[Answer]) -> list[str]:
    """Return a line for every region of the answers with passes on two prompts or more; none if all is text."""
    if not any(answer.regions for answer in [*a, *b]):
        return []
    lines = ["by region in which a pass begins; exploratory, each p as if it were the only one"]
    for region in REGIONS:
        of_a = [in_region(answer, region) for answer in a]
        of_b = [in_region(answer, region) for answer in b]
        sums_P4 = _shared_sums(of_a, of_b)
        if len(sums_P4) < LEAST_PROMPTS:
            continue
        row = _compare_sums(sums_P4)
        difference = with_interval(*row.difference, "{:+.3f}".format)
        lines.append(
            f"  {region + ',':<10} {how_many(row.prompts, 'prompt')}: A {row.a:.3f}, B {row.b:.3f}, "
            f"B - A {difference}, p = {row.p_value:.2g}"
        )
    return lines


class Comparison(NamedTuple):
    """Acceptance length of A and B on the same prompts."""

    prompts: int
    a: float
    b: float
    difference: Interval  # B less A
    ratio: Interval  # B over A
    p_value: float  # probability of a difference at least so large if A and B were exchangeable on every prompt


def compare_answers(a: Sequence[Answer], b: Sequence[Answer]) -> Comparison:
    """Paired comparison of answers to the same prompts; intervals are over prompts, the same for A and B.

    Raises:
        ValueError: fewer than two prompts came to a target pass in both.
    """
    sums_P4 = _shared_sums(a, b)
    prompts = len(sums_P4)
    if prompts < LEAST_PROMPTS:
        raise ValueError(
            f"{how_many(prompts, 'prompt')} came to a target pass in both: a comparison takes at least {LEAST_PROMPTS}"
        )
    return _compare_sums(sums_P4)


def _compare_sums(sums_P4: Array) -> Comparison:
    """Paired comparison of what :func:`_shared_sums` gives of two prompts or more."""
    difference = interval(sums_P4, _difference)
    relative = interval(sums_P4[:, B_THEN_A], over, POSITIVE)
    assert difference is not None and relative is not None
    of_a, of_b = map(float, ratio(sums_P4.sum(0).reshape(2, 2)))
    return Comparison(len(sums_P4), of_a, of_b, difference, relative, _p_value(sums_P4))


def _shared_sums(a: Sequence[Answer], b: Sequence[Answer]) -> Array:
    """Committed tokens and target passes of A and of B, (P, 4), of the prompts that came to a pass in both."""
    ids = {answer.prompt_id for answer in [*a, *b]}
    sums_P4 = np.concatenate(
        [per_prompt(answers, committed, target_passes, prompts=ids) for answers in (a, b)], axis=1
    )
    return sums_P4[(sums_P4 > 0).all(1)]


def _difference(sums: Array) -> Array:
    return less(sums[..., B_THEN_A])


def _p_value(sums_P4: Array) -> float:
    """Return the p-value of the two-sided permutation test, over all 2**P relabellings or :data:`RELABELLINGS` drawn.

    Each relabelling swaps A and B on some prompts. Where relabellings are drawn the observed labels count as one more.
    """
    prompts = len(sums_P4)
    total_4 = sums_P4.sum(0)
    exact = 2**prompts <= RELABELLINGS
    if exact:
        swaps_RP = np.arange(2**prompts)[:, None] >> np.arange(prompts) & 1
    else:
        swaps_RP = np.random.default_rng(SEED).integers(2, size=(RELABELLINGS, prompts))
    change_P4 = sums_P4[:, B_THEN_A] - sums_P4
    relabelled_R = _difference(total_4 + swaps_RP.astype(np.float64) @ change_P4)
    observed = abs(float(_difference(total_4)))
    as_large = int((np.abs(relabelled_R) >= observed - 1e-12 * max(1.0, observed)).sum())
    if exact:
        return as_large / len(swaps_RP)
    return (1 + as_large) / (1 + len(swaps_RP))


def read_evaluation(directory: str | Path) -> SavedEvaluation:
    """An evaluation's answers and what they are of.

    Raises:
        ValueError: it is none, or it kept no answers.
    """
    check_sums(Path(directory), "evaluate again", partial=True)
    metrics = read_json(Path(directory) / METRICS)
    try:
        names = [result["shape"] for result in metrics["results"]]
        target = {"fingerprint": metrics["target"]["fingerprint"], **metrics["target"]}
        drafter = metrics["drafter"]["weights_sha256"]
        settings = dict(metrics["settings"])
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{directory}/{METRICS}: not written by specdec evaluate, without {error}"
        ) from error
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{directory}/{METRICS}: it holds no result, or two of one draft shape")
    answers = read_answers(Path(directory) / "answers.jsonl", len(names))
    by_shape = dict(zip(names, answers, strict=True))
    return SavedEvaluation(str(directory), target, drafter, settings, by_shape)


def check_comparable(a: SavedEvaluation, b: SavedEvaluation) -> None:
    """Raise ValueError unless both have one target, or one drafter, and the same settings and prompts."""
    names = f"{a.name} and {b.name}"
    difference = target_difference(a.target, b.target)
    if difference is not None and a.drafter != b.drafter:
        raise ValueError(
            f"{names} differ in their target (its {difference}) and their drafter: one must be the same"
        )
    if difference == TOKENIZER:
        raise ValueError(f"{names} differ in their target's {difference}: compare like with like")
    if a.settings.get("prompts_sha256") != b.settings.get("prompts_sha256"):
        raise ValueError(
            f"{names} differ in their prompts (their texts or ids): compare like with like"
        )
    prompt_ids_a, prompt_ids_b = (
        sorted(answer.prompt_id for answer in next(iter(run.answers.values()))) for run in (a, b)
    )
    if prompt_ids_a != prompt_ids_b:
        raise ValueError(f"{names} differ in the prompts that were left out, or in turns")
    may_differ = MAY_DIFFER | (set() if difference is None else OF_TARGET)
    for name in sorted(different_settings(a.settings, b.settings, may_differ)):
        raise ValueError(
            f"{names} differ in {name}: {a.settings.get(name)} and {b.settings.get(name)}; compare like with like"
        )


def different_settings(
    a: Mapping[str, Any], b: Mapping[str, Any], may_differ: Collection[str] = ()
) -> list[str]:
    """Return the names of settings that differ and may not."""
    return [name for name in {**a, **b} if name not in may_differ and a.get(name) != b.get(name)]
