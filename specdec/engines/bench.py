"""``specdec bench``: what a served model's users get with its drafter and without, measured by ``vllm bench serve``."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from specdec.engines.client import KEY, Endpoint
from specdec.engines.serve import VllmLaunch, drafter_checkpoint, find_vllm, log_told, warn_of_draws
from specdec.engines.server import TIMEOUT, failure_reason
from specdec.evaluation.prompts import PromptConversation, load_prompts, without_blank
from specdec.evaluation.style import style, table
from specdec.export.write import DRAFT_TOKENS
from specdec.target import TargetSource
from specdec.target.loading import load_tokenizer
from specdec.utils.config import new_run
from specdec.utils.files import staged_directory, write_json, write_text
from specdec.utils.machine import provenance
from specdec.utils.progress import progress
from specdec.utils.signals import Asked, asked_to_end

RESULT, REPORT, FIGURE = "bench.json", "report.md", "bench.png"
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
    drafter: Path | None = None,
    url: str | None = None,
    baseline_url: str | None = None,
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
    vLLM's environment (pip install vllm[bench]). Flags of vllm serve go after --. Instead, --url and --baseline_url may
    name servers of the target that run already.

    Example: specdec bench --target Qwen/Qwen3-4B --drafter runs/a/drafter --prompts data/question.jsonl

    Args:
        drafter: a drafter's directory, or an export of one for vLLM
        url: a vLLM that runs already, as http://127.0.0.1:8000
        baseline_url: the same without the drafter
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
        ValueError: an argument or a file is wrong, or a server cannot be had or does not answer.
    """
    if (url is None) == (drafter is None):
        raise ValueError("give either --url, or --target and --drafter, which are served then")
    if (url is None and baseline_url is not None) or (url is not None and vllm_args):
        raise ValueError(
            "--baseline_url goes with --url, flags after -- with --drafter, which vllm serve is started for"
        )
    if min(*concurrency, max_new_tokens) < 1 or temperature < 0:
        raise ValueError("concurrency and max_new_tokens must be at least 1, and temperature at least 0")
    levels = sorted(set(concurrency))
    words = find_vllm(vllm)
    texts = _texts(prompts, limit, layouts, target)
    settings = {
        "prompts": prompts, "number_of_prompts": len(texts), "concurrency": levels,
        "max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": ignore_eos,
        "target": target.source, "drafter": drafter and str(drafter), "draft_tokens": draft_tokens,
        "vllm_args": vllm_args,
    }  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        with (
            asked_to_end(),
            log_told(),
            staged_directory(out or new_run("bench")) as folder,
            tempfile.TemporaryDirectory(prefix="specdec-bench-") as scratch,
            progress("bench", "runs", len(levels) * (1 if url and not baseline_url else 2)) as advance,
        ):
            # a prompt that comes again would be answered from a cache
            caching = any("prefix-caching" in word.replace("_", "-") for word in vllm_args)
            extra = (*vllm_args, *(() if caching else ("--no-enable-prefix-caching",)))
            launch = VllmLaunch(words, target, "127.0.0.1", 0, timeout, draft_tokens, extra)
            made = drafter_checkpoint(drafter, target, Path(scratch) / "drafter") if drafter else None
            for name, there, one in (("drafter", url, made), ("baseline", baseline_url, None)):
                if url is not None and there is None:
                    continue
                with contextlib.ExitStack() as stack:
                    if there is None:
                        log_file = Path(scratch) / f"{name}.log"
                        there = stack.enter_context(launch.server(one, log_file)).url
                        if one and temperature > 0:
                            warn_of_draws(log_file)
                    found[name] = []
                    for users in levels:
                        found[name].append(_measured(words, there, texts, users, settings, target.directory()))
                        advance(1)
            result: dict[str, Any] = {
                "levels": _levels(found, temperature == 0),
                "settings": settings,
                "provenance": provenance(),
            }
            write_json(folder / RESULT, result)
            write_text(folder / REPORT, _report(result))
            _plot(result, folder / FIGURE)
    except Asked as asked:
        return asked.status
    shown = Table(title="vllm bench serve", caption=CAPTION)
    for column, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="left" if column == 1 else "right")
    for row in _rows(result["levels"]):
        shown.add_row(*row)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(shown)
    return 0


def _texts(sources: Sequence[str], limit: int | None, layouts: Sequence[str], target: TargetSource) -> list[str]:
    """What is completed: each prompt's first turn, with the special tokens that the target's tokenizer gives it."""
    tokenizer = load_tokenizer(target.directory(), target.revision, target.trust_remote_code)
    prompts = without_blank(load_prompts(sources, limit, layouts))
    ids = [PromptConversation(one, tokenizer).next_ids() for one in prompts]
    return [tokenizer.decode(one, skip_special_tokens=False) for one in ids]


