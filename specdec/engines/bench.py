"""``specdec serve --bench``: a served target answers prompts with a drafter and alone.

vLLM is asked by its own ``vllm bench serve``, llama.cpp by :mod:`specdec.engines.llama_bench`.
"""

import json
import logging
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from specdec.engines.client import KEY
from specdec.engines.llama import LlamaLaunch
from specdec.engines.llama_bench import ROUNDS, LlamaBench, for_bench
from specdec.engines.server import VllmLaunch, drafter_checkpoint, failure_reason
from specdec.evaluation.prompts import PromptConversation, load_prompts, without_blank
from specdec.evaluation.tune import SCHEDULE, schedules
from specdec.report.tables import ReportTable, print_report
from specdec.utils.config import new_run
from specdec.utils.files import scratch_folder, staged_directory, write_json
from specdec.utils.machine import provenance
from specdec.utils.progress import progress
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

BASELINE = "baseline"
HEADINGS = (
    "Users", "", "Tokens/s", "First token, ms", "Between tokens, ms", "Acceptance length", "by position, %",
    "Identical outputs",
)  # fmt: skip
CAPTION = (
    "latencies: median and 95th percentile over requests; by position: share of passes that accepted this many drafts; "
    "x: times the same requests without the drafter"
)


class BenchOptions(NamedTuple):
    """The measurement that is made."""

    prompts: Sequence[str]  # files
    limit: int | None
    draft_tokens: Sequence[
        int
    ]  # numbers of drafts a pass, ascending; empty for the drafter's default
    concurrency: Sequence[int]  # users at a time
    max_new_tokens: int
    temperature: float
    ignore_eos: bool
    out: Path | None  # by default a new run's directory


EngineLaunch = VllmLaunch | LlamaLaunch
# The results by the name of what was served and the users at a time.
Results = dict[tuple[str, int], dict[str, Any]]


def bench_drafter(launch: EngineLaunch, drafter: Path, options: BenchOptions) -> None:
    """Serve the target with each number of drafts a pass, and alone, measure all, and print the table."""
    levels = sorted(set(options.concurrency))
    tokenizer = launch.target.load_tokenizer()
    prompts = without_blank(load_prompts(options.prompts, options.limit))
    ids = [PromptConversation(prompt, tokenizer).next_ids() or [] for prompt in prompts]
    if isinstance(launch, LlamaLaunch):
        longest = max(map(len, ids)) + options.max_new_tokens
        launch = for_bench(launch, max(levels), longest)
        measure: Measure = LlamaBench(
            launch, ids, options.max_new_tokens, options.temperature, options.ignore_eos
        )
    else:
        measure = _VllmBench(launch, options, *as_text(ids, tokenizer))
    results: Results = {}
    runs = (max(len(options.draft_tokens), 1) + 1) * len(levels)
    with (
        staged_directory(options.out or new_run("bench")) as folder,
        scratch_folder() as scratch,
        progress("bench", "run", runs) as advance,
    ):
        checkpoint = drafter_checkpoint(drafter, launch.target, scratch / "drafter", launch.format)
        several = len(options.draft_tokens) > 1
        drafts_by_name = {}
        numbers: Sequence[int | None] = options.draft_tokens or [None]
        for asked in numbers:
            drafts = checkpoint.drafts(asked)
            drafts_by_name[f"drafter-{drafts}" if several else "drafter"] = drafts
        for name, drafts in (*drafts_by_name.items(), (BASELINE, 0)):
            launched = replace(launch, draft_tokens=drafts or None)
            served = checkpoint if drafts else None
            with launched.server(served, scratch / f"{name}.log", caching=False) as server:
                for users in levels:
                    file = folder / f"{name}-{users}.json"
                    results[name, users] = measure(server.url, users, file, scratch)
                    advance(1)
        write_json(folder / "provenance.json", provenance())
        if several and isinstance(launch, VllmLaunch):  # llama.cpp takes no schedule
            write_json(folder / SCHEDULE, schedules(_fastest(results, drafts_by_name, levels)))
    rows = _rows(results, list(drafts_by_name), levels, options.temperature)
    title = results[BASELINE, levels[0]].get("engine", measure.title)
    print_report([ReportTable(title, HEADINGS, rows, left=2)], [CAPTION])


@dataclass(frozen=True)
class _VllmBench:
    """Measures a server by ``vllm bench serve``."""

    launch: VllmLaunch
    options: BenchOptions
    texts: Sequence[str]
    add_special_tokens: bool  # whether the server is to add them to the texts

    title: ClassVar[str] = "vllm bench serve"

    def __call__(self, url: str, users: int, file: Path, scratch: Path) -> dict[str, Any]:
        """Return the results under this many users at a time, which ``file`` gets, too."""
        data = scratch / "prompts.jsonl"
        lines = [json.dumps({"prompt": text}) + "\n" for text in self.texts]
        data.write_text("".join(lines), encoding="utf-8")
        command = _bench_command(
            self.launch, url, self.options, data, len(self.texts), users, self.add_special_tokens
        )
        return _measured(command, file, scratch / "bench.log")


