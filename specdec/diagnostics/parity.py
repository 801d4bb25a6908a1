"""``specdec parity``: is what was trained what is decoded, and what a real vLLM proposes, token by token?

Three ways of running one drafter are compared at the same places of the same texts: training's unroll, cached decoding,
and the exported files as an independent reference of vLLM reads them. With ``--engine vllm`` a real vLLM answers the
same prompts in its own environment, and each token that its drafter proposes is compared with this drafter's.

Legend: A passes, K drafts, T tokens, V vocabulary.
"""

import contextlib
import itertools
import logging
import math
import sys
from dataclasses import asdict, astuple, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.decoding import check_pair, warn_unless_made_for
from specdec.diagnostics.anchors import answered_texts
from specdec.diagnostics.loud import check_design, loud_drafter, loud_spec
from specdec.diagnostics.parity_compare import NO_NUMBER, Compared, compare_drafting
from specdec.diagnostics.parity_files import read_files
from specdec.diagnostics.parity_proposals import ProposalComparison, compare_proposals
from specdec.drafter import load_drafter
from specdec.engines.proposals import ProposalEngine, RecordedAnswer
from specdec.engines.server import check_flags, flag_of
from specdec.evaluation.prompts import Prompt, first_turns, load_prompts
from specdec.export import NotServable, export_drafter, subject_of
from specdec.export.checkpoint import check_unchanged
from specdec.export.formats import DrafterCheckpoint, drafts_of, vllm_arguments
from specdec.export.write import warn_if_rounded
from specdec.target import TargetSource
from specdec.utils.files import claimed, scratch_folder, staged_directory, write_json
from specdec.utils.machine import provenance
from specdec.utils.numbers import Count, Depth, Range, Tokens
from specdec.utils.progress import progress
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.vllm import find_vllm

log = logging.getLogger(__name__)

REPORT = "parity.json"
RUNNER = "V1 model runner"  # the one that is recorded, whatever a server would take
# The embedded target knows these.
PROMPTS = (
    "def read_json(path):\n    with open(path, encoding='utf-8') as file:\n",
    "import re\nimport sys\n\n\nclass Parser:\n    def __init__(self, text):\n        self.text = text\n",
    "for index in range(",
)


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """What is compared, on which texts, and with which engine.

    Args:
        drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub
        design: instead of a drafter, a preset such as eagle3_1 (the files of conf/drafter), or a YAML file of that
            form: specdec makes a random drafter of that design whose proposals depend on the whole context, so that
            you learn before training whether an engine serves it
        target: the model that it drafts for; --target.dtype is the dtype of everything compared
        exported: a checkpoint of the drafter; by default it is exported for vLLM and thrown away
        prompts: in the formats of specdec evaluate; by default three beginnings of Python files
        limit: use the first prompts only
        max_new_tokens: new tokens per answer
        depth: last draft step compared, counted from 0; at most a block drafter's last
        device: where target and drafter run
        engine: compare a real engine's proposals, too: vLLM of the Python that $SPECDEC_VLLM_PYTHON names, else of this
            environment
        draft_tokens: tokens that the engine drafts per pass, as in specdec serve
        vllm_args: flags of vllm serve for the engine: give them after --
        out: a directory for parity.json, a new one
    """

    drafter: str | None = None
    design: str | None = None
    target: TargetSource = field(default_factory=TargetSource)
    exported: Path | None = None
    prompts: list[str] = field(default_factory=list)
    limit: Count | None = 4
    max_new_tokens: Tokens = 32
    depth: Annotated[int, Range(0, 63)] = 7
    device: str = "cpu"
    engine: Literal["vllm"] | None = None
    draft_tokens: Depth | None = None
    vllm_args: list[str] = field(default_factory=list)
    out: Path | None = None


def parity(config: ParityConfig) -> int:
    """Check that training, decoding, the export and, with --engine, vLLM draft the same tokens.

    Training's unroll, cached decoding and the exported files, as an independent reference of vLLM reads them, are
    compared at places of the same texts. With --engine vllm a real vLLM answers the same prompts, and every token that
    its drafter proposes is compared, too; the report says how many of these depend on more than the last token, and
    which faults they could not have shown. The exit status is 0 if everything is the same, and 1 if anything differs,
    the export cannot be compared, or too few proposals depend on the context for a verdict.

    Example: specdec parity --drafter runs/a/drafter --target Qwen/Qwen3-4B --engine vllm -- --max-model-len 4096

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; or the engine cannot be asked.
    """
    _check_options(config)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False)
    claim = contextlib.nullcontext() if config.out is None else claimed(config.out)
    with claim, scratch_folder() as scratch:
        run = _Run(config, scratch)
        compared, texts = run.compare()
        console.print(comparison_table(compared, run.dtype))
        if compared.not_compared:
            console.print(f"the export was not compared: {compared.not_compared}", markup=False)
        proposals = name = None
        if config.engine is not None and compared.not_compared is None:
            try:
                name, answers = run.ask_engine()
            except StopRequested as stop:
                return stop.status
            proposals = compare_proposals(
                run.target, run.drafter, answers, compared.allowed, read_files(run.directory), run.checkpoint.method
            )  # fmt: skip
            for table in proposal_tables(proposals, name):
                console.print(table)
        fault = parity_verdict(compared, proposals)
        if config.out is not None:
            with staged_directory(config.out, replace=True) as folder:
                write_json(
                    folder / REPORT,
                    report_figures(compared, proposals, name, fault)
                    | run.context()
                    | {"texts": texts},
                )
    console.print(fault or conclusion(proposals, name), markup=False, soft_wrap=True)
    return 1 if fault else 0


