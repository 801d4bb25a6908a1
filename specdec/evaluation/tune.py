"""``specdec tune``: which draft shape is the fastest on this machine, by batch size, and the settings for engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.decoding import Chain, DraftShape, parse_shape
from specdec.evaluation.adaptive import Costs, adaptive_notes, adaptive_tables, compare_adaptive
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.config import MeasurementConfig, Pair, drafter_facts
from specdec.evaluation.metrics import Answer
from specdec.evaluation.overrides import override_notes
from specdec.evaluation.prompts import Prompt, Skipped
from specdec.evaluation.results_page import format_length, format_speedup, skipped_table
from specdec.evaluation.summary import shape_summary
from specdec.evaluation.tune_plots import cost_model, plot_tuning
from specdec.report.tables import (
    ReportTable,
    few_prompts,
    format_interval,
    print_report,
    write_report,
)
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
        compile: tune for compiled decoding; each shape is a separate graph.
        adaptive: at batch size 1, also look for the confidence below which a chain had better end.
    """

    drafter: Path
    shape: list[str] = field(default_factory=lambda: list(CANDIDATES))
    batch_sizes: list[Side] = field(default_factory=lambda: [1, 4, 16])
    compile: bool = True
    adaptive: bool = True


def tune(config: TuneConfig) -> None:
    """Find the fastest draft shape on this machine for each batch size, and the batch sizes at which none is
    faster than plain decoding.

    The prompts are decoded with every shape and plainly, in turn. At batch size 1, chains that end where the drafter is
    unsure are compared with the best fixed length. Writes tune.json, report.md with figures of the
    speed-up and its cost model, and schedule.json, the fastest chain of every batch size as vLLM and SGLang take it;
    specdec serve --bench measures that on a real vLLM.

    Example: specdec tune --target embedded --drafter runs/quickstart/drafter --prompts mt_bench.jsonl --batch_sizes 1 8

    Raises:
        ValueError: something given is wrong; nothing is written then.
    """
    sizes = sorted({*config.batch_sizes})
    shapes = [parse_shape(text) for text in config.shape]
    if not sizes:
        raise ValueError("batch_sizes []: name at least one")
    prompts = config.load_prompts()
    pair = config.load_pair(config.drafter)
    with staged_directory(config.place("tune")) as folder:
        skipped: dict[str, Skipped] = {}
        answers = {size: _answers(config, pair, shapes, prompts, size, skipped) for size in sizes}
        batches = [_batch_summary(config, shapes, size, answers[size]) for size in sizes]
        costs = Costs.of(shapes, answers[1]) if config.adaptive and 1 in answers else None
        decoded = [prompt for prompt in prompts if prompt.prompt_id not in skipped]
        adaptive = None
        if costs and len(decoded) > 1:
            adaptive = compare_adaptive(pair, decoded, costs, config.max_new_tokens, config.compile)
        does_not_pay = [batch["batch"] for batch in batches if batch["recommended"] is None]
        tuned: dict[str, Any] = {
            "break_even": does_not_pay[0] if does_not_pay else None,
            "batches": batches,
            "adaptive": adaptive,
            "drafter": drafter_facts(config.drafter, pair),
            "skipped": [prompt._asdict() for prompt in skipped.values()],
            **config.context(pair.target, prompts),
        }
        context = {name: tuned[name] for name in ("drafter", "target", "settings", "provenance")}
        tables = [
            ReportTable(f"Batch size {batch['batch']}", _HEADINGS, _rows(batch))
            for batch in batches
        ]
        if adaptive:
            tables += adaptive_tables(adaptive)
        notes = _notes(tuned)
        left_out = skipped_table([[*prompt] for prompt in skipped.values()])
        figures = plot_tuning(batches, folder)
        write_report(folder / "report.md", "Tuning", notes, figures, [*tables, left_out], context)
        write_json(folder / "tune.json", tuned)
        fastest = {batch["batch"]: _fastest_depth(batch["results"]) for batch in batches}
        write_json(folder / SCHEDULE, schedules(fastest))
    print_report(tables, notes)


