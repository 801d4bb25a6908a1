"""What a real vLLM proposes for every export, token by token beside ours: many target families, designs and formats.

Every cell exports a drafter, runs the very line that the export prints with vLLM's engine, records each proposal, and
compares it with this drafter's at the same place of the same text (``specdec parity``). A cell is *equal*, or *refused*
before training or by the export, with its reason; all else is a finding. Most drafters are made so that their proposals
depend on the whole context and on every weight; some know their target's law, so that drafts are accepted. A second
table has a design for each switch of the engine matrix, a third one designs whose heads, head sizes, layers, boundaries
and vocabularies are drawn at random.
What is finished is kept beside ``--out`` until all is, so that the same command resumes.

``SPECDEC_VLLM_PYTHON=... python -m benchmarks.served --out benchmarks/results/served_<hardware>_<yyyymm>.md``
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.served_targets import FAMILIES, MARKOV, make_target
from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.diagnostics.parity_files import read_files
from specdec.diagnostics.parity_proposals import ProposalComparison, compare_proposals
from specdec.drafter import Drafter, DrafterSpec, LastLayer, MaskBlock
from specdec.engines.proposals import ProposalEngine
from specdec.export import FORMATS, NotServable, export_drafter, subject_of
from specdec.target import Target, TargetSource
from specdec.training.building import check_shapes, config_for
from specdec.utils.files import write_json
from specdec.utils.text import how_many
from specdec.utils.vllm import VllmRefusedError
from tests import perfect

TOKENS, DRAFTS, NOISE = 48, 3, 0.3
ROUNDING = 1e-4  # share of a distribution's range, in float32
PROMPTS = ([5, 6, 7], [9, 1, 30, 31, 2, 17, 40, 8, 22], [44])
FLAGS = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--enforce-eager"]

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "OMP_NUM_THREADS": "1"}  # fmt: skip
RANDOM_DESIGNS = 24
# of these drafters are exported in every format, and drafted in parallel too: formats differ in files, not in targets
EVERY_FORMAT = (
    "Llama",
    "Qwen3, 6 layers",
    "Gemma-3",
    "GPT-OSS",
    "Mistral with a window",
    "Phi-3",
    "ERNIE-4.5",
)
RANDOM_FAMILIES = (
    "Llama",
    "Qwen3, tied",
    "Mistral with a window",
    "Gemma-3",
    "Phi-3",
    "GLM-4",
    "OLMo-3",
    "ERNIE-4.5",
)


# by a switch of the matrix: the preset that has it, or EAGLE-3, and what else is chosen, for a Llama of seven layers
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "norm_before_fc": ("nvidia", {}),
    "norm_before_residual": ("speculators", {}),
    "norms on queries and keys": ("qwen3", {}),
    "a window of 16": ("sliding_window", {"attention_window": 16}),
    "EAGLE-1 with a window of 16": ("eagle1", {"attention_window": 16}),
    "EAGLE-1 of two layers": ("eagle1", {"num_layers": 2}),
    "two layers": ("two_layer", {}),
    "three layers": ("three_layer", {}),
    "one boundary": ("eagle3", {"aux_layers": [3]}),
    "two boundaries": ("eagle3", {"aux_layers": [2, 5]}),
    "four boundaries": ("eagle3_1", {"aux_layers": [1, 2, 5, 6]}),
    "boundaries 0 and 7 (the last)": ("eagle3", {"aux_layers": [0, 3, 7]}),
    "three boundaries as wide as the drafter": ("eagle3", {"hidden_size": 96}),
    "a narrower drafter": ("eagle3_1", {"hidden_size": 16}),
    "the whole vocabulary": ("eagle3", {"draft_vocab_size": "all"}),
    "biases on queries, keys, values and output": ("eagle3", {"attention_bias": True}),
    "biases on queries, keys and values": ("eagle3", {"attention_bias": "qkv"}),
    "EAGLE-1 with biases on queries, keys and values": ("eagle1", {"attention_bias": "qkv"}),
    "the last state, without fc": ("eagle3", {"fusion": LastLayer(), "aux_layers": "default"}),
    "another rope_theta": ("eagle3", {"rope_theta": 500000.0}),
    "P-EAGLE with fc_norm": ("peagle_3_1", {}),
    "DFlash of one layer": ("dflash", {"num_layers": 1, "recurrence": MaskBlock(masks=DRAFTS)}),
}


class Column(NamedTuple):
    """A design, a format, and what kind of drafter."""

    preset: str
    format: str
    kind: str = "loud"  # or "markov", which knows the target's law

    @property
    def heading(self) -> str:
        """Of the table."""
        return f"{self.preset}, {self.format}" + (", accepted" if self.kind == "markov" else "")


COLUMNS = [
    Column("eagle1", "vllm"), Column("eagle3", "vllm"), Column("eagle3_1", "vllm"), Column("eagle3_1", "speculators"),
    Column("eagle3", "sglang"), Column("peagle", "vllm"), Column("eagle1", "vllm", "markov"),
    Column("eagle3_1", "vllm", "markov"),
]  # fmt: skip


class Cell(NamedTuple):
    """One export."""

    family: str
    column: Column
    seed: int | None = None  # of a design drawn at random
    variant: str | None = None  # of a design of VARIANTS

    def about(self) -> dict[str, Any]:
        """For the file of raw figures."""
        return {**self._asdict(), "column": self.column._asdict()}

    @classmethod
    def of(cls, result: dict[str, Any]) -> "Cell":
        """The inverse, of a cell's figures."""
        return cls(
            result["family"], Column(**result["column"]), result["seed"], result.get("variant")
        )


