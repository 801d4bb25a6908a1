"""``specdec tune``: which draft shape is the fastest on this machine, for each batch size.

Predicted is S = tau / (v(N) + d*c + o), over plain decoding of the same batch size: tau is the acceptance length, which
is measured by decoding the prompts with every candidate; v(N) the time of a pass that verifies N nodes, the root
included; d*c that of the draft steps; o what else drafting takes; all in plain passes. Measured is the same of real
decoding: tokens per pass times a plain pass over a pass with its drafting (medians). Whole calls compares new tokens
per second with everything.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from specdec.decoding import Chain, DraftShape, DynamicTree, PlainDecoder, Request, SpeculativeDecoder
from specdec.evaluation.benchmark import benchmark, cpu_matmul_backend
from specdec.evaluation.config import MeasurementConfig, Pair, drafter_facts, load_pair
from specdec.evaluation.metrics import acceptance_length, summary
from specdec.evaluation.prompts import Prompt, first_turns
from specdec.evaluation.style import table
from specdec.utils.files import staged_directory, write_json, write_text
from specdec.utils.progress import progress

# width, depth and nodes of what is compared
CANDIDATES = (
    *((1, depth, depth) for depth in range(1, 8)),
    (2, 3, 6), (2, 4, 8), (2, 6, 12), (3, 3, 8), (3, 4, 12), (3, 6, 16), (4, 3, 12), (4, 4, 16), (4, 6, 24), (4, 6, 31),
    (8, 3, 24), (8, 4, 32), (8, 6, 48),
)  # fmt: skip
# and of what is timed: each width at two depths, so that steps and the rest can be told apart
TIMED = ((1, 1, 1), (1, 3, 3), (1, 7, 7), (4, 3, 15), (4, 6, 31), (8, 2, 27), (8, 6, 48))
TIMED_TOKENS = 17
SIDE_BY_SIDE = 8
SHOWN = 3  # shapes of each batch size
_HEADINGS = (
    "Batch", "Draft shape", "Acceptance length", "v(N)", "d*c", "o", "Predicted", "Measured", "Whole calls",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TuneConfig(MeasurementConfig):
    """What is tuned.

    Args:
        drafter: the drafter's directory.
        batch_sizes: sequences decoded side by side.
        compile: tune for compiled decoding; each timed shape is a graph of its own.
        repeats: timed calls of every shape.
    """

    drafter: Path
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 16])
    compile: bool = True
    repeats: int = 5


def tune(config: TuneConfig) -> None:
    """Find the fastest draft shape on this machine for each batch size, and the batch from which drafting does not pay.

    The prompts are decoded with 20 shapes, for what is accepted; what passes cost is timed; the best shape of each
    batch size is then decoded with. Writes tune.json and report.md.

    Example: specdec tune --target embedded --drafter runs/quickstart/drafter --prompts mt_bench.jsonl --batch_sizes 1 8

    Raises:
        ValueError: something given is wrong; nothing is written then.
    """
    sizes, tokens = sorted({*config.batch_sizes}), config.max_new_tokens
    if not sizes or sizes[0] < 1 or tokens < 2 or config.repeats < 1:
        raise ValueError(
            f"batch_sizes {config.batch_sizes} must be numbers from 1 up, max_new_tokens {tokens} at least 2, for a "
            f"pass to time, and repeats {config.repeats} at least 1"
        )
    loaded = config.load_prompts()
    pair = load_pair(config.target, config.drafter, config.device, config.other_target)
    widest = pair.drafter.config.draft_vocab_size
    timed, candidates = ([CandidateShape(*one) for one in all_ if one[0] <= widest] for all_ in (TIMED, CANDIDATES))
    most = max(one.nodes for one in (*timed, *candidates))
    asked, skipped = first_turns(pair.target, loaded, tokens, most + 1)
    left_out = {one.prompt_id for one in skipped}
    kept = [one._replace(turns=one.turns and one.turns[:1]) for one in loaded if one.prompt_id not in left_out]
    with staged_directory(config.place("tune")) as folder:
        lengths = measure_lengths(pair, candidates, kept, tokens)
        by_length = sorted(asked, key=len)
        batches: list[dict[str, Any]] = []
        for batch in sizes:
            # prompts to time on, from short to long; of one sequence the middle one
            picked = [by_length[(2 * b + 1) * len(asked) // (2 * batch)] for b in range(batch)]
            requests = [Request(ids, min(TIMED_TOKENS, tokens)) for ids in picked]
            costs = measure_costs(pair, timed, requests, config.compile, config.repeats)
            predictions = predict(costs, lengths)
            fastest = predictions[0]
            shape = CandidateShape(fastest["top_k"], fastest["depth"], fastest["nodes"])
            trial = measure_trial(pair, shape, kept, batch, config.compile, tokens, costs.plain_ms)
            recommended = shape.text if fastest["speedup"] > 1 else None
            parts = {"costs": costs._asdict(), "trial": trial, "predictions": predictions}
            batches.append({"batch": batch, "recommended": recommended, **parts})
        found: dict[str, Any] = {
            "break_even": next((one["batch"] for one in batches if one["recommended"] is None), None),
            "batches": batches,
            "drafter": drafter_facts(config.drafter, pair),
            "prompts_used": len(asked),
            "skipped": [one._asdict() for one in skipped],
            **config.context(pair.target, loaded),
        }
        lines = ["# Tuning", "", *(f"- {line}" for line in _conclusions(found)), ""]
        lines += [*table(_HEADINGS, _rows(batches), left=2), "", str(__doc__).partition("\n\n")[2]]
        lines += [f"- {one.prompt_id} was left out: {one.reason}" for one in skipped]
        write_text(folder / "report.md", "\n".join(lines) + "\n")
        write_json(folder / "tune.json", found)
    console, shown = Console(width=None if sys.stdout.isatty() else 150), Table(*_HEADINGS)
    for row in _rows(batches):
        shown.add_row(*row)
    console.print(shown, *_conclusions(found), sep="\n", highlight=False)


class CandidateShape(NamedTuple):
    """A dynamic tree; of ``top_k`` 1 it is a chain, whose nodes are its depth."""

    top_k: int
    depth: int
    nodes: int  # drafted ones, without the root

    @property
    def text(self) -> str:
        """As ``--shape`` takes it."""
        if self.top_k == 1:
            return f"chain:depth={self.depth}"
        return f"tree:depth={self.depth},top_k={self.top_k},nodes={self.nodes}"

    @property
    def shape(self) -> DraftShape:
        """What decodes so."""
        return Chain(self.depth) if self.top_k == 1 else DynamicTree(self.depth, top_k=self.top_k, nodes=self.nodes)


def measure_lengths(
    pair: Pair, shapes: Sequence[CandidateShape], prompts: Sequence[Prompt], max_new_tokens: int
) -> dict[CandidateShape, float]:
    """The acceptance length of every shape, by decoding the prompts greedily and eagerly, eight side by side."""
    out = {}
    with progress("what each shape accepts", "prompts", len(shapes) * len(prompts)) as advance:
        for one in shapes:
            (answers,) = benchmark(
                pair.target, pair.drafter, [one.shape], prompts, max_new_tokens, plain=False,
                batch=min(SIDE_BY_SIDE, len(prompts)), on_prompt=functools.partial(advance, 1),
            )  # fmt: skip
            length = acceptance_length(answers)
            if length is None:
                raise ValueError("the target ends every answer with its first token: there is no pass to tune for")
            out[one] = length.mean
    return out


class Costs(NamedTuple):
    """Parts of a round over a plain pass, all at one batch size."""

    plain_ms: float
    verify: dict[int, float]
    """v at the measured numbers of verified nodes, the root included; v(1) is 1."""
    step: dict[int, float]
    """c: a draft step of so many nodes."""
    rest: float
    """o: what drafting takes beside its steps."""


def measure_costs(
    pair: Pair, timed: Sequence[CandidateShape], requests: Sequence[Request], compiled: bool, repeats: int
) -> Costs:
    """Time every shape and plain decoding in turn, ``repeats`` times after a call that does not count."""
    batch = len(requests)  # one for each sequence
    decoders = [PlainDecoder(pair.target, batch=batch, compiled=compiled)]
    decoders += [
        SpeculativeDecoder(pair.target, pair.drafter, one.shape, batch=batch, compiled=compiled) for one in timed
    ]
    draft_ms: list[list[float]] = [[] for _ in decoders]
    verify_ms: list[list[float]] = [[] for _ in decoders]
    calls, what = (repeats + 1) * len(decoders), f"batch size {batch}: passes"
    with progress(what, "calls", calls) as advance, cpu_matmul_backend(pair.target):
        for decoder in decoders:
            decoder.prepare(max(len(one.prompt) + one.max_new_tokens for one in requests))
        for call in range(calls):
            number = call % len(decoders)
            made = [generation for _, generation in decoders[number].generate_all(requests)]
            advance(1)
            if call >= len(decoders):
                whole = max(made, key=lambda generation: len(generation.verify_ms))  # it was there in all passes
                draft_ms[number] += whole.draft_ms
                verify_ms[number] += whole.verify_ms
    plain_ms = median(map(sum, zip(draft_ms[0], verify_ms[0], strict=True)))
    drafts, passes = ([median(times) / plain_ms for times in every[1:]] for every in (draft_ms, verify_ms))
    return fit_costs(plain_ms, timed, drafts, passes)


def fit_costs(
    plain_ms: float, timed: Sequence[CandidateShape], drafts: Sequence[float], passes: Sequence[float]
) -> Costs:
    """Least squares for the draft steps: drafting = o + c_1 + (depth - 1) c_K, in plain passes.

    Args:
        timed: chains of two depths at least; each other width adds a step cost.
        drafts: drafting of each of these shapes, in plain passes.
        passes: and its verification.
    """
    verify: dict[int, list[float]] = {1: [1.0]}
    widths = sorted({1, *(shape.top_k for shape in timed)})
    steps = np.zeros((len(timed), 1 + len(widths)))
    steps[:, :2] = 1  # the rest, and the first step
    for row, shape in enumerate(timed):
        steps[row, 1 + widths.index(shape.top_k)] += shape.depth - 1
        verify.setdefault(shape.nodes + 1, []).append(passes[row])
    rest, *each = map(float, np.linalg.lstsq(steps, np.array(drafts), rcond=None)[0])
    step = {k: max(0.0, c) for k, c in zip(widths, each, strict=True)}
    return Costs(plain_ms, {nodes: median(times) for nodes, times in sorted(verify.items())}, step, rest)


def predict(costs: Costs, lengths: Mapping[CandidateShape, float]) -> list[dict[str, Any]]:
    """Every shape with its parts of S, JSON-ready, the fastest first; of equals the smaller one."""
    found = []
    for shape, tau in lengths.items():
        # what was not measured lies on the line between the two next to it
        verify = float(np.interp(shape.nodes + 1, list(costs.verify), list(costs.verify.values())))
        wide = float(np.interp(shape.top_k, list(costs.step), list(costs.step.values())))
        drafting = costs.step[1] + (shape.depth - 1) * wide  # the first step is of the last token alone
        parts = {"acceptance_length": tau, "verify": verify, "drafting": drafting, "rest": costs.rest}
        speedup = tau / (verify + drafting + costs.rest)
        found.append({"shape": shape.text, **shape._asdict(), **parts, "speedup": speedup})
    return sorted(found, key=lambda one: (-one["speedup"], one["nodes"], one["top_k"], one["depth"]))


def measure_trial(
    pair: Pair, shape: CandidateShape, prompts: Sequence[Prompt], batch: int, compiled: bool, tokens: int,
    plain_ms: float,
) -> dict[str, Any]:  # fmt: skip
    """What real decoding with a shape comes to, JSON-ready; prompts come again where two for a sequence are lacking."""
    asked = [prompts[n % len(prompts)]._replace(prompt_id=str(n)) for n in range(max(len(prompts), 2 * batch))]
    with progress(f"batch size {batch}: decoding with {shape.text}", "prompts", len(asked)) as advance:
        (answers,) = benchmark(
            pair.target, pair.drafter, [shape.shape], asked, tokens, batch=batch, compiled=compiled,
            on_prompt=functools.partial(advance, 1),
        )  # fmt: skip
    found = summary(shape.text, {}, answers)
    length = found["acceptance_length"]["mean"]
    passes = [sum(times) for answer in answers for times in zip(answer.draft_ms, answer.verify_ms, strict=True)]
    return {"acceptance_length": length, "measured": length * plain_ms / median(passes), "calls": found["speedup"]}


def _rows(batches: list[dict[str, Any]]) -> list[list[str]]:
    """The best shapes of every batch size; the best one was decoded with."""
    rows = []
    for batch in batches:
        for rank, one in enumerate(batch["predictions"][:SHOWN]):
            costs = [f"{one[name]:.2f}" for name in ("acceptance_length", "verify", "drafting", "rest")]
            trial = ["", ""] if rank else [f"{batch['trial'][name]:.2f}x" for name in ("measured", "calls")]
            rows.append([str(batch["batch"]), one["shape"], *costs, f"{one['speedup']:.2f}x", *trial])
    return rows


def _conclusions(found: dict[str, Any]) -> list[str]:
    compiled = str(found["settings"]["compile"]).lower()
    lines = []
    for batch in found["batches"]:
        chosen = f"--shape {batch['recommended']} --compile {compiled} --batch_size {batch['batch']}"
        lines.append(f"Batch size {batch['batch']}: {chosen if batch['recommended'] else 'plain decoding'}")
    none = f"none up to {found['batches'][-1]['batch']}"
    return [*lines, f"Drafting does not pay from batch size: {found['break_even'] or none}"]