def _answers(
    config: TuneConfig,
    pair: Pair,
    shapes: Sequence[DraftShape],
    prompts: Sequence[Prompt],
    batch: int,
    skipped: dict[str, Skipped],
) -> list[list[Answer]]:
    """Return the answers of every shape at a batch size."""
    # prompts come again where two for each sequence are lacking
    repeated = [prompts[n % len(prompts)] for n in range(max(len(prompts), 2 * batch))]
    with progress(f"batch size {batch}", "prompt", len(repeated)) as advance:
        return benchmark(
            pair.target,
            pair.drafter,
            shapes,
            repeated,
            config.max_new_tokens,
            batch=batch,
            compiled=config.compile,
            advance=advance,
            on_skip=lambda prompt: skipped.update({prompt.prompt_id: prompt}),
        )


def _batch_summary(
    config: TuneConfig, shapes: Sequence[DraftShape], batch: int, answers: Sequence[Sequence[Answer]]
) -> dict[str, Any]:  # fmt: skip
    """Return the results of every shape at a batch size, the fastest first, and the shape to recommend, if one pays."""
    results = [
        shape_summary(text, shape.describe(), of_shape)
        for text, shape, of_shape in zip(config.shape, shapes, answers, strict=True)
    ]
    results.sort(key=lambda result: -result["speedup"])
    recommended = results[0]["shape"] if results[0]["speedup"] > 1 else None
    return {
        "batch": batch,
        "recommended": recommended,
        "cost_model": cost_model(results),
        "results": results,
    }


def _fastest_depth(results: Sequence[dict[str, Any]]) -> int:
    """Return the depth of the fastest chain that is faster than plain decoding; 0 if none is."""
    for result in results:
        shape = parse_shape(result["shape"])
        if isinstance(shape, Chain) and result["speedup"] > 1:
            return shape.depth
    return 0


def schedules(fastest: Mapping[int, int]) -> dict[str, Any]:
    """How many tokens to draft at how many sequences, as engines take it, of the fastest chain by batch size (0: none).

    What was measured holds from its batch size up to the next. ``vllm`` goes into ``--speculative-config`` next to
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
    """Return a row for each shape, the fastest first."""
    rows = []
    for result in batch["results"]:
        times = [
            format_interval(time, "{:.2f}".format, " ms") for time in result["pass_time"].values()
        ]
        rates = [f"{rate:.1f}" for rate in result["tokens_per_second"].values()]
        length = format_length(result)
        rows.append([result["shape"], length, *times, *rates, format_speedup(result)])
    return rows


def _notes(tuned: dict[str, Any]) -> list[str]:
    compiled = str(tuned["settings"]["compile"]).lower()
    lines = []
    slower = []
    for batch in tuned["batches"]:
        size = batch["batch"]
        if batch["recommended"]:
            fastest = batch["results"][0]
            low = fastest["speedup_interval"]["low"]
            doubt = ", perhaps no faster than plain decoding" if low is None or low <= 1 else ""
            options = f"--shape {batch['recommended']} --compile {compiled} --batch_size {size}"
            lines.append(
                f"Batch size {size}: the fastest is {options} ({format_speedup(fastest)}{doubt})"
            )
        else:
            lines.append(f"Batch size {size}: plain decoding is faster than every draft shape")
            slower.append(str(size))
    if slower:
        lines.append(
            f"On this machine, no draft shape is faster than plain decoding at batch size {', '.join(slower)}."
        )
    else:
        lines.append("Drafting is faster than plain decoding at every batch size measured.")
    if tuned["adaptive"]:
        lines += adaptive_notes(tuned["adaptive"])
    lines += override_notes([tuned["drafter"]])
    return [*lines, *few_prompts(tuned["batches"][-1]["results"][0]["prompts"])]