def designed(target: Target, cell: Cell) -> DrafterSpec:
    """The design of a cell: a preset, or one whose shape is drawn at random."""
    spec = loud_spec(target, cell.column.preset)
    if cell.variant is not None:
        return replace(spec, **VARIANTS[cell.variant][1])
    if cell.seed is None:
        return spec
    draw = random.Random(cell.seed)
    groups = draw.choice([1, 2, 2, 4, 3])
    fields: dict[str, Any] = {
        "num_layers": draw.choice([1, 1, 2]),
        "num_key_value_heads": groups,
        "num_attention_heads": groups * draw.choice([1, 2, 4]),
        "head_dim": draw.choice([32, 64, 96]),
        "intermediate_size": draw.choice([40, 64, 100]),
    }
    if spec.head == "own":
        boundaries = draw.sample(range(target.num_layers + 1), draw.choice([1, 2, 3, 4]))
        fields["aux_layers"] = sorted(boundaries)
        fields["draft_vocab_size"] = draw.choice(
            [target.vocab_size // 3, target.vocab_size - 1, target.vocab_size]
        )
    return replace(spec, **fields)


def made_drafter(target: Target, cell: Cell) -> Drafter:
    """The cell's drafter; ValueError if training would refuse its design for this target."""
    spec = designed(target, cell)
    check_shapes(config_for(spec, target))
    if cell.column.kind == "loud":
        return loud_drafter(target, spec, cell.seed or 0)
    noise = NOISE if spec.head == "own" and FAMILIES[cell.family].context else 0.0
    return perfect.disturb(perfect.perfect_drafter(target, spec), noise).float()


def run_cell(cell: Cell, target: Target, engine: ProposalEngine, scratch: Path) -> dict[str, Any]:
    """Export, run the printed line, and compare all that is proposed."""
    begin = time.monotonic()
    about = cell.about()
    try:
        drafter = made_drafter(target, cell)
        about["design"] = drafter.config.to_json()
    except ValueError as error:
        return about | {"verdict": "refused", "reason": f"before training: {error}"}
    try:
        export = export_drafter(
            drafter, target, scratch / "served", cell.column.format, draft_tokens=DRAFTS
        )
    except NotServable as error:
        return about | {"verdict": "refused", "reason": str(error)}
    except ValueError as error:
        return about | {"verdict": "EXPORT FAILED", "reason": str(error)}
    line = export.command
    if cell.column.format == "sglang":  # vLLM reads this format too, by a line of its own
        source = TargetSource(target.source)
        line = FORMATS["vllm"].command(
            str(export.directory), subject_of(drafter, target), source, DRAFTS
        )
    about["line"] = line.replace(str(scratch.parent), "")
    try:
        words = shlex.split(line)
        answers = engine.ask(
            [*words[words.index("serve") + 1 :], *FLAGS, "--no-enable-prefix-caching"],
            PROMPTS,
            TOKENS,
        )
    except VllmRefusedError as error:
        return about | {"verdict": "LINE FAILED", "reason": str(error)}
    files = read_files(export.directory) if cell.column.kind == "loud" else None
    comparison = compare_proposals(
        target, drafter, answers, ROUNDING, files, export.checkpoint.method
    )
    return about | outcome(comparison, cell.column.kind) | {"seconds": time.monotonic() - begin}


def outcome(comparison: ProposalComparison, kind: str) -> dict[str, Any]:
    """A cell's verdict and figures."""
    fault = comparison.fault or (comparison.too_weak if kind == "loud" else None)
    if comparison.fault and comparison.differences:
        margin = max(difference.margin for difference in comparison.differences)
        fault = f"{fault}, by up to {margin:.0e} of the range in the first ones"
    if comparison.wrong_tokens:
        fault = f"vLLM's class of the target writes another text than transformers: {fault}"
    positions = comparison.positions
    context = next((probe.changed for probe in comparison.probes), None)
    return {
        "verdict": _verdict(comparison, fault),
        "reason": fault or "",
        "proposals": comparison.proposals,
        "different": comparison.different,
        "near_ties": comparison.near_ties,
        "largest_near_tie": comparison.largest_near_tie,
        "by_context": context,
        "probed": next((probe.proposals for probe in comparison.probes), None),
        "unseen": comparison.unseen,
        "accepted": positions[0].accepted,
        "passes": positions[0].proposals,
        "apart": comparison.apart,
    }


def _verdict(comparison: ProposalComparison, fault: str | None) -> str:
    if fault is None:
        return "equal"
    if comparison.wrong_tokens:
        return "ANOTHER TARGET"  # to vLLM than to transformers, whatever the drafter
    return "DIFFERENT" if comparison.fault else "NO VERDICT"


def run_family(family: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A family's cells, one after another in one process of vLLM, in another one after a fall.

    A design drawn at random has its own process: vLLM's Transformers backend keeps boundaries in the model's class,
    where the next engine of that process finds them.
    """
    torch.set_num_threads(1)
    os.environ.update(ENVIRONMENT)
    outcomes: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="served-") as name,
        contextlib.redirect_stdout(sys.stderr),
    ):
        folder = Path(name)
        target = make_target(family, folder / "target")
        left = list(cells)
        while left:
            alone = left[0].seed is not None
            for result in _until_fall(left[:1] if alone else left, target, folder):
                outcomes.append(result)
                left = left[1:]
                if left and left[0].seed is not None:
                    break
    return outcomes


def _until_fall(cells: Sequence[Cell], target: Target, folder: Path) -> Iterator[dict[str, Any]]:
    """Cells until vLLM's process ends by itself, the one at which it does among them."""
    with ProposalEngine.started() as engine:
        for cell in cells:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                try:
                    yield run_cell(cell, target, engine, Path(scratch))
                except ValueError as error:
                    yield cell.about() | {"verdict": "FAILED", "reason": str(error)}
                    return


def report(about: dict[str, Any], cells: Sequence[dict[str, Any]], minutes: float) -> list[str]:
    """Markdown."""
    counts = ", ".join(
        f"{count} {verdict}"
        for verdict, count in Counter(cell["verdict"] for cell in cells).items()
    )
    compared = [
        cell for cell in cells if "proposals" in cell and cell["verdict"] != "ANOTHER TARGET"
    ]
    total, different, ties = (
        sum(cell[key] for cell in compared) for key in ("proposals", "different", "near_ties")
    )
    probed = [cell for cell in compared if cell["by_context"] is not None]
    context, tried = (sum(cell[key] for cell in probed) for key in ("by_context", "probed"))
    accepted = sum(cell["accepted"] for cell in compared)
    lines = [f"# Exports in vLLM, proposal by proposal, {about['date'][:10]}", ""]
    lines += harness.conditions(about, about["versions"])
    lines += [
        f"- vLLM {about['vllm']}, V1 runner, float32, greedy, {DRAFTS} drafts a pass, 3 prompts at once; "
        f"{minutes:.0f} minutes", "",
        f"{how_many(len(cells), 'export')}: {counts}. **{total:,} proposals compared, {different} different**, {ties} "
        f"near-ties. Of {tried:,} proposals that were probed {context:,} depend on more than the last token. In "
        f"{accepted:,} passes at least one draft was accepted.", "",
        "A figure is the number of proposals, all of them equal to this drafter's at the same place of the same text. "
        "Others have the number of their reason below. *t*: by vLLM's Transformers backend, which the printed line "
        "asks for.", "",
    ]  # fmt: skip
    reasons: list[str] = []
    planned = [cell for cell in cells if cell["seed"] is None and cell["variant"] is None]
    variants = [cell for cell in cells if cell["variant"] is not None]
    drawn = [cell for cell in cells if cell["seed"] is not None]
    by_place = {(cell["family"], Column(**cell["column"]).heading): cell for cell in planned}
    rows = []
    for family in dict.fromkeys(cell["family"] for cell in planned):
        entries = [by_place.get((family, column.heading)) for column in COLUMNS]
        rows.append([family, *(_entry(cell, reasons) for cell in entries)])
    lines += harness.table(["target", *(column.heading for column in COLUMNS)], rows)
    if variants:
        lines += ["", "## A design for each switch, for the first Llama", ""]
        entries = [
            [cell["variant"], cell["column"]["format"], _entry(cell, reasons)] for cell in variants
        ]
        lines += harness.table(["design", "format", ""], entries)
    if drawn:
        lines += ["", "## Shapes and boundaries drawn at random", ""]
        headings = [
            "target",
            "design",
            "heads, key heads, head size",
            "layers",
            "boundaries",
            "draft vocabulary",
            "",
        ]
        lines += harness.table(headings, [_drawn_row(cell, reasons) for cell in drawn])
    return [*lines, "", *(f"{n}. {' '.join(text.split())}" for n, text in enumerate(reasons, 1))]


def _entry(cell: dict[str, Any] | None, reasons: list[str]) -> str:
    """A cell of the table; its reason, if it has a new one, is added."""
    if cell is None:
        return ""
    if cell["verdict"] == "equal":
        return f"{cell['proposals']}" + " *t*" * ("--model-impl" in cell["line"])
    text = f"{cell['verdict']}: {cell['reason']}"
    if text not in reasons:
        reasons.append(text)
    return f"{cell['verdict']} ({reasons.index(text) + 1})"


def _drawn_row(cell: dict[str, Any], reasons: list[str]) -> list[str]:
    column = Column(**cell["column"])
    design = cell.get("design")
    shape = ["", "", "", ""]
    if design is not None:
        heads = [design[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")]
        boundaries = ", ".join(map(str, design["aux_layers"]))
        vocabulary = f"{design['draft_vocab_size']} of {design['vocab_size']}"
        shape = [", ".join(map(str, heads)), str(design["num_layers"]), boundaries, vocabulary]
    return [cell["family"], column.heading, *shape, _entry(cell, reasons)]


def planned_cells(families: Sequence[str], columns: Sequence[Column], designs: int) -> list[Cell]:
    """Every family with every column that it has, and designs drawn at random."""
    cells = []
    for family in families:
        for column in columns:
            usual = column.format == "vllm" and column.preset != "peagle"
            if (usual or family in EVERY_FORMAT) and (column.kind == "loud" or family in MARKOV):
                cells.append(Cell(family, column))
    if "Llama" in families and columns == COLUMNS:
        cells += [
            Cell("Llama", Column(preset, "vllm"), None, name)
            for name, (preset, _) in VARIANTS.items()
        ]
    drawn_from = [family for family in RANDOM_FAMILIES if family in families]
    presets = [column for column in columns if column.kind == "loud"]
    for seed in range(1, designs + 1 if drawn_from and presets else 1):
        cells.append(Cell(drawn_from[seed % len(drawn_from)], presets[seed % len(presets)], seed))
    return cells


def main() -> int:
    """All of it; the exit status is 1 if there is a cell that is neither equal nor refused."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--targets", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    p.add_argument(
        "--columns",
        nargs="+",
        type=int,
        metavar="N",
        default=range(len(COLUMNS)),
        help="by number, from 0",
    )
    p.add_argument("--random", type=int, default=RANDOM_DESIGNS, help="designs drawn at random")
    p.add_argument("--workers", type=int, default=2, help="targets at a time")
    p.add_argument("--out", type=Path, help="a .md file; raw figures go to the .json beside it")
    p.add_argument("--force", action="store_true", help="overwrite what --out names")
    a = p.parse_args()
    harness.check_out(a.out, a.force)
    begin, about = time.monotonic(), harness.machine(1)
    partial = a.out and a.out.with_suffix(".partial.json")
    cells = json.loads(partial.read_text()) if partial and partial.exists() else []
    known = {Cell.of(cell) for cell in cells}
    wanted = planned_cells(a.targets, [COLUMNS[n] for n in a.columns], a.random)
    left = [cell for cell in wanted if cell not in known]
    by_family = {family: [cell for cell in left if cell.family == family] for family in a.targets}
    with ProcessPoolExecutor(a.workers, multiprocessing.get_context("spawn")) as pool:
        futures = [
            pool.submit(run_family, family, todo) for family, todo in by_family.items() if todo
        ]
        for done in as_completed(futures):
            for cell in done.result():
                cells.append(cell)
                heading = cell["variant"] or Column(**cell["column"]).heading
                harness.tell(
                    f"{cell['family']}, {heading}: {cell['verdict']} {cell.get('reason', '')}"
                )
            if partial:
                write_json(partial, cells)
    order = {cell: number for number, cell in enumerate(wanted)}
    cells.sort(key=lambda cell: order[Cell.of(cell)])
    with ProposalEngine.started() as engine:
        about["vllm"] = engine.version
    harness.keep(a.out, report(about, cells, (time.monotonic() - begin) / 60), cells)
    if partial:
        partial.unlink()
    return int(any(cell["verdict"] not in ("equal", "refused") for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
