"""The tables and sentences of ``specdec parity``, and the figures of its ``parity.json``."""

import itertools
import math
from dataclasses import asdict, astuple
from operator import attrgetter
from typing import Any

from rich.markup import escape
from rich.table import Table

from specdec.diagnostics.parity_compare import NO_NUMBER, Compared
from specdec.diagnostics.parity_proposals import ProposalComparison


def comparison_table(compared: Compared, dtype: str) -> Table:
    """Return a table with a line for each pair and place, and for each run of depths with another verdict."""
    allowed = f"a difference of up to {compared.rows[0].allowed:g} of their range is rounding"
    table = Table("pair", "the text", "depth", "difference", "of the range", "agreement", "verdict")
    table.title = f"log-probabilities in {dtype}: {allowed}"
    by_verdict = itertools.groupby(compared.rows, attrgetter("pair", "place", "verdict"))
    for (pair, place, outcome), group in by_verdict:
        run = list(group)
        depths = str(run[0].depth) if len(run) == 1 else f"{run[0].depth} to {run[-1].depth}"
        figures = f"{max(row.gap for row in run):.1e}", f"{max(row.share for row in run):.1e}"
        table.add_row(
            pair,
            place,
            depths,
            *figures,
            f"{sum(row.agree for row in run)} of {sum(row.slots for row in run)} best tokens",
            escape(outcome),
        )
    return table


def rounding_sentences(compared: Compared) -> list[str]:
    """Return sentences about a quantized export; none about others."""
    if compared.rounding_faults is None:
        return []
    if compared.rounding_faults:
        return [
            f"the export is not this drafter's rounding: {fault}"
            for fault in compared.rounding_faults
        ]
    return [
        "the export is quantized: its matrices are within half a step of the drafter's and the rest is equal; the "
        "numbers of the file are compared, and an engine's proposals with a reference that rounds activations too"
    ]


def proposal_tables(comparison: ProposalComparison, name: str) -> list[Table]:
    """Return tables of the proposals by place in the pass, of the first differences, and of the faults they show."""
    counts = Table(
        "draft",
        "proposals",
        "near-ties",
        "different",
        "accepted by the engine",
        "by this drafter",
        "verdict",
    )
    counts.title = f"what {name} proposes and what this drafter says"
    for position in comparison.positions:
        counts.add_row(*map(str, astuple(position)), position.verdict)
    tables = [counts]
    if comparison.differences:
        examples = Table(
            "text", "place", "draft", "the engine's token", "this drafter's", "margin, of the range"
        )
        examples.title = "the first differences"
        for difference in comparison.differences:
            *places, margin = astuple(difference)
            examples.add_row(*map(str, places), f"{margin:.1e}")
        tables.append(examples)
    seen = Table("a fault in what is served", "proposals that would differ")
    seen.title = "faults that this comparison would have caught"
    for probe in comparison.probes:
        if not probe.has_no_place:
            figure = "not tried"
            if probe.changed is not None:
                figure = f"{probe.changed} of {probe.proposals}"
            seen.add_row(probe.fault, figure)
    return [*tables, seen]


def parity_verdict(compared: Compared, proposals: ProposalComparison | None) -> str | None:
    """Return why the drafter is not proven to be served as trained; None if it is, as far as was asked."""
    if not compared.equal:
        return "NOT THE SAME: see above"
    if compared.not_compared is not None:
        return "NOT SERVED: the engine cannot serve this drafter (the reason is above); training and decoding agree"
    if proposals is not None and proposals.fault:
        return f"NOT THE SAME: {proposals.fault}"
    if proposals is not None and proposals.too_weak:
        return (
            f"NO VERDICT: no proposal differs, but {proposals.too_weak}: give longer prompts or more --max_new_tokens, "
            "or check the design with --design"
        )
    return None


def conclusion(proposals: ProposalComparison | None, name: str | None) -> str:
    """Return what was proven.

    Args:
        name: the engine's.
    """
    if proposals is None:
        return "PASS: training, decoding and the exported files agree; no engine was run"
    margin = ""
    if proposals.near_ties:
        margin = f", {proposals.near_ties} of them near-ties of at most {proposals.largest_near_tie:.0e} of the range"
    context = proposals.probes[0]
    text = (
        f"PASS: training, decoding and {name} agree on all {proposals.proposals:,} proposals{margin}; "
        f"{context.changed} of {context.proposals} depend on more than the last token"
    )
    if proposals.unseen:
        text += f"; this would not have caught: {', '.join(proposals.unseen)}"
    if proposals.not_tried:
        text += f"; not tried: {', '.join(proposals.not_tried)}"
    return text


def report_figures(
    compared: Compared, proposals: ProposalComparison | None, name: str | None, fault: str | None
) -> dict[str, Any]:
    """Return the report's figures.

    A margin is null where the drafter does not know the token, or a figure is no number.
    """
    rows = []
    for row in compared.rows:
        fields = row._asdict() | {"equal": row.equal, "verdict": row.verdict}
        rows.append({key: None if value == NO_NUMBER else value for key, value in fields.items()})
    engine = None
    if proposals is not None:
        engine = asdict(proposals) | {
            "name": name,
            "holds": proposals.fault is None and proposals.too_weak is None,
            "no_verdict": proposals.too_weak,
        }
        for position, figures in zip(proposals.positions, engine["positions"], strict=True):
            figures["verdict"] = position.verdict
        for difference in engine["differences"]:
            if not math.isfinite(difference["margin"]):
                difference["margin"] = None
    return {
        "holds": fault is None,
        "verdict": fault,
        "export_not_compared": compared.not_compared,
        "export_rounding_faults": compared.rounding_faults,
        "rows": rows,
        "engine": engine,
    }
