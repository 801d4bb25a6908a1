"""``specdec serve --bench``: what a served model's users get with its drafter and without, by ``vllm bench serve``."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.engines.client import KEY
from specdec.engines.server import VllmLaunch, drafter_checkpoint, failure_reason
from specdec.evaluation.prompts import PromptConversation, load_prompts, without_blank
from specdec.utils.config import new_run
from specdec.utils.files import staged_directory, write_json
from specdec.utils.machine import provenance
from specdec.utils.progress import progress

RESULT = "bench.json"
ROUNDS = 4  # requests of each user, at least
HEADINGS = (
    "Users", "", "Tokens/s", "First token, ms", "Between tokens, ms", "Acceptance length", "by position, %",
    "Identical outputs",
)  # fmt: skip
CAPTION = (
    "latencies: median and 95th percentile over requests; by position: share of passes that accepted so many drafts; "
    "x: times the same requests without the drafter"
)


def bench(
    launch: VllmLaunch, drafter: Path, prompts: Sequence[str], limit: int | None, concurrency: Sequence[int],
    max_new_tokens: int, temperature: float, ignore_eos: bool, out: Path | None,
) -> None:  # fmt: skip
    """Serve the target with the drafter and then alone, let vLLM measure both, print the table and write RESULT.

    Raises:
        Asked: somebody asked this process to end.
        ValueError: an argument or a file is wrong, or vLLM does not come up or does not answer.
    """
    if min([*concurrency, max_new_tokens]) < 1 or temperature < 0:
        raise ValueError("concurrency and max_new_tokens must be at least 1, and temperature at least 0")
    tokenizer, levels = launch.target.load_tokenizer(), sorted(set(concurrency))
    ids = [PromptConversation(one, tokenizer).next_ids() for one in without_blank(load_prompts(prompts, limit))]
    texts = [tokenizer.decode(one, skip_special_tokens=False) for one in ids]
    asking = ["--custom-output-len", str(max_new_tokens), "--temperature", str(temperature)]
    asking += ["--ignore-eos"] if ignore_eos else []
    runs: dict[str, list[dict[str, Any]]] = {"drafter": [], "baseline": []}
    with (
        staged_directory(out or new_run("bench")) as folder,
        tempfile.TemporaryDirectory(prefix="specdec-bench-") as scratch,
        progress("bench", "runs", 2 * len(levels)) as advance,
    ):
        made = drafter_checkpoint(drafter, launch.target, Path(scratch) / "drafter")
        for name, served in (("drafter", made), ("baseline", None)):
            with launch.server(served, Path(scratch) / f"{name}.log", caching=False) as server:
                of = [*launch.vllm, "bench", "serve", "--base-url", server.url, "--model", launch.target.directory()]
                for users in levels:
                    runs[name].append(_measured([*of, *asking], texts, users))
                    advance(1)
        found = [_level(ours, plain, temperature == 0) for ours, plain in zip(*runs.values(), strict=True)]
        settings = {
            "target": launch.target.source, "drafter": str(drafter), "draft_tokens": launch.draft_tokens,
            "prompts": list(prompts), "number_of_prompts": len(texts), "concurrency": levels,
            "max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": ignore_eos,
            "vllm_args": list(launch.extra),
        }  # fmt: skip
        write_json(folder / RESULT, {"levels": found, "settings": settings, "provenance": provenance()})
    shown = Table(title="vllm bench serve", caption=CAPTION)
    for column, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if column == 1 else "right")
    for level in found:
        for name in runs:
            shown.add_row(*_row(level, name))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(shown)


def _measured(command: Sequence[str], texts: Sequence[str], users: int) -> dict[str, Any]:
    """The JSON of one ``vllm bench serve``; ValueError with the last that it printed, where a request has no answer."""
    with tempfile.TemporaryDirectory(prefix="specdec-vllm-bench-") as scratch:
        data, result, log = (Path(scratch) / name for name in ("prompts.jsonl", "result.json", "bench.log"))
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        body = {"add_special_tokens": False, "repetition_penalty": 1.0}
        command = [
            *command, "--backend", "openai", "--endpoint", "/v1/completions", "--extra-body", json.dumps(body),
            "--dataset-name", "custom", "--dataset-path", str(data), "--skip-chat-template", "--disable-shuffle",
            "--num-prompts", str(max(len(texts), ROUNDS * users)), "--num-warmups", str(users),
            "--max-concurrency", str(users), "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "95",
            "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", scratch,
            "--result-filename", result.name,
        ]  # fmt: skip
        environment = os.environ | ({"OPENAI_API_KEY": os.environ[KEY]} if KEY in os.environ else {})
        with log.open("w") as file:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, check=False
            )
        if done.returncode or not result.exists():
            raise ValueError(f"vllm bench serve ended with status {done.returncode}: {failure_reason(log)}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if failed := [error for error in found["errors"] if error]:
        raise ValueError(f"{len(failed)} requests were not answered: {' '.join(failed[0].split())[:240]}")
    return found


def _level(drafter: dict[str, Any], baseline: dict[str, Any], same_text: bool) -> dict[str, Any]:
    """At one concurrency what vLLM measured of each server, without lists of requests, and what the drafter brings."""
    texts = list(zip(drafter["generated_texts"], baseline["generated_texts"], strict=True)) if same_text else []
    level: dict[str, Any] = {"concurrency": drafter["max_concurrency"]}
    for name, run in (("drafter", drafter), ("baseline", baseline)):
        level[name] = {key: value for key, value in run.items() if not isinstance(value, list) or "position" in key}
    level["ratio"] = drafter["output_throughput"] / baseline["output_throughput"]
    level["identical_outputs"] = {"same": sum(one == two for one, two in texts), "of": len(texts)}
    return level


def _row(level: dict[str, Any], name: str) -> list[str]:
    """A line of the table."""
    run = level[name]
    row = [str(level["concurrency"]), name, f"{run['output_throughput']:,.1f}"]
    row += [f"{run[f'median_{of}_ms']:.1f} / {run[f'p95_{of}_ms']:.1f}" for of in ("ttft", "tpot")]
    if name == "baseline":
        return [*row, "-", "-", "-"]
    row[2] += f" ({level['ratio']:.2f}x)"
    length, shares = (run.get(f"spec_decode_{of}") for of in ("acceptance_length", "per_position_acceptance_rates"))
    same = level["identical_outputs"]
    return [
        *row, f"{length:.2f}" if length else "-", " ".join(f"{100 * share:.0f}" for share in shares or ()) or "-",
        f"{same['same']} of {same['of']}" if same["of"] else "-",
    ]  # fmt: skip
