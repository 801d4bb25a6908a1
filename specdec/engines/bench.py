"""``specdec bench``: what a served model's users get with its drafter and without, measured by ``vllm bench serve``."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.engines.client import KEY
from specdec.engines.serve import TIMEOUT, VllmLaunch, drafter_checkpoint, failure_reason, find_vllm
from specdec.evaluation.prompts import PromptConversation, load_prompts, without_blank
from specdec.export.write import DRAFT_TOKENS
from specdec.target import TargetSource
from specdec.utils.config import new_run
from specdec.utils.files import staged_directory, write_json
from specdec.utils.machine import provenance
from specdec.utils.progress import progress
from specdec.utils.signals import Asked, asked_to_end

RESULT = "bench.json"
ROUNDS = 4  # requests of each user, at least
HEADINGS = (
    "Users", "", "Tokens/s per user", "Tokens/s of all", "First token, ms", "Between tokens, ms", "Acceptance length",
    "by position, %", "Identical outputs",
)  # fmt: skip
CAPTION = (
    "latencies: median and 95th percentile over requests; by position: share of passes that accepted so many drafts; "
    "x: times the same requests without the drafter"
)


def bench(
    *,
    target: TargetSource = TargetSource(),  # noqa: B008
    drafter: Path,
    prompts: list[str],
    layouts: list[str] = [],  # noqa: B006
    limit: int | None = None,
    concurrency: list[int] = [1, 4, 16],  # noqa: B006
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    draft_tokens: int = DRAFT_TOKENS,
    vllm: str | None = None,
    timeout: float = TIMEOUT,
    out: Path | None = None,
    vllm_args: list[str] = [],  # noqa: B006
) -> int:
    """Measure speed and acceptance of a served model, with and without its drafter, as its users see them.

    vLLM serves the target with the drafter and then alone, and its own vllm bench serve asks; that one needs pandas in
    vLLM's environment (pip install vllm[bench]). Flags of vllm serve go after --.

    Example: specdec bench --target Qwen/Qwen3-4B --drafter runs/a/drafter --prompts data/question.jsonl

    Args:
        drafter: a drafter's directory, or an export of one for vLLM
        prompts: as of specdec evaluate; of conversations the first turn
        layouts: as of specdec evaluate
        limit: use the first prompts only
        concurrency: users at a time
        max_new_tokens: new tokens per answer
        temperature: 0 for greedy decoding
        ignore_eos: go on behind the end of a text
        draft_tokens: drafts a pass
        vllm: a Python that has vLLM, or its executable; by default $SPECDEC_VLLM_PYTHON, else this environment
        timeout: seconds until vLLM must be healthy
        out: directory for the results; it must not exist yet
        vllm_args: flags for vllm serve: give them after --

    Raises:
        ValueError: an argument or a file is wrong, or vLLM does not come up or does not answer.
    """
    if min(*concurrency, max_new_tokens) < 1 or temperature < 0:
        raise ValueError("concurrency and max_new_tokens must be at least 1, and temperature at least 0")
    levels, words = sorted(set(concurrency)), find_vllm(vllm)
    caching = any("prefix-caching" in word.replace("_", "-") for word in vllm_args)
    extra = (*vllm_args, *(() if caching else ("--no-enable-prefix-caching",)))  # for prompts that come again
    launch = VllmLaunch(words, target, port=0, timeout=timeout, draft_tokens=draft_tokens, extra=extra)
    texts = _texts(prompts, limit, layouts, target)
    asking = [
        "--custom-output-len", str(max_new_tokens), "--temperature", str(temperature),
        *(["--ignore-eos"] if ignore_eos else []),
    ]  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {"drafter": [], "baseline": []}
    try:
        with (
            asked_to_end(),
            staged_directory(out or new_run("bench")) as folder,
            tempfile.TemporaryDirectory(prefix="specdec-bench-") as scratch,
            progress("bench", "runs", 2 * len(levels)) as advance,
        ):
            made = drafter_checkpoint(drafter, target, Path(scratch) / "drafter")
            for name, served in (("drafter", made), ("baseline", None)):
                with launch.server(served, Path(scratch) / f"{name}.log") as server:
                    for users in levels:
                        command = [*words, "bench", "serve", "--base-url", server.url, "--model", target.directory()]
                        runs[name].append(_measured([*command, *asking], texts, users))
                        advance(1)
            found = [_level(ours, plain, temperature == 0) for ours, plain in zip(*runs.values(), strict=True)]
            settings = {
                "target": target.source, "drafter": str(drafter), "draft_tokens": draft_tokens, "prompts": prompts,
                "number_of_prompts": len(texts), "concurrency": levels, "max_new_tokens": max_new_tokens,
                "temperature": temperature, "ignore_eos": ignore_eos, "vllm_args": vllm_args,
            }  # fmt: skip
            write_json(folder / RESULT, {"levels": found, "settings": settings, "provenance": provenance()})
    except Asked as asked:
        return asked.status
    shown = Table(title="vllm bench serve", caption=CAPTION)
    for column, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if column == 1 else "right")
    for level in found:
        for name in runs:
            shown.add_row(*_row(level, name))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(shown)
    return 0


def _texts(sources: Sequence[str], limit: int | None, layouts: Sequence[str], target: TargetSource) -> list[str]:
    """What is completed: each prompt's first turn, with the special tokens that the target's tokenizer gives it."""
    tokenizer = target.load_tokenizer()
    prompts = without_blank(load_prompts(sources, limit, layouts))
    ids = [PromptConversation(one, tokenizer).next_ids() for one in prompts]
    return [tokenizer.decode(one, skip_special_tokens=False) for one in ids]


def _measured(command: Sequence[str], texts: Sequence[str], users: int) -> dict[str, Any]:
    """One run of ``vllm bench serve``: its JSON.

    Raises:
        ValueError: it fails, or a request is not answered; the message is the last that it says.
    """
    with tempfile.TemporaryDirectory(prefix="specdec-vllm-bench-") as scratch:
        data, result, said = (Path(scratch) / name for name in ("prompts.jsonl", "result.json", "bench.log"))
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
        with said.open("w") as log:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, check=False
            )
        if done.returncode or not result.exists():
            raise ValueError(f"vllm bench serve ended with status {done.returncode}: {failure_reason(said)}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if failed := [error for error in found["errors"] if error]:
        raise ValueError(f"{len(failed)} requests were not answered: {' '.join(failed[0].split())[:240]}")
    return found


def _level(drafter: dict[str, Any], baseline: dict[str, Any], same_text: bool) -> dict[str, Any]:
    """At one concurrency what vLLM measured of each server, without lists of requests, and what the drafter brings."""
    texts = list(zip(drafter["generated_texts"], baseline["generated_texts"], strict=True)) if same_text else []
    level: dict[str, Any] = {"concurrency": drafter["max_concurrency"]}
    for name, run in (("drafter", drafter), ("baseline", baseline)):
        kept = {key: value for key, value in run.items() if not isinstance(value, list) or "per_position" in key}
        seconds = run["completed"] * run["mean_e2el_ms"] / 1e3  # of all users, from request to last token
        level[name] = kept | {"output_throughput_per_user": run["total_output_tokens"] / seconds}
    rates = ("output_throughput_per_user", "output_throughput")
    level["ratio"] = {of: level["drafter"][of] / level["baseline"][of] for of in rates}
    level["identical_outputs"] = {"same": sum(one == two for one, two in texts), "of": len(texts)}
    return level


def _row(level: Mapping[str, Any], name: str) -> list[str]:
    """A line of the table."""
    run, drafted = level[name], name == "drafter"
    rates = [
        f"{run[of]:,.1f}" + (f" ({times:.2f}x)" if drafted else "")  # tokens a second
        for of, times in level["ratio"].items()
    ]
    delays = [f"{run[f'median_{of}_ms']:.1f} / {run[f'p95_{of}_ms']:.1f}" for of in ("ttft", "tpot")]
    row = [str(level["concurrency"]), name, *rates, *delays]
    if not drafted:
        return [*row, "-", "-", "-"]
    length, shares = (run.get(f"spec_decode_{of}") for of in ("acceptance_length", "per_position_acceptance_rates"))
    same = level["identical_outputs"]
    return [
        *row, f"{length:.2f}" if length else "-", " ".join(f"{100 * share:.0f}" for share in shares or ()) or "-",
        f"{same['same']} of {same['of']}" if same["of"] else "-",
    ]  # fmt: skip