Measure = _VllmBench | LlamaBench


def as_text(prompts: Sequence[list[int]], tokenizer: Any) -> tuple[list[str], bool]:
    """Return the texts that a server turns into these prompts' token ids, and whether it is to add special tokens.

    A tokenizer with ``split_special_tokens`` reads ``<s>`` in a text as characters: only adding it gives the token. If
    some prompts come out differently both ways, the better way is taken, and a warning says how many they are.
    """
    ways = []
    for special in (False, True):
        texts = [tokenizer.decode(ids, skip_special_tokens=special) for ids in prompts]
        encoded = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
        wrong = sum(again != ids for again, ids in zip(encoded, prompts, strict=True))
        ways.append((wrong, special, texts))
    wrong, special, texts = min(ways)
    if wrong:
        log.warning(
            "%d of %s are other tokens to vLLM than to specdec",
            wrong,
            how_many(len(prompts), "prompt"),
        )
    return texts, special


def _bench_command(
    launch: VllmLaunch, url: str, options: BenchOptions, data: Path, prompts: int, users: int, add_special_tokens: bool
) -> list[str]:  # fmt: skip
    """Return the command that measures a server under this many users at a time."""
    body = {"add_special_tokens": add_special_tokens, "repetition_penalty": 1.0}
    return [
        *launch.vllm, "bench", "serve", "--base-url", url, "--model", launch.target.directory(),
        "--backend", "openai", "--endpoint", "/v1/completions", "--extra-body", json.dumps(body),
        "--dataset-name", "custom", "--dataset-path", str(data), "--skip-chat-template",
        "--disable-shuffle", "--custom-output-len", str(options.max_new_tokens), "--temperature",
        str(options.temperature), *(["--ignore-eos"] if options.ignore_eos else []), "--max-concurrency", str(users),
        "--num-prompts", str(max(prompts, ROUNDS * users)), "--num-warmups", str(users),
        "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "95", "--disable-tqdm",
        "--save-result", "--save-detailed",
    ]  # fmt: skip


def _fastest(
    results: Results, drafts_by_name: dict[str, int], levels: Sequence[int]
) -> dict[int, int]:
    """Return the number of drafts a pass with the largest throughput, 0 for none, by users at a time."""
    candidates = drafts_by_name | {BASELINE: 0}
    fastest = {}
    for users in levels:
        speeds = [
            (results[name, users]["output_throughput"], drafts)
            for name, drafts in candidates.items()
        ]
        fastest[users] = max(speeds)[1]
    return fastest


def _rows(
    results: Results, names: Sequence[str], levels: Sequence[int], temperature: float
) -> list[list[str]]:
    """Return the table's rows, the baseline last at every number of users."""
    rows = []
    for users in levels:
        plain = results[BASELINE, users]
        for name in names:
            result = results[name, users]
            identical = "-"
            if temperature == 0:
                pairs = zip(result["generated_texts"], plain["generated_texts"], strict=True)
                same = sum(text == plain_text for text, plain_text in pairs)
                identical = f"{same} of {len(result['errors'])}"
            times = result["output_throughput"] / plain["output_throughput"]
            length = result.get("spec_decode_acceptance_length")
            shares = result.get("spec_decode_per_position_acceptance_rates") or ()
            rows.append([
                str(users), name, *_speeds(result, f" ({times:.2f}x)"), f"{length:.2f}" if length else "-",
                " ".join(f"{100 * share:.0f}" for share in shares) or "-", identical,
            ])  # fmt: skip
        rows.append([str(users), BASELINE, *_speeds(plain), "-", "-", "-"])
    return rows


def _measured(command: Sequence[str], result: Path, output: Path) -> dict[str, Any]:
    """Run one ``vllm bench serve`` and return the JSON that it writes.

    Args:
        result: its file.
        output: the file that gets what the command prints.

    Raises:
        ValueError: it failed, with its last error, or a request has no answer.
    """
    environment = dict(os.environ)
    if KEY in environment:
        environment["OPENAI_API_KEY"] = environment[KEY]
    command = [*command, "--result-dir", str(result.parent), "--result-filename", result.name]
    with output.open("wb") as stream:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            check=False,
        )
    if done.returncode or not result.exists():
        raise ValueError(
            f"vllm bench serve ended with status {done.returncode}: {failure_reason(output)}"
        )
    figures: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    failed = [error for error in figures["errors"] if error]
    if failed:
        raise ValueError(
            f"{how_many(len(failed), 'request')} without an answer: {' '.join(failed[0].split())[:240]}"
        )
    return figures


def _speeds(result: dict[str, Any], times: str = "") -> list[str]:
    """Return the table's cells of throughput and latencies."""
    cells = [f"{result['output_throughput']:,.1f}{times}"]
    for kind in ("ttft", "tpot"):
        cells.append(f"{result[f'median_{kind}_ms']:.1f} / {result[f'p95_{kind}_ms']:.1f}")
    return cells
