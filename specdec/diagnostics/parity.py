"""``specdec parity``: is what was trained what is decoded, and what a real vLLM proposes, token by token?

Three ways of running one drafter are compared at the same places of the same texts: training's unroll, cached decoding,
and the exported files as an independent reference of vLLM reads them. With ``--engine vllm`` a real vLLM answers the
same prompts in its own environment, and each token that its drafter proposes is compared with this drafter's.

Legend: A passes, K drafts, T tokens, V vocabulary.
"""

import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from rich.console import Console

from specdec.decoding import check_pair, warn_unless_made_for
from specdec.diagnostics.anchors import AnsweredText, answered_texts
from specdec.diagnostics.loud import check_design, loud_drafter, loud_spec
from specdec.diagnostics.parity_compare import Compared, compare_drafting
from specdec.diagnostics.parity_files import read_files
from specdec.diagnostics.parity_proposals import ProposalComparison, compare_proposals
from specdec.diagnostics.parity_report import (
    comparison_table,
    conclusion,
    parity_verdict,
    proposal_tables,
    report_figures,
)
from specdec.drafter import Drafter, load_drafter
from specdec.engines.proposals import ProposalEngine, RecordedAnswer
from specdec.engines.server import check_flags, flag_of
from specdec.evaluation.prompts import Prompt, first_turns, load_prompts
from specdec.export import NotServable, export_drafter, subject_of
from specdec.export.checkpoint import check_unchanged
from specdec.export.formats import DrafterCheckpoint, drafts_of, vllm_arguments
from specdec.export.write import warn_if_rounded
from specdec.target import Target, TargetSource
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
        pair = _load(config)
        drafts, depth = _depths(pair, config)
        prompts = _prompt_ids(pair.target, config, drafts)
        export = _export(pair, config.exported, scratch)
        # Only now is the drafter converted: the export keeps its own dtype.
        check_pair(pair.target, pair.drafter.to(pair.target.device, pair.target.dtype))
        compared, texts = _compare(pair, export, prompts, config.max_new_tokens, depth)
        _show_compared(console, compared, pair.dtype)
        proposals = name = None
        if config.engine is not None and compared.not_compared is None:
            try:
                name, answers = _ask_engine(pair, export, config, prompts, drafts)
            except StopRequested as stop:
                return stop.status
            proposals = _compare_proposals(pair, export, answers, compared.allowed)
            _show_proposals(console, proposals, name)
        fault = parity_verdict(compared, proposals)
        if config.out is not None:
            figures = report_figures(compared, proposals, name, fault)
            report = figures | _report_context(config, pair, export, len(texts))
            with staged_directory(config.out, replace=True) as folder:
                write_json(folder / REPORT, report)
    console.print(fault or conclusion(proposals, name), markup=False, soft_wrap=True)
    return 1 if fault else 0


def _report_context(
    config: ParityConfig, pair: "_Pair", export: "_Export", texts: int
) -> dict[str, Any]:
    """Return what the report says beside its figures."""
    return {
        "drafter": config.drafter,
        "design": config.design,
        "exported": config.exported and str(config.exported),
        "target": pair.target.identity,
        "method": export.method,
        "dtype": pair.dtype,
        "texts": texts,
        "provenance": provenance(),
    }


def _prompt_ids(target: Target, config: ParityConfig, drafts: int) -> list[list[int]]:
    """Return the first turns of the prompts that are named, or of the built-in ones."""
    if config.prompts:
        prompts = load_prompts(config.prompts, config.limit)
    else:
        texts = PROMPTS[: config.limit]
        prompts = [Prompt(f"built-in-{n}", None, None, None, text) for n, text in enumerate(texts)]
    ids, _ = first_turns(target, prompts, config.max_new_tokens + drafts)
    return ids


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
        _check_engine_options(config.vllm_args, config.target)
    if exported is not None:
        if not exported.is_dir():
            raise ValueError(f"{exported}: no such directory")
        check_unchanged(exported)
    if config.max_new_tokens < config.depth + 3:
        raise ValueError(
            f"max_new_tokens is {config.max_new_tokens}: depth {config.depth} needs at least {config.depth + 3}"
        )


def _check_engine_options(vllm_args: Sequence[str], target: TargetSource) -> None:
    find_vllm()
    check_flags(vllm_args)
    if "--dtype" in map(flag_of, vllm_args):
        raise ValueError(
            "--dtype after -- is not passed on: vLLM runs in the target's, give --target.dtype"
        )
    if target.dtype == "float64":
        raise ValueError("vLLM has no float64: give --target.dtype float32 with --engine vllm")


