"""``specdec compare``: whether two evaluations differ by more than chance, prompt by prompt."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser

from specdec.arguments import parse
from specdec.decoding import parse_growth
from specdec.evaluation.comparison import ALPHA, POWER, Comparison, compare
from specdec.evaluation.markdown import bracketed
from specdec.evaluation.record import Answer, read_answers
from specdec.evaluation.statistics import METHOD, RESAMPLES, SEED, Interval
from specdec.files import read_json

# where or how fast, not what was decoded
# neither acceptance nor the prompts hang on them
_MAY_DIFFER = {
    "source", "prompts", "torch_threads", "seconds_cover", "drafter_made_for_this_target", "intervals", "batch_size",
    "compiled",
}  # fmt: skip


class Run(NamedTuple):
    """What an evaluation left in its directory."""

    name: str
    target: str
    settings: dict[str, Any]
    answers: dict[str, list[Answer]]
    """By the growth's name."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        ValueError: an evaluation cannot be read, or the two are not of the same prompts, target and settings.
    """
    parser = ArgumentParser(prog="specdec compare", description=__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("a", type=str, help="directory of an evaluation")
    parser.add_argument("b", type=str, help="another of the same prompts and target; or the same, for two growths")
    parser.add_argument("--growth", type=str, nargs="+", default=[], help="one of both, or one of A and one of B; by default all that both have")  # fmt: skip # noqa: E501
    parser.add_argument("--detect", type=float, default=0.1, help="difference in acceptance length to plan for")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parse(parser, argv)
    a, b = read(args.a), read(args.b)
    check(a, b)
    rows = [(one, two, compare(a.answers[one], b.answers[two])) for one, two in pairs(a, b, args.growth)]
    told = [_row(one, two, found, args.detect) for one, two, found in rows]
    if args.json:
        text = json.dumps({"a": args.a, "b": args.b, "intervals": _HOW, "comparisons": told}, indent=2)
    else:
        parts = [_text(*row, args.detect) for row in rows]
        text = "\n\n".join(
            [f"A  {args.a}\nB  {args.b}", *parts, f"Brackets: {_HOW}; p: A and B swapped prompt by prompt."]
        )
    sys.stdout.write(f"{text}\n")
    return 0


_HOW = f"{METHOD}, {RESAMPLES} resamples, seed {SEED}"


def read(directory: str | Path) -> Run:
    """An evaluation's answers and what they are of.

    Raises:
        ValueError: it is none, or it kept no answers.
    """
    metrics = read_json(Path(directory) / "metrics.json")
    try:
        names = [result["growth"] for result in metrics["results"]]
        target, settings = metrics["target"]["fingerprint"], dict(metrics["settings"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"{directory}/metrics.json: not of specdec evaluate, for want of {error}") from error
    if not names:
        raise ValueError(f"{directory}/metrics.json: it holds no result")
    if len(set(names)) < len(names):
        raise ValueError(f"{directory}: two growths have one name: evaluate them apart")
    answers = read_answers(Path(directory) / "answers.jsonl", len(names))
    return Run(str(directory), target, settings, dict(zip(names, answers, strict=True)))


def check(a: Run, b: Run) -> None:
    """Raise ValueError unless both have one target and the same settings and prompts."""
    if a.target != b.target:
        raise ValueError(f"{a.name} and {b.name} differ in their target (its fingerprint): compare like with like")
    _check_prompts(a, b)
    if a.settings.get("prompts_sha256") != b.settings.get("prompts_sha256"):
        raise ValueError(f"{a.name} and {b.name} differ in their prompts' texts, under the same ids")
    if odd := differing_settings(a, b):
        raise ValueError(f"{a.name} and {b.name} differ in {odd[0]}; compare like with like")


def differing_settings(a: Run, b: Run) -> list[str]:
    """``name: of a and of b`` for each setting of two evaluations that decides what is decoded."""
    names = sorted({*a.settings, *b.settings} - _MAY_DIFFER)
    pairs_of = ((name, a.settings.get(name), b.settings.get(name)) for name in names)
    return [f"{name}: {one} and {two}" for name, one, two in pairs_of if one != two]


def pairs(a: Run, b: Run, growths: Sequence[str]) -> list[tuple[str, str]]:
    """The growth of A and of B to compare.

    Raises:
        ValueError: there is none such.
    """
    if len(growths) > 2:
        raise ValueError(f"--growth takes one name, or one for each evaluation, not {len(growths)}")
    if growths:
        return [(_named(a, growths[0]), _named(b, growths[-1]))]
    shared = [name for name in a.answers if name in b.answers]
    if not shared:
        has = " and ".join(", ".join(run.answers) for run in (a, b))
        raise ValueError(f"{a.name} and {b.name} share no growth ({has}): name one of each with --growth")
    return [(name, name) for name in shared]


def _named(run: Run, growth: str) -> str:
    """A growth by its name in the report, or as it is given to ``specdec evaluate``."""
    name = growth if growth in run.answers else parse_growth(growth).name
    if name not in run.answers:
        raise ValueError(f"{run.name} was not evaluated with {name}; it has {', '.join(run.answers)}")
    return name


def _check_prompts(a: Run, b: Run) -> None:
    """Raise ValueError unless the ids are the same, and as many turns of each; all growths of a run have the same."""
    ids = [[answer.prompt_id for answer in next(iter(run.answers.values()))] for run in (a, b)]
    if odd := sorted(set(ids[0]) ^ set(ids[1])):
        shown = ", ".join(odd[:5]) + (", ..." if len(odd) > 5 else "")
        raise ValueError(f"{a.name} and {b.name} differ in their prompts: {len(odd)} are in one only: {shown}")
    if sorted(ids[0]) != sorted(ids[1]):
        raise ValueError(f"{a.name} and {b.name} differ in the turns that their prompts came to")


def _row(one: str, two: str, found: Comparison, detect: float) -> dict[str, Any]:
    return {
        "growth_a": one,
        "growth_b": two,
        "prompts": found.prompts,
        "acceptance_length": {"a": found.a, "b": found.b},
        "difference": found.difference._asdict(),
        "ratio": found.ratio._asdict(),
        "p_value": found.p_value,
        "deviation": found.deviation,
        "detect": detect,
        "prompts_needed": found.prompts_needed(detect),
    }


def _text(one: str, two: str, found: Comparison, detect: float) -> str:
    needed = found.prompts_needed(detect)
    return (
        f"{one if one == two else f'{one} against {two}'}, {found.prompts} prompts\n"
        f"  acceptance length  A {found.a:.3f}, B {found.b:.3f}\n"
        f"  B - A              {_brackets(found.difference, '+.3f')}, p = {found.p_value:.2g}\n"
        f"  B / A              {_brackets(found.ratio, '.3f')}\n"
        f"  prompts needed     {needed} to see a difference of {detect:g} (power {POWER}, alpha {ALPHA})"
    )


def _brackets(found: Interval, form: str) -> str:
    return bracketed(*found, lambda value: f"{value:{form}}")
