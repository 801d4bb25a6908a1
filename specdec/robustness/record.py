"""What was measured, as JSON: ``robustness.json`` of one drafter, and ``comparison.json`` of several."""

from collections.abc import Sequence
from typing import Any

from specdec.evaluation.statistics import Interval
from specdec.robustness.kept import SHARES, Counts, counts, difference, kept, mean_difference, mean_kept
from specdec.robustness.run import CLEAN, Outcome

VERSION = 1
ALL = "all conditions"


def record(drafter: dict[str, Any], outcomes: Sequence[Outcome], **context: Any) -> dict[str, Any]:
    """What one drafter keeps under every condition; the first outcome is the clean one.

    ``committed`` and ``passes`` of a condition are in the order of ``prompts``; both are 0 for a prompt that it has no
    target pass of.
    """
    found = [counts(outcome.answers) for outcome in outcomes]
    clean = found[0]
    ids = [prompt.prompt_id for prompt in outcomes[0].plan.prompts]
    return {
        "version": VERSION,
        "drafter": drafter,
        "prompts": ids,
        "clean": CLEAN,
        "conditions": [_condition(outcome, own, clean, ids) for outcome, own in zip(outcomes, found, strict=True)],
        "means": [
            {"name": name, "conditions": len(some)}
            | {share: _json(mean_kept([found[at] for at in some], clean, of)) for share, of in SHARES.items()}
            for name, some in groups(outcomes).items()
        ],
        **context,
    }


def comparison(labels: Sequence[str], outcomes: Sequence[Sequence[Outcome]]) -> dict[str, Any]:
    """What each drafter keeps less what the first one keeps, paired by prompt.

    Args:
        outcomes: of every drafter.
    """
    out: list[dict[str, Any]] = []
    for label, own in zip(labels[1:], outcomes[1:], strict=True):
        pairs = [(counts(a.answers), counts(b.answers)) for a, b in zip(outcomes[0], own, strict=True)]
        rows = [
            {"name": one.plan.name, "group": _group(one)}
            | {share: _json(difference((a, pairs[0][0]), (b, pairs[0][1]), of)) for share, of in SHARES.items()}
            for one, (a, b) in zip(own[1:], pairs[1:], strict=True)
            if one.plan.skipped is None
        ]
        means = [
            {"name": name, "conditions": len(some)}
            | {share: _json(mean_difference([pairs[at] for at in some], pairs[0], of)) for share, of in SHARES.items()}
            for name, some in groups(own).items()
        ]
        out.append({"drafter": label, "less": labels[0], "conditions": rows, "means": means})
    return {"version": VERSION, "drafters": list(labels), "differences": out}


def groups(outcomes: Sequence[Outcome]) -> dict[str, list[int]]:
    """The places of the measured conditions of every group of several, and of all of them."""
    measured = [at for at, one in enumerate(outcomes) if at and one.plan.skipped is None]
    found: dict[str, list[int]] = {}
    for at in measured:
        found.setdefault(_group(outcomes[at]), []).append(at)
    several = {name: some for name, some in found.items() if len(some) > 1}
    return several | ({ALL: measured} if len(found) > 1 else {})


def _condition(outcome: Outcome, own: Counts, clean: Counts, ids: Sequence[str]) -> dict[str, Any]:
    found = kept(own, clean)
    compared = [one.identical for one in outcome.answers if one.identical is not None]
    both = [own.get(name, (0, 0)) for name in ids]
    condition = outcome.plan.condition
    return {
        "name": outcome.plan.name,
        "title": condition.title if condition else CLEAN,
        "group": _group(outcome),
        "committed": [committed for committed, _ in both],
        "passes": [passes for _, passes in both],
        "skipped": outcome.plan.skipped,
        "note": outcome.plan.note,
        "left_out": outcome.left_out,
        "measured_prompts": found.prompts,
        "longest_prompt": outcome.plan.longest,
        "acceptance_length": _json(found.acceptance_length),
        "length_kept": _json(found.length_kept),
        "drafts_kept": _json(found.drafts_kept),
        "identical_outputs": sum(compared),
        "compared_outputs": len(compared),
    }


def _group(outcome: Outcome) -> str:
    return outcome.plan.condition.group if outcome.plan.condition else CLEAN


def _json(found: Interval | None) -> dict[str, Any] | None:
    return found._asdict() if found else None