def _measured(
    words: Sequence[str], url: str, texts: Sequence[str], users: int, settings: Mapping[str, Any], tokenizer: str
) -> dict[str, Any]:
    """One run of ``vllm bench serve``: its JSON.

    Raises:
        ValueError: it fails, or a request is not answered; the message is the last that it says.
    """
    with tempfile.TemporaryDirectory(prefix="specdec-vllm-bench-") as scratch:
        data, result, said = (Path(scratch) / name for name in ("prompts.jsonl", "result.json", "bench.log"))
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        endpoint = Endpoint(url)
        body = {"temperature": settings["temperature"], "add_special_tokens": False, "repetition_penalty": 1.0}
        command = [
            *words, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
            "--base-url", endpoint.url, "--model", endpoint.model(), "--tokenizer", tokenizer,
            "--dataset-name", "custom", "--dataset-path", str(data),
            "--custom-output-len", str(settings["max_new_tokens"]),
            "--skip-chat-template", "--disable-shuffle", "--num-prompts", str(max(len(texts), ROUNDS * users)),
            "--num-warmups", str(users), "--max-concurrency", str(users), "--extra-body", json.dumps(body),
            "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "95", "--disable-tqdm",
            "--save-result", "--save-detailed", "--result-dir", scratch, "--result-filename", result.name,
            *(["--ignore-eos"] if settings["ignore_eos"] else []),
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
        raise ValueError(f"{url}: {len(failed)} requests were not answered: {' '.join(failed[0].split())[:240]}")
    return found


def _levels(found: Mapping[str, Sequence[Mapping[str, Any]]], same_text: bool) -> list[dict[str, Any]]:
    """At every concurrency what each server did, and what the drafter brings."""
    levels = []
    for number, run in enumerate(found["drafter"]):
        ours, plain = _server(run), found["baseline"][number] if "baseline" in found else None
        level: dict[str, Any] = {"concurrency": run["max_concurrency"], "drafter": ours, "baseline": None}
        if plain is not None:
            theirs = level["baseline"] = _server(plain)
            pairs = list(zip(run["generated_texts"], plain["generated_texts"], strict=True)) if same_text else []
            speeds = ours["tokens_per_second"], theirs["tokens_per_second"]
            level["ratio"] = {of: speeds[0][of] / speeds[1][of] for of in ("user", "all")}
            level["identical_outputs"] = {"same": sum(a == b for a, b in pairs), "of": len(pairs)}
        levels.append(level)
    return levels


def _server(run: Mapping[str, Any]) -> dict[str, Any]:
    """Speed, latency and acceptance of one run; docs/serve.md says what each is."""

    def spread(values: Sequence[float]) -> dict[str, float] | None:
        return {"median": float(np.median(values)), "p95": float(np.quantile(values, 0.95))} if values else None

    tokens, drafts = run["total_output_tokens"], run.get("spec_decode_num_drafts")
    seconds = sum(first + sum(rest) for first, rest in zip(run["ttfts"], run["itls"], strict=True))
    between = [sum(rest) / (n - 1) for rest, n in zip(run["itls"], run["output_lens"], strict=True) if n > 1]
    return {
        "requests": run["completed"],
        "tokens": tokens,
        "seconds": run["duration"],
        "tokens_per_second": {"user": tokens / seconds, "all": tokens / run["duration"]},
        "first_token_seconds": spread(run["ttfts"]),
        "inter_token_seconds": spread(between),
        "acceptance": None
        if not drafts
        else {
            "acceptance_length": run["spec_decode_acceptance_length"],
            "per_position": run["spec_decode_per_position_acceptance_rates"],
            "passes": drafts,
            "drafts": run["spec_decode_draft_tokens"],
            "accepted": run["spec_decode_accepted_tokens"],
        },
    }


def _rows(levels: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table's cells."""

    def spread(value: Mapping[str, float] | None) -> str:
        return f"{1e3 * value['median']:.1f} / {1e3 * value['p95']:.1f}" if value else "-"

    rows = []
    for level in levels:
        for name in ("drafter", "baseline"):
            if (one := level[name]) is None:
                continue
            ratio, same = (level.get(key) if name == "drafter" else None for key in ("ratio", "identical_outputs"))
            rates, accepted = one["tokens_per_second"].items(), one["acceptance"]
            rows.append([
                str(level["concurrency"]), name,
                *(f"{rate:,.1f}" + (f" ({ratio[of]:.2f}x)" if ratio else "") for of, rate in rates),
                spread(one["first_token_seconds"]), spread(one["inter_token_seconds"]),
                f"{accepted['acceptance_length']:.2f}" if accepted else "-",
                " ".join(f"{100 * share:.0f}" for share in accepted["per_position"]) if accepted else "-",
                f"{same['same']} of {same['of']}" if same and same["of"] else "-",
            ])  # fmt: skip
    return rows


def _report(result: Mapping[str, Any]) -> str:
    settings, source = result["settings"], result["provenance"]
    about = (
        f"{settings['number_of_prompts']} prompts of {', '.join(settings['prompts'])}, {settings['max_new_tokens']} "
        f"new tokens, temperature {settings['temperature']:g}; {source['cpu']}, {source['date']}."
    )
    rows = table(HEADINGS, _rows(result["levels"]), left=2)
    return "\n".join(["# specdec bench", "", about, "", *rows, "", f"{CAPTION}.", "", f"![]({FIGURE})", ""])


def _plot(result: Mapping[str, Any], path: Path) -> None:
    """What a user gets against what all get together, at every concurrency, as a PNG."""
    figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(one for one in ("drafter", "baseline") if result["levels"][0][one]):
        rates = [(level["concurrency"], level[name]["tokens_per_second"]) for level in result["levels"] if level[name]]
        axes.plot([rate["all"] for _, rate in rates], [rate["user"] for _, rate in rates], label=name, **style(row))
        for users, rate in rates:
            axes.annotate(f"{users}", (rate["all"], rate["user"]), (5, 5), textcoords="offset points")
    axes.set(xlabel="tokens per second of all users", ylabel="tokens per second per user")
    axes.set(title="Throughput (numbers: users at a time)", xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
