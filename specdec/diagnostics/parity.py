"""``specdec parity``: is what was trained what is decoded, and what a real engine proposes, token by token?

Three ways of running one drafter are compared at the same places of the same texts: training's unroll, cached decoding,
and the exported files as an independent reference of the engine reads them. With ``--engine vllm`` or ``llama.cpp`` a
real one answers the same prompts, and each token that its drafter proposes is compared with this drafter's.

Legend: A passes, K drafts, T tokens, V vocabulary.
"""

import contextlib
import logging
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from rich.console import Console

from specdec.decoding import check_pair, warn_unless_made_for
from specdec.diagnostics.anchors import answered_texts
from specdec.diagnostics.loud import check_design, loud_drafter, loud_spec
from specdec.diagnostics.parity_compare import Compared, compare_drafting
from specdec.diagnostics.parity_eight_bits import RoundedDrafter, rounded_drafter
from specdec.diagnostics.parity_files import read_files
from specdec.diagnostics.parity_gguf import FILE
from specdec.diagnostics.parity_proposals import compare_proposals
from specdec.diagnostics.parity_report import (
    comparison_table,
    conclusion,
    parity_verdict,
    proposal_tables,
    report_figures,
    rounding_sentences,
)
from specdec.drafter import load_drafter
from specdec.engines.llama import (
    LlamaLaunch,
    find_llama_server,
    target_file,
)
from specdec.engines.llama_proposals import ask_llama_cpp
from specdec.engines.proposals import ProposalEngine, RecordedAnswer
from specdec.engines.server import check_flags, flag_of
from specdec.evaluation.prompts import Prompt, first_turns, load_prompts
from specdec.export import NotServable, export_drafter, subject_of
from specdec.export.checkpoint import check_unchanged
from specdec.export.formats import DrafterCheckpoint, drafts_of, vllm_arguments
from specdec.export.quantize import INT8
from specdec.export.write import warn_if_rounded
from specdec.target import TargetSource
from specdec.utils.files import claimed, scratch_folder, staged_directory, write_json
from specdec.utils.machine import provenance
from specdec.utils.numbers import Count, Depth, Range, Tokens
from specdec.utils.progress import progress
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import how_many
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
            environment; or llama.cpp, the llama-server that $SPECDEC_LLAMA_SERVER names, else that of the PATH, else
            the package xllamacpp
        target_gguf: for llama.cpp, the target as an unquantized GGUF file; by default --target if it is one
        draft_tokens: tokens that the engine drafts per pass, as in specdec serve
        engine_args: flags of vllm serve or llama-server for the engine: give them after --
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
    engine: Literal["vllm", "llama.cpp"] | None = None
    target_gguf: Path | None = None
    draft_tokens: Depth | None = None
    engine_args: list[str] = field(default_factory=list)
    out: Path | None = None

    @property
    def format(self) -> str:
        """The format of ``export`` whose files are compared."""
        return "gguf" if self.engine == "llama.cpp" else "vllm"


def parity(config: ParityConfig) -> int:
    """Check that training, decoding, the export and, with --engine, vLLM or llama.cpp draft the same tokens.

    Training's unroll, cached decoding and the exported files, as an independent reference of the engine reads them, are
    compared at places of the same texts. With --engine a real engine answers the same prompts, and every token that its
    drafter proposes is compared, too; the report says how many of these depend on more than the last token, and which
    faults they could not have shown. The exit status is 0 if everything is the same, and 1 if anything differs,
    the export cannot be compared, or too few proposals depend on the context for a verdict.

    Example: specdec parity --drafter runs/a/drafter --target Qwen/Qwen3-4B --engine vllm -- --max-model-len 4096

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong; or the engine cannot be asked.
    """
    launch = _checked(config)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False)
    claim = contextlib.nullcontext() if config.out is None else claimed(config.out)
    with claim, scratch_folder() as scratch:
        run = _Run(config, launch, scratch)
        compared, texts = run.compare()
        for sentence in rounding_sentences(compared):
            console.print(sentence, markup=False, soft_wrap=True)
        console.print(comparison_table(compared, run.dtype))
        if compared.not_compared:
            console.print(f"the export was not compared: {compared.not_compared}", markup=False)
        proposals = name = None
        if config.engine is not None and compared.not_compared is None:
            try:
                name, answers, int8_error = run.ask_engine()
            except StopRequested as stop:
                return stop.status
            proposals = compare_proposals(
                run.target, run.drafter, answers, compared.allowed, read_files(run.directory), run.checkpoint.method
            )  # fmt: skip
            proposals = replace(proposals, int8_error=int8_error)
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


def _checked(config: ParityConfig) -> LlamaLaunch | None:
    """Return how llama.cpp is started, if it is asked; ValueError for options that do not go together, before
    anything is loaded."""
    exported = config.exported
    if (config.drafter is None) == (config.design is None):
        raise ValueError("give either --drafter DIR or --design PRESET, not both")
    if config.design is not None:
        check_design(config.design)
    if config.design is not None and exported is not None:
        raise ValueError("--exported is of a drafter that you have: leave out --design")
    if exported is not None:
        if not exported.is_dir():
            raise ValueError(f"{exported}: no such directory")
        layout = "gguf" if (exported / FILE).is_file() else "vllm"
        if config.engine is not None and layout != config.format:
            raise ValueError(
                f"{exported}: exported for another engine: export it again with --format {config.format}"
            )
        check_unchanged(exported)
    launch = _checked_engine(config)
    if config.max_new_tokens < config.depth + 3:
        raise ValueError(
            f"max_new_tokens is {config.max_new_tokens}: depth {config.depth} needs at least {config.depth + 3}"
        )
    return launch