class _Pair(NamedTuple):
    """The target and drafter that are compared."""

    target: Target
    drafter: Drafter

    @property
    def dtype(self) -> str:
        """The dtype of everything compared."""
        return str(self.target.dtype).removeprefix("torch.")


class _Export(NamedTuple):
    """The files that an engine is to serve."""

    directory: Path
    checkpoint: DrafterCheckpoint
    refused: str | None  # why there are none

    @property
    def method(self) -> str:
        """The engines' name of the drafter's kind."""
        return self.checkpoint.method


def _load(config: ParityConfig) -> _Pair:
    """Load or make the drafter, load its target and prove it."""
    saved = None if config.drafter is None else load_drafter(config.drafter, dtype=None)
    target = config.target.load(config.device)
    target.prove()
    if saved is not None:
        return _Pair(target, saved)
    assert config.design is not None
    return _Pair(target, loud_drafter(target, loud_spec(target, config.design)))


def _depths(pair: _Pair, config: ParityConfig) -> tuple[int, int]:
    """Return the engine's drafts a pass, 0 without an engine, and the depth of the last draft compared."""
    masks = pair.drafter.config.drafting.fixed_drafts
    drafts = drafts_of(masks, config.draft_tokens) if config.engine else 0
    return drafts, min(config.depth, masks - 1) if masks else config.depth


def _export(pair: _Pair, exported: Path | None, scratch: Path) -> _Export:
    """Return the given files, or new ones; with the reason if the engine cannot express the drafter."""
    subject = subject_of(pair.drafter, pair.target)
    directory = exported or scratch / "served"
    checkpoint = DrafterCheckpoint.of(directory.resolve(), subject)
    if exported is not None:
        warn_unless_made_for(pair.target, pair.drafter)
        warn_if_rounded(pair.drafter, pair.target, subject)
        return _Export(directory, checkpoint, None)
    try:
        export_drafter(pair.drafter, pair.target, directory)
    except NotServable as error:
        return _Export(directory, checkpoint, str(error))
    return _Export(directory, checkpoint, None)


def _compare(
    pair: _Pair, export: _Export, asked: Sequence[list[int]], max_new_tokens: int, depth: int
) -> tuple[Compared, list[AnsweredText]]:
    """Compare training, decoding and the files on the target's own answers."""
    numbered = [(str(n), ids) for n, ids in enumerate(asked)]
    with progress("the target's answers", "text", len(asked)) as done:
        texts = answered_texts(
            pair.target, numbered, max_new_tokens, to_end=False, on_answer=lambda: done(1)
        )
    directory = None if export.refused else export.directory
    with progress("comparing", "text", len(texts)) as done:
        compared = compare_drafting(
            pair.target, pair.drafter, texts, depth, directory, export.method, lambda: done(1)
        )
    return compared._replace(not_compared=export.refused or compared.not_compared), texts


def _ask_engine(
    pair: _Pair, export: _Export, config: ParityConfig, prompts: Sequence[list[int]], drafts: int
) -> tuple[str, list[RecordedAnswer]]:
    """Run vLLM on the prompts as it would be served; return its name and version, and the recorded answers.

    Raises:
        ValueError: it does not run.
        StopRequested: a signal came.
    """
    serve = vllm_arguments(config.target, export.checkpoint, drafts)[1:]
    arguments = [*serve, "--dtype", pair.dtype, *config.vllm_args]
    with stop_on_signals(), ProposalEngine.started() as engine:
        name = f"vLLM {engine.version} ({RUNNER})"
        log.info("%s loads target and drafter and answers %d prompts", name, len(prompts))
        return name, engine.ask(arguments, prompts, config.max_new_tokens + drafts)


def _compare_proposals(
    pair: _Pair, export: _Export, answers: Sequence[RecordedAnswer], share: float
) -> ProposalComparison:
    files = read_files(export.directory)
    with progress("comparing proposals", "text", len(answers)) as done:
        return compare_proposals(
            pair.target, pair.drafter, answers, share, files, export.method, lambda: done(1)
        )


def _show_compared(console: Console, compared: Compared, dtype: str) -> None:
    console.print(comparison_table(compared, dtype))
    if compared.not_compared:
        console.print(f"the export was not compared: {compared.not_compared}", markup=False)


def _show_proposals(console: Console, proposals: ProposalComparison, name: str) -> None:
    for table in proposal_tables(proposals, name):
        console.print(table)
