"""``specdec serve``: a target in vLLM with a drafter, until Ctrl-C, or for as long as ``vllm bench serve`` takes."""

import logging
import sys
from pathlib import Path

from specdec.engines.bench import BenchOptions, bench_drafter
from specdec.engines.server import TIMEOUT, VllmLaunch, drafter_checkpoint
from specdec.target import TargetSource
from specdec.utils.files import scratch_folder
from specdec.utils.numbers import Count, Depth, NonNegative, Port, Positive, Side, Tokens
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import how_many
from specdec.utils.vllm import find_vllm

log = logging.getLogger(__name__)


def serve(
    *,
    target: TargetSource = TargetSource(),  # noqa: B008
    drafter: Path,
    draft_tokens: list[Depth] = [],  # noqa: B006
    host: str = "127.0.0.1",
    port: Port = 8000,
    vllm: str | None = None,
    timeout: Positive = TIMEOUT,
    log_file: Path | None = None,
    bench: list[str] = [],  # noqa: B006
    limit: Count | None = None,
    concurrency: list[Side] = [1, 4, 16],  # noqa: B006
    max_new_tokens: Tokens = 128,
    temperature: NonNegative = 0.0,
    ignore_eos: bool = False,
    out: Path | None = None,
    vllm_args: list[str] = [],  # noqa: B006
) -> int:
    """Serve a target in vLLM with a drafter, until Ctrl-C; the URL goes to standard output once it is healthy.

    With --bench the target is served with the drafter and then alone, vLLM's own vllm bench serve asks both (it needs
    pandas in vLLM's environment), and a table compares them. With several --draft_tokens each is served, and
    schedule.json has the fastest at each concurrency as vLLM and SGLang take it. Flags of vllm serve go after --. The
    exit status is 0 if it was stopped while it served, 2 if vLLM ended by itself.

    Example: specdec serve --target Qwen/Qwen3-4B --drafter runs/a/drafter -- --gpu-memory-utilization 0.8

    Args:
        drafter: a drafter's directory, or an export of one for vLLM
        draft_tokens: drafts a pass, 3 or a block drafter's masks if not given; several of --bench
        host: address to listen on
        port: port to listen on; 0 takes a free one, as --bench does
        vllm: a Python that has vLLM; by default $SPECDEC_VLLM_PYTHON, else this environment
        timeout: seconds until vLLM must be healthy
        log_file: a new file for what vLLM says; without it only its end is shown, if it fails
        bench: prompts as of specdec evaluate, of conversations the first turn: measure with them and end
        limit: use the first prompts of --bench only
        concurrency: users at a time, of --bench
        max_new_tokens: new tokens per answer, of --bench
        temperature: 0 for greedy decoding, of --bench
        ignore_eos: continue after the end of a text, of --bench
        out: directory for the results of --bench; it must not exist yet
        vllm_args: flags for vllm serve: give them after --
    """
    if not bench:
        _check_without_bench(draft_tokens, limit, out)
    listen_on = 0 if bench else port
    first = next(iter(draft_tokens), None)
    launch = VllmLaunch(find_vllm(vllm), target, host, listen_on, timeout, first, tuple(vllm_args))
    if bench:
        options = BenchOptions(
            bench, limit, sorted(set(draft_tokens)), concurrency, max_new_tokens, temperature, ignore_eos, out,
        )  # fmt: skip
        return _bench_until_done(launch, drafter, options)
    return _serve_until_stopped(launch, drafter, log_file)


def _check_without_bench(draft_tokens: list[int], limit: int | None, out: Path | None) -> None:
    """Raise ValueError for arguments that only --bench takes."""
    if out or limit:
        raise ValueError("--out and --limit are of --bench")
    if len(draft_tokens) > 1:
        raise ValueError(f"--draft_tokens {draft_tokens}: give one number, or several with --bench")


def _bench_until_done(launch: VllmLaunch, drafter: Path, options: BenchOptions) -> int:
    """Measure, and return the exit status: 0, or that of the signal that ended it."""
    try:
        with stop_on_signals():
            bench_drafter(launch, drafter, options)
    except StopRequested as stop:
        return stop.status
    return 0


def _serve_until_stopped(launch: VllmLaunch, drafter: Path, log_file: Path | None) -> int:
    """Serve, print the URL, and return the exit status: 0 for a stop while it served."""
    serving = False
    try:
        with stop_on_signals(), scratch_folder() as scratch:
            checkpoint = drafter_checkpoint(drafter, launch.target, scratch / "drafter")
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