def _checked_engine(config: ParityConfig) -> LlamaLaunch | None:
    """Return how llama.cpp is started, if it is asked; ValueError for options that an engine does not take."""
    launch = None
    engine_options = {"--draft_tokens": config.draft_tokens, "flags after --": config.engine_args}
    names = [name for name, value in engine_options.items() if value]
    if config.engine is None and names:
        raise ValueError(
            f"{', '.join(names)} would go to an engine, and none is asked without --engine"
        )
    if config.target_gguf is not None and config.engine != "llama.cpp":
        raise ValueError("--target_gguf goes with --engine llama.cpp only")
    if config.engine == "llama.cpp":
        launch = LlamaLaunch(
            find_llama_server(), config.target, target_file(config.target, config.target_gguf, is_exact=True), port=0,
            draft_tokens=config.draft_tokens, extra=config.engine_args,
        )  # fmt: skip
    if config.engine == "vllm":
        find_vllm()
        check_flags(config.engine_args)
        if "--dtype" in map(flag_of, config.engine_args):
            raise ValueError(
                "--dtype after -- is not passed on: vLLM runs in the target's, give --target.dtype"
            )
    if config.engine is not None and config.target.dtype == "float64":
        raise ValueError(f"--engine {config.engine} has no float64: give --target.dtype float32")
    return launch


class EngineAnswers(NamedTuple):
    """What an engine said."""

    name: str  # the engine's, and its version
    answers: list[RecordedAnswer]
    int8_error: float | None  # see ProposalEngine.int8_error; None if not measured


class _Run:
    """The target and drafter that are compared, and the files that an engine is to serve."""

    def __init__(self, config: ParityConfig, launch: LlamaLaunch | None, scratch: Path) -> None:
        """Load or make the drafter, load its target and prove it, and export.

        The export keeps the drafter's own dtype; only then is the drafter converted.
        """
        self.config = config
        self.launch = launch
        saved = None if config.drafter is None else load_drafter(config.drafter, dtype=None)
        self.target = target = config.target.load(config.device)
        target.prove()
        if saved is None:
            assert config.design is not None
            saved = loud_drafter(target, loud_spec(target, config.design))
        self.dtype = str(target.dtype).removeprefix("torch.")
        block_drafts = saved.config.drafting.fixed_drafts
        self.drafts = drafts_of(block_drafts, config.draft_tokens) if config.engine else 0
        self.depth = min(config.depth, block_drafts - 1) if block_drafts else config.depth
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
        self.rounded: RoundedDrafter | None = None  # of a quantized export
        if config.exported is not None:
            warn_unless_made_for(target, saved)
            warn_if_rounded(saved, target, subject)
            self.rounded = rounded_drafter(config.exported, saved, target, subject)
        else:
            try:
                export_drafter(saved, target, self.directory, config.format, served=config.target)
            except NotServable as error:
                self.refused = str(error)
        # What a quantized export stands for is compared three ways in place of what it was made of.
        self.drafter = saved if self.rounded is None else self.rounded.drafter
        check_pair(target, self.drafter.to(target.device, target.dtype))

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
        faults = None if self.rounded is None else tuple(self.rounded.faults)
        exported = None if self.refused or faults else self.directory
        with progress("comparing", "text", len(texts)) as done:
            compared = compare_drafting(
                self.target, self.drafter, texts, self.depth, exported, self.checkpoint.method, done
            )
        compared = compared._replace(
            not_compared=self.refused or compared.not_compared, rounding_faults=faults
        )
        return compared, len(texts)

    def ask_engine(self) -> EngineAnswers:
        """Run the engine on the prompts as it would be served.

        Raises:
            ValueError: it does not run.
            StopRequested: a signal came.
        """
        config = self.config
        tokens = config.max_new_tokens + self.drafts
        if self.launch is not None:
            exact = self.dtype == "float32"
            prompts = how_many(len(self.prompts), "prompt")
            log.info("llama.cpp loads target and drafter and answers %s", prompts)
            with stop_on_signals():
                name, answers = ask_llama_cpp(
                    self.launch, self.checkpoint, self.prompts, tokens, exact
                )
            return EngineAnswers(name, answers, None)
        serve = vllm_arguments(config.target, self.checkpoint, self.drafts)[1:]
        arguments = [*serve, "--dtype", self.dtype, *config.engine_args]
        with stop_on_signals(), ProposalEngine.started() as engine:
            name = f"vLLM {engine.version} ({RUNNER})"
            log.info("%s loads target and drafter and answers %d prompts", name, len(self.prompts))
            answers = engine.ask(arguments, self.prompts, tokens)
            is_int8 = self.rounded is not None and self.rounded.quantization is INT8
            int8_error = engine.int8_error() if is_int8 else None
        return EngineAnswers(name, answers, int8_error)
