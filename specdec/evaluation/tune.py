"""``specdec tune``: which draft shape is the fastest on this machine, by batch size, and what engines are told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.decoding import Chain, parse_shape
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.config import MeasurementConfig, drafter_facts, load_pair
from specdec.evaluation.metrics import summary
from specdec.evaluation.prompts import Skipped
from specdec.report.tables import ReportTable, few_prompts, print_report, shown, write_report
from specdec.utils.files import staged_directory, write_json
from specdec.utils.numbers import Side
from specdec.utils.progress import progress

SCHEDULE = "schedule.json"
CANDIDATES = (
    "chain:depth=1", "chain:depth=2", "chain:depth=3", "chain:depth=5", "chain:depth=7",
    "tree:depth=3,top_k=4,nodes=12", "tree:depth=5,top_k=4,nodes=20", "tree:depth=6,top_k=8,nodes=48",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TuneConfig(MeasurementConfig):
    """What is tuned.

    Args:
        drafter: the drafter's directory, or USER/NAME[@REVISION] on the Hub.
        shape: the draft shapes that are tried, as of specdec evaluate.
        batch_sizes: sequences decoded side by side.
        compile: tune for compiled decoding; each shape is a graph of its own.
    """

    drafter: Path
    shape: list[str] = field(default_factory=lambda: list(CANDIDATES))
    batch_sizes: list[Side] = field(default_factory=lambda: [1, 4, 16])
    compile: bool = True


def tune(config: TuneConfig) -> None:
    """Find the fastest draft shape on this machine for each batch size, and the batch from which drafting does not pay.

    The prompts are decoded with every shape and plainly, in turn. Writes tune.json, report.md, and schedule.json, the
    fastest chain of every batch size as vLLM and SGLang take it; specdec serve --bench measures that on a real vLLM.

    Example: specdec tune --target embedded --drafter runs/quickstart/drafter --prompts mt_bench.jsonl --batch_sizes 1 8

    Raises:
        ValueError: something given is wrong; nothing is written then.
    """
    sizes = sorted({*config.batch_sizes})
    shapes = [parse_shape(text) for text in config.shape]
    if not sizes:
        raise ValueError("batch_sizes []: name at least one")
    prompts = config.load_prompts()
    pair = load_pair(config.target, config.drafter, config.device, config.other_target)
    with staged_directory(config.place("tune")) as folder:
        batches: list[dict[str, Any]] = []
        fastest: dict[int, int] = {}
        skipped: dict[str, Skipped] = {}
        for batch in sizes:
            # prompts come again where two for each sequence are lacking
            asked = [prompts[n % len(prompts)] for n in range(max(len(prompts), 2 * batch))]
            with progress(f"batch size {batch}", "prompt", len(asked)) as advance:
                answers = benchmark(
                    pair.target, pair.drafter, shapes, asked, config.max_new_tokens, batch=batch,
                    compiled=config.compile, on_prompt=lambda: advance(1),
                    on_decoder=lambda name: advance(0, name),
                    on_skip=lambda one: skipped.update({one.prompt_id: one}),
                )  # fmt: skip
            every = zip(config.shape, shapes, answers, strict=True)
            results = [summary(text, shape.describe(), own) for text, shape, own in every]
            results.sort(key=lambda one: -one["speedup"])
            recommended = results[0]["shape"] if results[0]["speedup"] > 1 else None
            batches.append({"batch": batch, "recommended": recommended, "results": results})
            chains = [
                one
                for one in results
                if isinstance(parse_shape(one["shape"]), Chain) and one["speedup"] > 1
            ]
            fastest[batch] = parse_shape(chains[0]["shape"]).depth if chains else 0
        found: dict[str, Any] = {
            "break_even": next(
                (one["batch"] for one in batches if one["recommended"] is None), None
            ),
            "batches": batches,
            "drafter": drafter_facts(config.drafter, pair),
            "skipped": [one._asdict() for one in skipped.values()],
            **config.context(pair.target, prompts),
        }
        context = {name: found[name] for name in ("drafter", "target", "settings", "provenance")}
        tables = [
            ReportTable(f"Batch size {one['batch']}", _HEADINGS, _rows(one)) for one in batches
        ]
        notes = _notes(found)
        left_out = ReportTable(
            "Prompts left out", ["Prompt", "Reason"], [[*one] for one in skipped.values()], left=2
        )
        write_report(folder / "report.md", "Tuning", notes, "", [*tables, left_out], context)
        write_json(folder / "tune.json", found)
        write_json(folder / SCHEDULE, schedules(fastest))
    print_report(tables, notes)


def schedules(fastest: Mapping[int, int]) -> dict[str, Any]:
    """How many tokens to draft at how many sequences, as engines take it, of the fastest chain by batch size (0: none).

    What was measured holds from its batch size up to the next. ``vllm`` goes into ``--speculative-config`` beside
    ``method`` and ``model``; of ``sglang``, the file of ``--speculative-adaptive-config``, the nearest size counts.
    """
    sizes = sorted(fastest)
    ends = [*(size - 1 for size in sizes[1:]), sizes[-1]]
    ranges = [
        [size if n else 1, end, fastest[size]]
        for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    vllm = {
        "num_speculative_tokens": max(fastest.values()),
        "num_speculative_tokens_per_batch_size": ranges,
    }
    return {
        "vllm": vllm if any(fastest.values()) else None,
        "sglang": {str(size): {"candidate_steps": [fastest[size]]} for size in sizes},
    }


_HEADINGS = (
    "Draft shape",
    "Acceptance length",
    "Drafting",
    "Verification",
    "Tokens/s",
    "Plain tokens/s",
    "Speed-up",
)


def _rows(batch: dict[str, Any]) -> list[list[str]]:
    """The shapes, the fastest first."""
    return [
        [
            one["shape"], shown(one["acceptance_length"], "{:.2f}".format),
            *(shown(time, "{:.2f}".format, " ms") for time in one["pass_time"].values()),
            *(f"{rate:.1f}" for rate in one["tokens_per_second"].values()),
            shown({"mean": one["speedup"], **one["speedup_interval"]}, "{:.2f}".format, "x"),
        ]
        for one in batch["results"]
    ]  # fmt: skip


def _notes(found: dict[str, Any]) -> list[str]:
    compiled = str(found["settings"]["compile"]).lower()
    lines = []
    for batch in found["batches"]:
        chosen = (
            f"--shape {batch['recommended']} --compile {compiled} --batch_size {batch['batch']}"
        )
        lines.append(
            f"Batch size {batch['batch']}: {chosen if batch['recommended'] else 'plain decoding'}"
        )
    last = found["batches"][-1]
    pays = f"Drafting does not pay from batch size: {found['break_even'] or 'none up to ' + str(last['batch'])}"
    return [*lines, pays, *few_prompts(last["results"][0]["prompts"])]
