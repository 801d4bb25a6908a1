"""``specdec serve``: a target in vLLM or llama.cpp with a drafter, until Ctrl-C, or as long as a measurement takes."""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specdec.engines.bench import BenchOptions, EngineLaunch, bench_drafter
from specdec.engines.llama import LlamaLaunch, find_llama_server, target_file
from specdec.engines.server import TIMEOUT, VllmLaunch, drafter_checkpoint
from specdec.target import TargetSource
from specdec.utils.files import scratch_folder
from specdec.utils.numbers import Count, Depth, NonNegative, Port, Positive, Share, Side, Tokens
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import how_many
from specdec.utils.vllm import find_vllm

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What is served, by which engine, and what is measured.

    Args:
        target: the model that it drafts for
        drafter: a drafter's directory, or an export of one for the engine
        engine: vllm or llama.cpp, which is the llama-server that $SPECDEC_LLAMA_SERVER names, else that of the PATH,
            else the package xllamacpp
        target_gguf: for llama.cpp, the target as a GGUF file; by default --target if it is one
        draft_tokens: drafts a pass, 3 or a block drafter's masks if not given; several of --bench
        min_probability: for llama.cpp, its p_min: a draft of less probability ends the chain; 0 drafts to the end
        host: address to listen on
        port: port to listen on; 0 takes a free one, as --bench does
        vllm: a Python that has vLLM; by default $SPECDEC_VLLM_PYTHON, else this environment
        timeout: seconds until the engine must be healthy
        log_file: a new file for what the engine says; without it only its end is shown, if it fails
        bench: prompts as of specdec evaluate, of conversations the first turn: measure with them and end
        limit: use the first prompts of --bench only
        concurrency: users at a time, of --bench
        max_new_tokens: new tokens per answer, of --bench
        temperature: 0 for greedy decoding, of --bench
        ignore_eos: continue after the end of a text, of --bench
        out: directory for the results of --bench; it must not exist yet
        engine_args: flags for vllm serve or llama-server: give them after --
    """

    target: TargetSource = field(default_factory=TargetSource)
    drafter: Path
    engine: Literal["vllm", "llama.cpp"] = "vllm"
    target_gguf: Path | None = None
    draft_tokens: list[Depth] = field(default_factory=list)
    min_probability: Share = 0.0
    host: str = "127.0.0.1"
    port: Port = 8000
    vllm: str | None = None
    timeout: Positive = TIMEOUT
    log_file: Path | None = None
    bench: list[str] = field(default_factory=list)
    limit: Count | None = None
    concurrency: list[Side] = field(default_factory=lambda: [1, 4, 16])
    max_new_tokens: Tokens = 128
    temperature: NonNegative = 0.0
    ignore_eos: bool = False
    out: Path | None = None
    engine_args: list[str] = field(default_factory=list)


def serve(config: ServeConfig) -> int:
    """Serve a target in vLLM or llama.cpp with a drafter, until Ctrl-C; the URL goes to standard output once it is
    healthy.

    With --bench the target is served with the drafter and then alone, both answer the same prompts, and a table
    compares them: vLLM is asked by its own vllm bench serve (which needs pandas in vLLM's environment), llama.cpp by
    specdec, with llama.cpp's own times and counters. With several --draft_tokens each is served, and for vLLM
    schedule.json has the fastest at each concurrency as vLLM and SGLang take it. Flags of vllm serve or llama-server go
    after --. The exit status is 0 if it was stopped while it served, 2 if the engine ended by itself.

    Example: specdec serve --target Qwen/Qwen3-4B --drafter runs/a/drafter -- --gpu-memory-utilization 0.8
    """
    if not config.bench:
        _check_without_bench(config.draft_tokens, config.limit, config.out)
    launch = _launch(config)
    if config.bench:
        options = BenchOptions(
            config.bench, config.limit, sorted(set(config.draft_tokens)), config.concurrency, config.max_new_tokens,
            config.temperature, config.ignore_eos, config.out,
        )  # fmt: skip
        return _bench_until_done(launch, config.drafter, options)
    return _serve_until_stopped(launch, config.drafter, config.log_file)


def _launch(config: ServeConfig) -> EngineLaunch:
    """Return how the engine is started; ValueError if it is not there, or an option is not its."""
    port = 0 if config.bench else config.port
    first = next(iter(config.draft_tokens), None)
    settings = (config.host, port, config.timeout, first, tuple(config.engine_args))
    if config.engine == "llama.cpp":
        if config.vllm:
            raise ValueError("--vllm goes with --engine vllm only")
        file = target_file(config.target, config.target_gguf)
        return LlamaLaunch(
            find_llama_server(),
            config.target,
            file,
            *settings,
            min_probability=config.min_probability,
        )
    if config.target_gguf:
        raise ValueError("--target_gguf goes with --engine llama.cpp only")
    if config.min_probability:
        raise ValueError(
            "--min_probability goes with --engine llama.cpp only: vLLM drafts as many for each batch size as "
            "--draft_tokens says"
        )
    return VllmLaunch(find_vllm(config.vllm), config.target, *settings)


def _check_without_bench(draft_tokens: list[int], limit: int | None, out: Path | None) -> None:
    """Raise ValueError for arguments that only --bench takes."""
    if out or limit:
        raise ValueError("--out and --limit are of --bench")
    if len(draft_tokens) > 1:
        raise ValueError(f"--draft_tokens {draft_tokens}: give one number, or several with --bench")


def _bench_until_done(launch: EngineLaunch, drafter: Path, options: BenchOptions) -> int:
    """Measure, and return the exit status: 0, or that of the signal that ended it."""
    try:
        with stop_on_signals():
            bench_drafter(launch, drafter, options)
    except StopRequested as stop:
        return stop.status
    return 0


def _serve_until_stopped(launch: EngineLaunch, drafter: Path, log_file: Path | None) -> int:
    """Serve, print the URL, and return the exit status: 0 for a stop while it served."""
    serving = False
    try:
        with stop_on_signals(), scratch_folder() as scratch:
            checkpoint = drafter_checkpoint(
                drafter, launch.target, scratch / "drafter", launch.format
            )
            with launch.server(checkpoint, log_file or scratch / "server.log") as server:
                serving = True  # whoever reads the address may end it
                sys.stdout.write(f"{server.url}\n")
                sys.stdout.flush()
                drafts = how_many(checkpoint.drafts(launch.draft_tokens), "token")
                method = checkpoint.method
                log.info("%s drafts %s a pass, method %s; Ctrl-C stops it", drafter, drafts, method)
                server.wait()
    except StopRequested as stop:
        return 0 if serving else stop.status
    return 0
