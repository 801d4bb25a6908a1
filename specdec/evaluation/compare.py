"""Whether two evaluations differ by more than chance, prompt by prompt: ``specdec compare``."""

import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.decoding import parse_shape
from specdec.evaluation.answers import Answer, read_answers
from specdec.evaluation.metrics import committed, passes, per_prompt
from specdec.evaluation.statistics import ALPHA, HOW, POWER, RESAMPLES, SEED, Comparison, paired_comparison
from specdec.evaluation.style import bracketed
from specdec.utils.files import read_json

# where or how fast, not what was decoded: neither acceptance nor the prompts hang on them
MAY_DIFFER = {
    "source", "prompts", "limit", "layouts", "shape", "plain", "baselines", "certify", "batch_size", "compile",
    "other_target", "intervals", "torch_threads",
}  # fmt: skip


class SavedEvaluation(NamedTuple):
    """What an evaluation left in its directory."""

    name: str
    target: str
    settings: dict[str, Any]
    answers: dict[str, list[Answer]]
    """By the draft shape's name."""


def compare(a: Path, b: Path, *, shape: list[str] = [], detect: float = 0.1, json: bool = False) -> None:  # noqa: B006
    """Compare the acceptance lengths of two evaluations, prompt by prompt.

    Tells their difference and ratio with intervals, the p-value of a paired permutation test, and how many prompts
    would show a difference of a given size.

    Example: specdec compare runs/one runs/other --detect 0.05

    Args:
        a: directory of an evaluation.
        b: another of the same prompts and target; or the same, for two draft shapes.
        shape: one of both, or one of A and one of B; by default all that both have.
        detect: difference in acceptance length to plan for.
        json: print JSON.

    Raises:
        ValueError: an evaluation cannot be read, or the two are not of the same prompts, target and settings.
    """
    one, two = read_evaluation(a), read_evaluation(b)
    check_comparable(one, two)
    found, texts = [], [f"A  {a}\nB  {b}"]
    for x, y in _pairs(one, two, shape):
        row = compare_answers(one.answers[x], two.answers[y])
        needed = row.prompts_needed(detect)
        difference, ratio = row.difference._asdict(), row.ratio._asdict()
        found.append(
            {"shape_a": x, "shape_b": y, "prompts": row.prompts, "acceptance_length": {"a": row.a, "b": row.b},
             "difference": difference, "ratio": ratio, "p_value": row.p_value, "detect": detect,
             "prompts_needed": needed}
        )  # fmt: skip
        texts.append(
            f"{x if x == y else f'{x} against {y}'}, {row.prompts} prompts\n"
            f"  acceptance length  A {row.a:.3f}, B {row.b:.3f}\n"
            f"  B - A              {bracketed(*row.difference, '{:+.3f}'.format)}, p = {row.p_value:.2g}\n"
            f"  B / A              {bracketed(*row.ratio, '{:.3f}'.format)}\n"
            f"  prompts needed     {needed} to see a difference of {detect:g} (power {POWER}, alpha {ALPHA})"
        )
    texts.append(f"Brackets: {HOW}; p: A and B swapped prompt by prompt.")
    whole = {"a": str(a), "b": str(b), "intervals": HOW, "comparisons": found}
    sys.stdout.write((dumps(whole, indent=2) if json else "\n\n".join(texts)) + "\n")


def compare_answers(
    a: Sequence[Answer], b: Sequence[Answer], seed: int = SEED, resamples: int = RESAMPLES
) -> Comparison:
    """:func:`paired_comparison` of answers to the same prompts.

    Raises:
        ValueError: fewer than two prompts came to a target pass in both.
    """
    ids = {one.prompt_id for one in [*a, *b]}
    sums_P4 = np.concatenate([per_prompt(one, committed, passes, prompts=ids) for one in (a, b)], axis=1)
    return paired_comparison(sums_P4[(sums_P4 > 0).all(1)], seed, resamples)


def read_evaluation(directory: str | Path) -> SavedEvaluation:
    """An evaluation's answers and what they are of.

    Raises:
        ValueError: it is none, or it kept no answers.
    """
    metrics = read_json(Path(directory) / "metrics.json")
    try:
        names = [result["shape"] for result in metrics["results"]]
        target, settings = metrics["target"]["fingerprint"], dict(metrics["settings"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"{directory}/metrics.json: not of specdec evaluate, for want of {error}") from error
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{directory}/metrics.json: it holds no result, or two of one draft shape")
    answers = read_answers(Path(directory) / "answers.jsonl", len(names))
    return SavedEvaluation(str(directory), target, settings, dict(zip(names, answers, strict=True)))


def check_comparable(a: SavedEvaluation, b: SavedEvaluation) -> None:
    """Raise ValueError unless both have one target and the same settings and prompts."""
    names = f"{a.name} and {b.name}"
    if a.target != b.target:
        raise ValueError(f"{names} differ in their target (its fingerprint): compare like with like")
    if a.settings.get("prompts_sha256") != b.settings.get("prompts_sha256"):
        raise ValueError(f"{names} differ in their prompts (their texts or ids): compare like with like")
    one, two = ([answer.prompt_id for answer in next(iter(run.answers.values()))] for run in (a, b))
    if sorted(one) != sorted(two):
        raise ValueError(f"{names} differ in the prompts that were left out, or in turns")
    for name in sorted({*a.settings, *b.settings} - MAY_DIFFER):
        values = a.settings.get(name), b.settings.get(name)
        if values[0] != values[1]:
            raise ValueError(f"{names} differ in {name}: {values[0]} and {values[1]}; compare like with like")


def _pairs(a: SavedEvaluation, b: SavedEvaluation, shapes: list[str]) -> list[tuple[str, str]]:
    """The draft shapes of A and of B to compare."""
    if len(shapes) > 2:
        raise ValueError(f"--shape takes one name, or one for each evaluation, not {len(shapes)}")
    if shapes:
        return [(_named(a, shapes[0]), _named(b, shapes[-1]))]
    shared = [name for name in a.answers if name in b.answers]
    if not shared:
        has = " and ".join(", ".join(run.answers) for run in (a, b))
        raise ValueError(f"{a.name} and {b.name} share no draft shape ({has}): name one of each with --shape")
    return [(name, name) for name in shared]


def _named(run: SavedEvaluation, shape: str) -> str:
    """A shape by its name in the report, or as it is given to ``specdec evaluate``."""
    name = shape if shape in run.answers else parse_shape(shape).name
    if name not in run.answers:
        raise ValueError(f"{run.name} was not evaluated with {name}; it has {', '.join(run.answers)}")
    return name
