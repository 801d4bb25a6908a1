"""``specdec serve``: a target in vLLM with a drafter, until Ctrl-C, or for as long as ``vllm bench serve`` takes."""

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.engines.client import KEY
from specdec.engines.server import TIMEOUT, VllmLaunch, drafter_checkpoint, failure_reason
from specdec.evaluation.prompts import PromptConversation, load_prompts, without_blank
from specdec.evaluation.tune import SCHEDULE, schedules
from specdec.report.tables import ReportTable, print_report
from specdec.target import TargetSource
from specdec.utils.config import new_run
from specdec.utils.files import scratch_folder, staged_directory, write_json
from specdec.utils.machine import provenance
from specdec.utils.numbers import Count, Depth, NonNegative, Port, Positive, Side, Tokens
from specdec.utils.progress import progress
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import how_many
from specdec.utils.vllm import find_vllm

log = logging.getLogger(__name__)

ROUNDS = 4  # requests of each user, at least
HEADINGS = (
    "Users", "", "Tokens/s", "First token, ms", "Between tokens, ms", "Acceptance length", "by position, %",
    "Identical outputs",
)  # fmt: skip
CAPTION = (
    "latencies: median and 95th percentile over requests; by position: share of passes that accepted so many drafts; "
    "x: times the same requests without the drafter"
)


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
        ignore_eos: go on behind the end of a text, of --bench
        out: directory for the results of --bench; it must not exist yet
        vllm_args: flags for vllm serve: give them after --
    """
    if (out or limit) and not bench:
        raise ValueError("--out and --limit are of --bench")
    if len(draft_tokens) > 1 and not bench:
        raise ValueError(f"--draft_tokens {draft_tokens}: give one number, or several with --bench")
    port = 0 if bench else port
    launch = VllmLaunch(
        find_vllm(vllm),
        target,
        host,
        port,
        timeout,
        next(iter(draft_tokens), None),
        tuple(vllm_args),
    )
    serving = False
    try:
        with stop_on_signals(), scratch_folder() as scratch:
            if bench:
                asked = sorted(set(draft_tokens))
                _bench(
                    launch,
                    drafter,
                    asked,
                    bench,
                    limit,
                    concurrency,
                    max_new_tokens,
                    temperature,
                    ignore_eos,
                    out,
                )
                return 0
            made = drafter_checkpoint(drafter, target, scratch / "drafter")
            with launch.server(made, log_file or scratch / "server.log") as server:
                serving = True  # whoever reads the address may end it
                sys.stdout.write(f"{server.url}\n")
                sys.stdout.flush()
                often = how_many(made.drafts(launch.draft_tokens), "token")
                log.info(
                    "%s drafts %s a pass, method %s; Ctrl-C stops it", drafter, often, made.method
                )
                server.wait()
    except StopRequested as asked:
        return 0 if serving else asked.status
    return 0


def as_text(prompts: Sequence[list[int]], tokenizer: Any) -> tuple[list[str], bool]:
    """The texts of which a server makes these prompts' token ids, and whether it is to add the special tokens.

    A tokenizer with ``split_special_tokens`` reads ``<s>`` in a text as characters: only adding it gives the token.
    Where some prompts come out otherwise whichever way, it is logged of how many, for the better one.
    """
    ways = []
    for special in (False, True):
        texts = [tokenizer.decode(ids, skip_special_tokens=special) for ids in prompts]
        again = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
        ways.append(
            (sum(one != ids for one, ids in zip(again, prompts, strict=True)), special, texts)
        )
    wrong, special, texts = min(ways)
    if wrong:
        log.warning(
            "%d of %s are other tokens to vLLM than to specdec",
            wrong,
            how_many(len(prompts), "prompt"),
        )
    return texts, special


def _bench(
    launch: VllmLaunch, drafter: Path, draft_tokens: Sequence[int], prompts: Sequence[str], limit: int | None,
    concurrency: Sequence[int], max_new_tokens: int, temperature: float, ignore_eos: bool, out: Path | None,
) -> None:  # fmt: skip
    """Serve the target with each number of drafts a pass, and alone, let vLLM measure all, and print the table."""
    tokenizer = launch.target.load_tokenizer()
    levels = sorted(set(concurrency))
    ids = [
        PromptConversation(one, tokenizer).next_ids() or []
        for one in without_blank(load_prompts(prompts, limit))
    ]
    texts, special = as_text(ids, tokenizer)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    body = {"add_special_tokens": special, "repetition_penalty": 1.0}
    with (
        staged_directory(out or new_run("bench")) as folder,
        scratch_folder() as scratch,
        progress("bench", "run", (max(len(draft_tokens), 1) + 1) * len(levels)) as advance,
    ):
        data = scratch / "prompts.jsonl"
        data.write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8"
        )
        made = drafter_checkpoint(drafter, launch.target, scratch / "drafter")
        several = len(draft_tokens) > 1
        each = [made.drafts(asked) for asked in draft_tokens] or [made.drafts(None)]
        kinds = {f"drafter-{drafts}" if several else "drafter": drafts for drafts in each}
        for name, drafts in (*kinds.items(), ("baseline", 0)):
            served = replace(launch, draft_tokens=drafts or None)
            with served.server(
                made if drafts else None, scratch / f"{name}.log", caching=False
            ) as server:
                for users in levels:
                    command = [
                        *launch.vllm, "bench", "serve", "--base-url", server.url, "--model", launch.target.directory(),
                        "--backend", "openai", "--endpoint", "/v1/completions", "--extra-body", json.dumps(body),
                        "--dataset-name", "custom", "--dataset-path", str(data), "--skip-chat-template",
                        "--disable-shuffle", "--custom-output-len", str(max_new_tokens), "--temperature",
                        str(temperature), *(["--ignore-eos"] if ignore_eos else []), "--max-concurrency", str(users),
                        "--num-prompts", str(max(len(texts), ROUNDS * users)), "--num-warmups", str(users),
                        "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "95", "--disable-tqdm",
                        "--save-result", "--save-detailed",
                    ]  # fmt: skip
                    found[name, users] = _measured(
                        command, folder / f"{name}-{users}.json", scratch / "bench.log"
                    )
                    advance(1)
        write_json(folder / "provenance.json", provenance())
        if several:
            names = {0: "baseline"} | {drafts: name for name, drafts in kinds.items()}
            fastest = {
                users: max(
                    (found[name, users]["output_throughput"], drafts)
                    for drafts, name in names.items()
                )[1]
                for users in levels
            }
            write_json(folder / SCHEDULE, schedules(fastest))
    rows = []
    for users, name in itertools.product(levels, kinds):
        ours = found[name, users]
        plain = found["baseline", users]
        pairs = zip(ours["generated_texts"], plain["generated_texts"], strict=True)
        same = (
            f"{sum(one == two for one, two in pairs)} of {len(ours['errors'])}"
            if temperature == 0
            else "-"
        )
        times = ours["output_throughput"] / plain["output_throughput"]
        length = ours.get("spec_decode_acceptance_length")
        shares = ours.get("spec_decode_per_position_acceptance_rates")
        accepted = (
            f"{length:.2f}" if length else "-",
            " ".join(f"{100 * share:.0f}" for share in shares or ()) or "-",
        )
        rows.append([str(users), name, *_speeds(ours, f" ({times:.2f}x)"), *accepted, same])
        if name == [*kinds][-1]:
            rows.append([str(users), "baseline", *_speeds(plain), "-", "-", "-"])
    print_report([ReportTable("vllm bench serve", HEADINGS, rows, left=2)], [CAPTION])


def _measured(command: Sequence[str], result: Path, said: Path) -> dict[str, Any]:
    """The JSON of one ``vllm bench serve``; ValueError with the last it ``said``, where a request has no answer."""
    environment = os.environ | ({"OPENAI_API_KEY": os.environ[KEY]} if KEY in os.environ else {})
    command = [*command, "--result-dir", str(result.parent), "--result-filename", result.name]
    with said.open("wb") as log:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False
        )
    if done.returncode or not result.exists():
        raise ValueError(
            f"vllm bench serve ended with status {done.returncode}: {failure_reason(said)}"
        )
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if failed := [error for error in found["errors"] if error]:
        raise ValueError(
            f"{how_many(len(failed), 'request')} without an answer: {' '.join(failed[0].split())[:240]}"
        )
    return found


def _speeds(run: dict[str, Any], times: str = "") -> list[str]:
    """Cells of the table."""
    delays = [
        f"{run[f'median_{of}_ms']:.1f} / {run[f'p95_{of}_ms']:.1f}" for of in ("ttft", "tpot")
    ]
    return [f"{run['output_throughput']:,.1f}{times}", *delays]
