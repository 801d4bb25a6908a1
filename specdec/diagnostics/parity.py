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
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

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


def parity(
    *,
    drafter: str | None = None,
    design: str | None = None,
    target: TargetSource = TargetSource(),  # noqa: B008  frozen
    exported: Path | None = None,
    prompts: list[str] = [],  # noqa: B006  read only
    limit: Count | None = 4,
    max_new_tokens: Tokens = 32,
    depth: Annotated[int, Range(0, 63)] = 7,
    device: str = "cpu",
    engine: Literal["vllm"] | None = None,
    draft_tokens: Depth | None = None,
    vllm_args: list[str] = [],  # noqa: B006
    out: Path | None = None,
) -> int:
    """Check that training, decoding, the export and, with --engine, vLLM draft the same tokens.

    Training's unroll, cached decoding and the exported files, as an independent reference of vLLM reads them, are
    compared at places of the same texts. With --engine vllm a real vLLM answers the same prompts, and every token that
    its drafter proposes is compared, too; the report says how many of these depend on more than the last token, and
    which faults they could not have shown. The exit status is 0 if everything is the same, and 1 if anything differs,
    the export cannot be compared, or too few proposals depend on the context for a verdict.

    Example: specdec parity --drafter runs/a/drafter --target Qwen/Qwen3-4B --engine vllm -- --max-model-len 4096

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

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; or the engine cannot be asked.
    """
    _check_options(
        drafter, design, exported, engine, draft_tokens, vllm_args, target, max_new_tokens, depth
    )
    claim = contextlib.nullcontext() if out is None else claimed(out)
    with claim, scratch_folder() as scratch:
        pair = _load(drafter, design, target, device)
        drafts, depth = _depths(pair, engine, draft_tokens, depth)
        asked = _prompt_ids(pair.target, prompts, limit, max_new_tokens + drafts)
        export = _export(pair, exported, scratch)
        # Only now is the drafter converted: the export keeps its own dtype.
        check_pair(pair.target, pair.drafter.to(pair.target.device, pair.target.dtype))
        compared, texts = _compare(pair, export, asked, max_new_tokens, depth)
        console = Console(
            file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False
        )
        _show_compared(console, compared, pair.dtype)
        proposals = name = None
        if engine is not None and compared.not_compared is None:
            tokens = max_new_tokens + drafts
            try:
                name, answers = _ask_engine(pair, export, target, asked, tokens, drafts, vllm_args)
            except StopRequested as stop:
                return stop.status
            proposals = _compare_proposals(pair, export, answers, compared.allowed)
            _show_proposals(console, proposals, name)
        fault = parity_verdict(compared, proposals)
        if out is not None:
            report = report_figures(compared, proposals, name, fault) | {
                "drafter": drafter,
                "design": design,
                "exported": exported and str(exported),
                "target": pair.target.identity,
                "method": export.method,
                "dtype": pair.dtype,
                "texts": len(texts),
                "provenance": provenance(),
            }
            with staged_directory(out, replace=True) as folder:
                write_json(folder / REPORT, report)
    console.print(fault or conclusion(proposals, name), markup=False, soft_wrap=True)
    return 1 if fault else 0


def _prompt_ids(
    target: Target, files: list[str], limit: int | None, new_tokens: int
) -> list[list[int]]:
    """Return the first turns of the prompts in these files, or the built-in ones."""
    prompts = [
        Prompt(f"built-in-{n}", None, None, None, text) for n, text in enumerate(PROMPTS[:limit])
    ]
    if files:
        prompts = load_prompts(files, limit)
    ids, _ = first_turns(target, prompts, new_tokens)
    return ids


def _check_options(
    drafter: str | None, design: str | None, exported: Path | None, engine: str | None, draft_tokens: int | None,
    vllm_args: Sequence[str], target: TargetSource, max_new_tokens: int, depth: int,
) -> None:  # fmt: skip
    """Raise ValueError for options that do not go together, before anything is loaded."""
    if (drafter is None) == (design is None):
        raise ValueError("give either --drafter DIR or --design PRESET, not both")
    if design is not None:
        check_design(design)
    if design is not None and exported is not None:
        raise ValueError("--exported is of a drafter that you have: leave out --design")
    engine_options = {"--draft_tokens": draft_tokens, "flags after --": vllm_args}
    names = [name for name, value in engine_options.items() if value]
    if engine is None and names:
        raise ValueError(
            f"{', '.join(names)} would go to vLLM, which is not asked without --engine vllm"
        )
    if engine is not None:
        _check_engine_options(vllm_args, target)
    if exported is not None:
        if not exported.is_dir():
            raise ValueError(f"{exported}: no such directory")
        check_unchanged(exported)
    if max_new_tokens < depth + 3:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}: depth {depth} needs at least {depth + 3}"
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


def _load(drafter: str | None, design: str | None, source: TargetSource, device: str) -> _Pair:
    """Load or make the drafter, load its target and prove it."""
    saved = None if drafter is None else load_drafter(drafter, dtype=None)
    target = source.load(device)
    target.prove()
    if saved is not None:
        return _Pair(target, saved)
    assert design is not None
    return _Pair(target, loud_drafter(target, loud_spec(target, design)))


def _depths(
    pair: _Pair, engine: str | None, draft_tokens: int | None, depth: int
) -> tuple[int, int]:
    """Return the engine's drafts a pass, 0 without an engine, and the depth of the last draft compared."""
    masks = pair.drafter.config.drafting.fixed_drafts
    drafts = drafts_of(masks, draft_tokens) if engine else 0
    return drafts, min(depth, (masks or depth + 1) - 1)


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
    pair: _Pair, export: _Export, source: TargetSource, asked: Sequence[list[int]], tokens: int, drafts: int,
    vllm_args: Sequence[str],
) -> tuple[str, list[RecordedAnswer]]:  # fmt: skip
    """Run vLLM on the prompts as it would be served; return its name and version, and the recorded answers.

    Raises:
        ValueError: it does not run.
        StopRequested: a signal came.
    """
    python = find_vllm()[0]
    serve = vllm_arguments(source, export.checkpoint, drafts, python)[1:]
    with stop_on_signals(), ProposalEngine.started() as engine:
        name = f"vLLM {engine.version} ({RUNNER})"
        log.info("%s loads target and drafter and answers %d prompts", name, len(asked))
        return name, engine.ask([*serve, "--dtype", pair.dtype, *vllm_args], asked, tokens)


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