def _check_options(config: ParityConfig) -> None:
    """Raise ValueError for options that do not go together, before anything is loaded."""
    exported = config.exported
    if (config.drafter is None) == (config.design is None):
        raise ValueError("give either --drafter DIR or --design PRESET, not both")
    if config.design is not None:
        check_design(config.design)
    if config.design is not None and exported is not None:
        raise ValueError("--exported is of a drafter that you have: leave out --design")
    engine_options = {"--draft_tokens": config.draft_tokens, "flags after --": config.vllm_args}
    names = [name for name, value in engine_options.items() if value]
    if config.engine is None and names:
        raise ValueError(
            f"{', '.join(names)} would go to vLLM, which is not asked without --engine vllm"
        )
    if config.engine is not None:
        find_vllm()
        check_flags(config.vllm_args)
        if "--dtype" in map(flag_of, config.vllm_args):
            raise ValueError(
                "--dtype after -- is not passed on: vLLM runs in the target's, give --target.dtype"
            )
        if config.target.dtype == "float64":
            raise ValueError("vLLM has no float64: give --target.dtype float32 with --engine vllm")
    if exported is not None:
        if not exported.is_dir():
            raise ValueError(f"{exported}: no such directory")
        check_unchanged(exported)
    if config.max_new_tokens < config.depth + 3:
        raise ValueError(
            f"max_new_tokens is {config.max_new_tokens}: depth {config.depth} needs at least {config.depth + 3}"
        )


class _Run:
    """The target and drafter that are compared, and the files that an engine is to serve."""

    def __init__(self, config: ParityConfig, scratch: Path) -> None:
        """Load or make the drafter, load its target and prove it, and export.

        The export keeps the drafter's own dtype; only then is the drafter converted.
        """
        self.config = config
        saved = None if config.drafter is None else load_drafter(config.drafter, dtype=None)
        self.target = target = config.target.load(config.device)
        target.prove()
        if saved is None:
            assert config.design is not None
            saved = loud_drafter(target, loud_spec(target, config.design))
        self.drafter = saved
        self.dtype = str(target.dtype).removeprefix("torch.")
        masks = saved.config.drafting.fixed_drafts
        self.drafts = drafts_of(masks, config.draft_tokens) if config.engine else 0
        self.depth = min(config.depth, masks - 1) if masks else config.depth
        if config.prompts:
            prompts = load_prompts(config.prompts, config.limit)
        else:
            texts = enumerate(PROMPTS[: config.limit])
            prompts = [Prompt(f"built-in-{n}", None, None, None, text) for n, text in texts]
        self.prompts, _ = first_turns(target, prompts, config.max_new_tokens + self.drafts)
        subject = subject_of(saved, target)
        self.directory = config.exported or scratch / "served"
        self.checkpoint = DrafterCheckpoint.of(self.directory.resolve(), subject)
        self.refused: str | None = None  # why the engine cannot express the drafter
        if config.exported is not None:
            warn_unless_made_for(target, saved)
            warn_if_rounded(saved, target, subject)
        else:
            try:
                export_drafter(saved, target, self.directory)
            except NotServable as error:
                self.refused = str(error)
        check_pair(target, saved.to(target.device, target.dtype))

    def context(self) -> dict[str, Any]:
        """Return what the report says in addition to its figures."""
        config = self.config
        return {
            "drafter": config.drafter,
            "design": config.design,
            "exported": config.exported and str(config.exported),
            "target": self.target.identity,
            "method": self.checkpoint.method,
            "dtype": self.dtype,
            "provenance": provenance(),
        }

    def compare(self) -> tuple[Compared, int]:
        """Compare training, decoding and the files on the target's own answers; return how many these are, too."""
        numbered = [(str(n), ids) for n, ids in enumerate(self.prompts)]
        with progress("the target's answers", "text", len(numbered)) as done:
            texts = answered_texts(
                self.target, numbered, self.config.max_new_tokens, to_end=False, advance=done
            )
        exported = None if self.refused else self.directory
        with progress("comparing", "text", len(texts)) as done:
            compared = compare_drafting(
                self.target, self.drafter, texts, self.depth, exported, self.checkpoint.method, done
            )
        return compared._replace(not_compared=self.refused or compared.not_compared), len(texts)

    def ask_engine(self) -> tuple[str, list[RecordedAnswer]]:
        """Run vLLM on the prompts as it would be served; return its name and version, and the recorded answers.

        Raises:
            ValueError: it does not run.
            StopRequested: a signal came.
        """
        config = self.config
        serve = vllm_arguments(config.target, self.checkpoint, self.drafts)[1:]
        arguments = [*serve, "--dtype", self.dtype, *config.vllm_args]
        with stop_on_signals(), ProposalEngine.started() as engine:
            name = f"vLLM {engine.version} ({RUNNER})"
            log.info("%s loads target and drafter and answers %d prompts", name, len(self.prompts))
            return name, engine.ask(arguments, self.prompts, config.max_new_tokens + self.drafts)


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


def proposal_tables(comparison: ProposalComparison, name: str) -> list[Table]:
    """Return tables of the proposals by place in the pass, of the first differences, and of the faults they show."""
    counts = Table(
        "draft",
        "proposals",
        "near-ties",
        "different",
        "accepted by vLLM",
        "by this drafter",
        "verdict",
    )
    counts.title = f"what {name} proposes and what this drafter says"
    for position in comparison.positions:
        counts.add_row(*map(str, astuple(position)), position.verdict)
    tables = [counts]
    if comparison.differences:
        examples = Table(
            "text", "place", "draft", "vLLM's token", "this drafter's", "margin, of the range"
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
        return "NOT SERVED: vLLM cannot serve this drafter (the reason is above); training and decoding agree"
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
        "rows": rows,
        "engine": engine,
    }
