"""``specdec serve``: a target in vLLM with a drafter, until Ctrl-C, or for as long as its benchmark takes."""

import logging
import sys
import tempfile
from pathlib import Path

from specdec.engines.bench import bench as measure
from specdec.engines.server import TIMEOUT, VllmLaunch, drafter_checkpoint, find_vllm
from specdec.export.write import DRAFT_TOKENS
from specdec.target import TargetSource
from specdec.utils.signals import Asked, asked_to_end

log = logging.getLogger(__name__)


def serve(
    *,
    target: TargetSource = TargetSource(),  # noqa: B008
    drafter: Path,
    draft_tokens: int = DRAFT_TOKENS,
    host: str = "127.0.0.1",
    port: int = 8000,
    vllm: str | None = None,
    timeout: float = TIMEOUT,
    log_file: Path | None = None,
    bench: list[str] = [],  # noqa: B006
    limit: int | None = None,
    concurrency: list[int] = [1, 4, 16],  # noqa: B006
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    out: Path | None = None,
    vllm_args: list[str] = [],  # noqa: B006
) -> int:
    """Serve a target in vLLM with a drafter, until Ctrl-C; the URL goes to standard output once it is healthy.

    With --bench the target is served with the drafter and then alone, vLLM's own vllm bench serve asks both (it needs
    pandas in vLLM's environment), and a table compares them. Flags of vllm serve go after --. The exit status is 0 if
    it was stopped while it served, 2 if vLLM ended by itself.

    Example: specdec serve --target Qwen/Qwen3-4B --drafter runs/a/drafter -- --gpu-memory-utilization 0.8

    Args:
        drafter: a drafter's directory, or an export of one for vLLM
        draft_tokens: drafts a pass
        host: address to listen on
        port: port to listen on; 0 takes a free one
        vllm: a Python that has vLLM, or its executable; by default $SPECDEC_VLLM_PYTHON, else this environment
        timeout: seconds until vLLM must be healthy
        log_file: a new file for what vLLM says; without it only its end is shown, if it fails
        bench: prompts as of specdec evaluate, of conversations the first turn: measure with them and end
        limit: use the first prompts of --bench only
        concurrency: users at a time, of --bench
        max_new_tokens: new tokens per answer, of --bench
        temperature: 0 for greedy decoding, of --bench
        ignore_eos: go on behind the end of a text, of --bench
        out: directory for the results of --bench; it must not exist yet
        vllm_args: flags for vllm serve: give them after --

    Raises:
        ValueError: an argument is wrong, vLLM cannot serve the drafter, did not come up, or ended by itself.
    """
    launch = VllmLaunch(find_vllm(vllm), target, host, port, timeout, draft_tokens, tuple(vllm_args))
    serving = False
    try:
        with asked_to_end(), tempfile.TemporaryDirectory(prefix="specdec-serve-") as scratch:
            if bench:
                measure(launch, drafter, bench, limit, concurrency, max_new_tokens, temperature, ignore_eos, out)
                return 0
            made = drafter_checkpoint(drafter, target, Path(scratch) / "drafter")
            with launch.server(made, log_file or Path(scratch) / "server.log") as server:
                serving = True  # whoever reads the address may end it
                sys.stdout.write(f"{server.url}\n")
                sys.stdout.flush()
                log.info("%s drafts %d tokens a pass, method %s; Ctrl-C stops it", drafter, draft_tokens, made.method)
                server.wait()
    except Asked as asked:
        return 0 if serving else asked.status
    return 0
