"""Does ``specdec parity --engine vllm`` find what is wrong in an export? A real vLLM serves every planted fault.

Beside it, on the same recordings, what a comparison of accepted counts says, which is all that an engine's counters
show: for a drafter whose proposals depend on the whole context, and for one that mostly looks at the last token.

``SPECDEC_VLLM_PYTHON=... python -m benchmarks.planted_faults --out benchmarks/results/planted_<hardware>_<yyyymm>.md``
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.served import DRAFTS, ENVIRONMENT, FLAGS, PROMPTS, ROUNDING, TOKENS
from benchmarks.served_targets import make_target
from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.diagnostics.parity_files import Files, read_files
from specdec.diagnostics.parity_proposals import ProposalComparison, compare_proposals
from specdec.diagnostics.planted import FAULTS, Outcome, planted, write_files
from specdec.drafter import Drafter
from specdec.engines.proposals import ProposalEngine
from specdec.export import export_drafter, subject_of
from specdec.export.formats import DrafterCheckpoint, vllm_arguments
from specdec.target import Target, TargetSource
from specdec.utils.vllm import VllmRefusedError
from tests import perfect

FAMILY, NOISE = "Llama", 0.3
# the first that has a place for a fault
DESIGNS = ("eagle3_1", "eagle1", "nvidia", "qwen3", "sliding_window")
WINDOW = 16  # of the last, which the texts reach
SOUND = "nothing"


class Planting(NamedTuple):
    """One export with one fault, or none, served."""

    fault: str
    design: str
    kind: str  # loud, or last token
    comparison: ProposalComparison | None
    refused: str | None  # what vLLM said

    def row(self) -> dict[str, Any]:
        """For the file of raw figures."""
        figures: dict[str, Any] = {}
        if self.comparison is not None:
            figures["proposals"] = self.comparison.proposals
            figures["different"] = self.comparison.different
            figures["passes_apart"] = self.comparison.apart
            figures["verdict"] = self.comparison.fault
        return {
            "fault": self.fault,
            "design": self.design,
            "kind": self.kind,
            "refused": self.refused,
            **figures,
        }


def drafter_of(target: Target, design: str, kind: str) -> Drafter:
    """A loud drafter, or one that knows the target's law from the last token."""
    spec = loud_spec(target, design)
    if spec.attention_window != "full":
        spec = replace(spec, attention_window=WINDOW)
    if kind == "loud":
        return loud_drafter(target, spec)
    return perfect.disturb(
        perfect.perfect_drafter(target, spec), NOISE if spec.head == "own" else 0.0
    ).float()


def serve_planted(
    engine: ProposalEngine, target: Target, drafter: Drafter, files: Files, folder: Path
) -> ProposalComparison:
    """What a vLLM with these files proposes, beside what the drafter says."""
    write_files(files, folder)
    checkpoint = DrafterCheckpoint.of(folder, subject_of(drafter, target))
    serve = vllm_arguments(TargetSource(target.source), checkpoint, DRAFTS)[1:]
    answers = engine.ask([*serve, *FLAGS, "--no-enable-prefix-caching"], PROMPTS, TOKENS)
    return compare_proposals(target, drafter, answers, ROUNDING)


def plantings(target: Target, kind: str, engine: ProposalEngine, folder: Path) -> list[Planting]:
    """Every fault, in the first design that has a place for it; first of all none."""
    exports: dict[str, tuple[Drafter, Files]] = {}
    for design in DESIGNS:
        try:
            drafter = drafter_of(target, design, kind)
        except (ValueError, KeyError):  # no hand-made drafter has norms on its heads
            continue
        export_drafter(drafter, target, folder / f"{kind}-{design}")
        exports[design] = drafter, read_files(folder / f"{kind}-{design}")
    results = []
    for fault in (SOUND, *FAULTS):
        for design, (drafter, files) in exports.items():
            changed = files
            if fault != SOUND:
                copies = planted(fault, files, target.head_weight(), target.num_layers)
                if isinstance(copies, Outcome):
                    continue
                changed = copies
            place = folder / f"planted-{kind}-{len(results)}"
            try:
                comparison = serve_planted(engine, target, drafter, changed, place)
                results.append(Planting(fault, design, kind, comparison, None))
            except VllmRefusedError as error:
                results.append(Planting(fault, design, kind, None, str(error)))
            harness.tell(str(results[-1].row()))
            break
    return results


def report(about: dict[str, Any], results: list[Planting], minutes: float) -> list[str]:
    """Markdown."""
    by_key = {(planting.fault, planting.kind): planting for planting in results}
    loud = [planting for planting in results if planting.kind == "loud" and planting.fault != SOUND]
    seen = [
        planting
        for planting in loud
        if planting.comparison is not None and planting.comparison.fault
    ]
    counted = [
        planting
        for planting in loud
        if planting.comparison is not None and planting.comparison.apart
    ]
    quiet = [
        planting for planting in results if planting.kind != "loud" and planting.fault != SOUND
    ]
    quiet_counted = [
        planting
        for planting in quiet
        if planting.comparison is not None and planting.comparison.apart
    ]
    lines = [
        f"# Faults planted in exports, {about['date'][:10]}",
        "",
        *harness.conditions(about, about["versions"]),
    ]
    lines += [
        f"- vLLM {about['vllm']}, V1 runner, float32, greedy, {DRAFTS} drafts a pass; a Llama of 7 layers; "
        f"{minutes:.0f} minutes", "",
        f"Of {len(loud)} faults, comparing proposals finds {len(seen)} with a loud drafter; comparing accepted counts "
        f"finds {len(counted)} of them with the same drafter, and {len(quiet_counted)} of {len(quiet)} with a drafter "
        "that mostly looks at the last token.", "",
        *table(by_key),
    ]  # fmt: skip
    return lines


def table(by_key: dict[tuple[str, str], Planting]) -> list[str]:
    """A row for each fault."""
    headings = ["fault planted in the export", "design", "proposals that differ", "accepted counts that differ",
                "the same, last-token drafter: proposals", "accepted counts"]  # fmt: skip
    rows = []
    for fault in (SOUND, *FAULTS):
        planting = by_key.get((fault, "loud"))
        quiet = by_key.get((fault, "last token"))
        design = "" if planting is None else planting.design
        rows.append([fault, design, *_counts(planting), *_counts(quiet)])
    return harness.table(headings, rows)


def _counts(planting: Planting | None) -> list[str]:
    if planting is None:
        return ["", ""]
    if planting.comparison is None:
        return ["refused by vLLM", ""]
    comparison = planting.comparison
    passes = comparison.positions[0].proposals
    return [f"{comparison.different} of {comparison.proposals}", f"{comparison.apart} of {passes}"]


def main() -> int:
    """All of it; the exit status is 1 if a fault is not found, or one is found where there is none."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    torch.set_num_threads(1)
    os.environ.update(ENVIRONMENT)
    begin, about = time.monotonic(), harness.machine(1)
    results: list[Planting] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as name, ProposalEngine.started() as engine:
        about["vllm"] = engine.version
        target = make_target(FAMILY, Path(name) / "target")
        for kind in ("loud", "last token"):
            results += plantings(target, kind, engine, Path(name))
    rows = [planting.row() for planting in results]
    harness.keep(a.out, report(about, results, (time.monotonic() - begin) / 60), rows)
    loud = [row for row in rows if row["kind"] == "loud"]
    return int(any(bool(row.get("verdict")) == (row["fault"] == SOUND) for row in loud))


if __name__ == "__main__":
    sys.exit(main())
