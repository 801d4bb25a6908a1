"""``specdec tune`` on chains that end where the drafter is unsure: which threshold pays, next to the best fixed length.

One greedy run drafts a whole chain at every place of the answers, and keeps the confidence in every draft. The answers
are the target's own, whatever is drafted, so that the passes of every length and every threshold follow exactly; only
their times are modeled, by those measured of chains. Both the best threshold and the best fixed length are chosen so on
every other prompt, and run on the rest.

Legend: I places of an answer, K draft positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.decoding import AdaptiveChain, Chain, ChildSampling, DraftShape, DraftTree
from specdec.drafter import DraftVocab
from specdec.drafting.mode import Expand, Frontier
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.config import Pair
from specdec.evaluation.metrics import (
    Answer,
    acceptance_length,
    draft_acceptance_rate,
    drafts_per_pass,
    interval_to_json,
    speedup,
    tokens_per_second,
)
from specdec.evaluation.prompts import Prompt
from specdec.report.statistics import Array, Interval
from specdec.report.tables import ReportTable, format_interval
from specdec.utils.progress import progress

Json = dict[str, Any]
Shape = TypeVar("Shape", bound=DraftShape)
Counts = npt.NDArray[np.int64]
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class DraftedPlace(NamedTuple):
    """A place of an answer: its token, and the chain drafted behind it with the confidence in each draft."""

    token: int
    drafts: list[int]
    confidences: list[float]


@dataclass(frozen=True)
class Recorder(Chain):
    """Drafts a whole chain, keeps it and proposes nothing, so that a pass stands at every place; of one sequence."""

    places: list[DraftedPlace] = field(default_factory=list, compare=False, repr=False)

    @property
    def name(self) -> str:
        return f"recorded chains of {self.depth}"

    def grow(
        self,
        root_B: Tensor,
        start: Frontier,
        expand: Expand,
        vocab: DraftVocab,
        children: ChildSampling,
    ) -> DraftTree:
        frontiers = [start]

        def recorded(*level: Tensor) -> Frontier:
            frontiers.append(expand(*level))
            return frontiers[-1]

        chain = super().grow(root_B, start, recorded, vocab, children)
        confidences = [float(frontier.confidences()[0, 0]) for frontier in frontiers]
        root, *drafts = chain.tokens_BN[0].tolist()
        self.places.append(DraftedPlace(root, drafts, confidences))
        return DraftTree(root_B[:, None], torch.zeros_like(root_B)[:, None])


class Recording(NamedTuple):
    """What the drafter says at every place of an answer but the last token's."""

    prompt_id: str
    right_I: Counts  # how many drafts, from the first, are the answer's own tokens
    confidence_IK: Array

    def products(self) -> Array:
        """The products of the confidences in the first 1, 2, ... drafts, (I, K)."""
        return self.confidence_IK.cumprod(1)


def record_chains(
    pair: Pair, prompts: Sequence[Prompt], depth: int, max_new_tokens: int
) -> list[Recording]:
    """Draft ``depth`` tokens at every place of the target's greedy answers, one after another, eagerly."""
    recorder = Recorder(depth)
    skipped: set[str] = set()
    with progress("chains at every place", "prompt", len(prompts)) as advance:
        (answers,) = benchmark(
            pair.target, pair.drafter, [recorder], prompts, max_new_tokens, plain=False, advance=advance,
            on_skip=lambda prompt: skipped.add(prompt.prompt_id),
        )  # fmt: skip
    if skipped:  # after its first turn, perhaps, whose places would be taken for another answer's
        rest = [prompt for prompt in prompts if prompt.prompt_id not in skipped]
        return record_chains(pair, rest, depth, max_new_tokens)
    passes = [len(answer.accepted) for answer in answers]
    places = iter(recorder.places[len(recorder.places) - sum(passes) :])  # behind the warm-up's
    return [
        recording_of(answer.prompt_id, [next(places) for _ in range(count)])
        for answer, count in zip(answers, passes, strict=True)
        if count
    ]


def recording_of(prompt_id: str, places: Sequence[DraftedPlace]) -> Recording:
    """Return what was recorded at the places of one answer; its last token, which has no place, counts as unknown."""
    tokens = [place.token for place in places]
    right = []
    for number, place in enumerate(places, start=1):
        pairs = zip(place.drafts, tokens[number:], strict=False)
        equal = [draft == token for draft, token in pairs]
        right.append([*equal, False].index(False))
    return Recording(prompt_id, np.array(right), np.array([place.confidences for place in places]))


class Costs(NamedTuple):
    """Milliseconds of a target pass: drafting by the drafter's calls, and verification by the drafts, from 0 on."""

    draft_ms: Array
    verify_ms: Array

    @classmethod
    def of(
        cls, shapes: Sequence[DraftShape], answers: Sequence[Sequence[Answer]]
    ) -> "Costs | None":
        """Return those of measured chains, between whose lengths they are straight; None from less than two lengths.

        They are medians over answers: a moment in which the machine did something else counts little.
        """
        plain = [1e3 * answer.plain_seconds / answer.plain_tokens for answer in answers[0]]
        draft_ms = {0: 0.0}
        verify_ms = {0: float(np.median(plain))}
        for shape, of_shape in zip(shapes, answers, strict=True):
            if isinstance(shape, Chain):
                timed = [answer for answer in of_shape if answer.draft_ms]
                draft_ms[shape.depth] = _median([answer.draft_ms for answer in timed])
                verify_ms[shape.depth] = _median([answer.verify_ms for answer in timed])
        depths = sorted(draft_ms)
        if len(depths) < 3:
            return None
        every = np.arange(depths[-1] + 1)
        columns = (
            np.interp(every, depths, [times[depth] for depth in depths])
            for times in (draft_ms, verify_ms)
        )
        return cls(*columns)

    @property
    def depth(self) -> int:
        """The longest chain measured."""
        return len(self.draft_ms) - 1

    @property
    def next_draft_ms(self) -> float:
        """What one more draft costs: its drafting, and the longer verification."""
        pass_ms = self.draft_ms + self.verify_ms
        return float(max(0.0, pass_ms[-1] - pass_ms[1]) / (self.depth - 1))


def _median(times: Sequence[Sequence[float]]) -> float:
    """Return the median over answers of the mean over passes."""
    return float(np.median([np.mean(of_answer) for of_answer in times]))


def next_draft_cost(costs: Costs, answers: Sequence[Answer]) -> float:
    """Return what one more draft costs, as a share of the time that a token takes in these answers.

    The most tokens per second have the drafts whose chance to be accepted is above that share, in the answers of the
    fastest way to draft (https://doi.org/10.1287/mnsc.13.7.492). Those of the best fixed length stand for them.
    """
    tokens = sum(answer.tokens for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    return costs.next_draft_ms / 1e3 * tokens / seconds


def cost_threshold(recordings: Sequence[Recording], cost: float) -> float:
    """Return the product below which the next draft does not pay: it is accepted, with all before it, too rarely.

    A draft that is accepted saves the time of one token, and each costs the share ``cost`` of that time. The threshold
    is the product from which on the sum of both is greatest, so that no calibration of the confidences is taken for
    granted.
    """
    products = np.concatenate([recording.products()[:, :-1].ravel() for recording in recordings])
    places = np.arange(1, recordings[0].confidence_IK.shape[1])
    accepted = np.concatenate(
        [(recording.right_I[:, None] > places).ravel() for recording in recordings]
    )
    order = np.argsort(-products, kind="stable")
    gain = (accepted[order] - cost).cumsum()
    return float(products[order][gain.argmax()]) if gain.max() > 0 else 1.0


def drafts_at(shape: DraftShape, recording: Recording) -> tuple[Counts, Counts]:
    """Return how many drafts a chain has at every place, and how often the drafter is called for them, (I,) each."""
    places = len(recording.right_I)
    if not isinstance(shape, AdaptiveChain):
        return np.full(places, shape.depth), np.full(places, shape.depth)
    confidence_IK = recording.confidence_IK[:, : shape.depth]
    # a draft is made if all before it have a product that is high enough ...
    before_IK = np.concatenate(
        [np.ones((places, 1)), recording.products()[:, : shape.depth - 1]], 1
    )
    made_IK = before_IK >= shape.min_product
    # ... and none of them, nor itself, is left out
    stays_IK = made_IK & (confidence_IK >= shape.min_probability)
    drafts_I = stays_IK.cumprod(1).sum(1)
    goes_on_I = made_IK.cumprod(1).sum(1) > drafts_I  # the drafter was called for one left out
    return drafts_I, drafts_I + goes_on_I


def simulated(recordings: Sequence[Recording], shape: DraftShape, costs: Costs) -> list[Answer]:
    """Return the answers as a shape gives them, with the passes that it takes and the seconds that these should take.

    In the last pass, drafts behind the end of the answer count as rejected.
    """
    return [_answer(recording, shape, costs) for recording in recordings]


def _answer(recording: Recording, shape: DraftShape, costs: Costs) -> Answer:
    drafts_I, calls_I = drafts_at(shape, recording)
    passes = [*_passes(recording.right_I, drafts_I)]
    drafts = drafts_I[passes]
    milliseconds = costs.draft_ms[calls_I[passes]].sum() + costs.verify_ms[drafts].sum()
    accepted = np.minimum(recording.right_I[passes], drafts)
    return Answer(
        recording.prompt_id,
        None,
        len(recording.right_I),
        tuple(accepted.tolist()),
        tuple(drafts.tolist()),
        float(milliseconds) / 1e3,
        plain_seconds=0.0,
        plain_tokens=0,
        identical=None,
    )


def _passes(right_I: Counts, drafts_I: Counts) -> Iterator[int]:
    """Yield the places at which a pass begins: each commits the drafts that are right and one token."""
    place = 0
    while place < len(right_I):
        yield place
        place += 1 + min(int(right_I[place]), int(drafts_I[place]))


def faster(answers: Sequence[Answer], others: Sequence[Answer]) -> Interval | None:
    """Return the ratio of two rates of the same answers, with its interval over prompts."""
    pairs = zip(answers, others, strict=True)
    return speedup(
        [
            answer._replace(plain_tokens=other.tokens, plain_seconds=other.seconds)
            for answer, other in pairs
        ]
    )


def shape_text(shape: AdaptiveChain) -> str:
    """Return a shape as on a command line."""
    thresholds = f"min_product={shape.min_product:.3g},min_probability={shape.min_probability:.3g}"
    return f"adaptive:depth={shape.depth},{thresholds}"


def candidates(depth: int, rule: float) -> list[AdaptiveChain]:
    """Return the chains that are compared: thresholds of the product, the cost rule's own, and of the probability."""
    products = sorted({*THRESHOLDS, round(rule, 3)})
    shapes = [AdaptiveChain(depth, product) for product in products]
    return shapes + [AdaptiveChain(depth, 0.0, least) for least in THRESHOLDS]


def compare_adaptive(
    pair: Pair, prompts: Sequence[Prompt], costs: Costs, max_new_tokens: int, compiled: bool
) -> Json:  # fmt: skip
    """Return what adaptive chains give next to the best chain of a fixed length, at batch size 1; JSON-ready.

    Args:
        prompts: two at least. Shapes are chosen on every other one, and run on the rest.
    """
    recordings = record_chains(pair, prompts[::2], costs.depth, max_new_tokens)
    fixed = [Chain(depth) for depth in range(1, costs.depth + 1)]
    best_fixed, fixed_answers = _fastest(recordings, fixed, costs)
    cost = next_draft_cost(costs, fixed_answers)
    rule = cost_threshold(recordings, cost)
    shapes = candidates(costs.depth, rule)
    best, _ = _fastest(recordings, shapes, costs)
    rest = prompts[1::2]
    with progress("the best threshold", "prompt", len(rest)) as advance:
        chain_run, adaptive_run = benchmark(
            pair.target, pair.drafter, [best_fixed, best], rest, max_new_tokens,
            plain=False, compiled=compiled, advance=advance,
        )  # fmt: skip
    rows = [
        _row(shape_text(shape), answers := simulated(recordings, shape, costs))
        | {"over_fixed": interval_to_json(faster(answers, fixed_answers))}
        for shape in shapes
    ]
    fixed_text = f"chain:depth={best_fixed.depth}"
    return {
        "next_draft_cost": cost,
        "cost_threshold": rule,
        "fixed": _row(fixed_text, fixed_answers),
        "adaptive": rows,
        "measured": {
            "fixed": _row(fixed_text, chain_run),
            "adaptive": _row(shape_text(best), adaptive_run)
            | {"over_fixed": interval_to_json(faster(adaptive_run, chain_run))},
        },
    }


def _fastest(
    recordings: Sequence[Recording], shapes: Sequence[Shape], costs: Costs
) -> tuple[Shape, list[Answer]]:
    runs = [(shape, simulated(recordings, shape, costs)) for shape in shapes]
    return min(runs, key=lambda run: sum(answer.seconds for answer in run[1]))


def _row(shape: str, answers: Sequence[Answer]) -> Json:
    rate = draft_acceptance_rate(answers)
    return {
        "shape": shape,
        "acceptance_length": interval_to_json(acceptance_length(answers)),
        "drafts_per_pass": interval_to_json(drafts_per_pass(answers)),
        "drafts_per_accepted": 1 / rate.mean if rate and rate.mean else None,
        "tokens_per_second": tokens_per_second(answers)["speculative"],
    }


def adaptive_tables(adaptive: Json) -> list[ReportTable]:
    """Return the tables of what :func:`compare_adaptive` gives: as computed, and as run."""
    headings = (
        "Draft shape",
        "Acceptance length",
        "Drafts a pass",
        "Drafts per accepted",
        "Tokens/s",
        "Over fixed",
    )
    computed = [_cells(row) for row in (adaptive["fixed"], *adaptive["adaptive"])]
    run = [_cells(row) for row in adaptive["measured"].values()]
    title = "Chains by confidence, batch size 1: "
    return [
        ReportTable(title + "computed, half of the prompts", headings, computed),
        ReportTable(title + "run, the other half", headings, run),
    ]


def _cells(row: Json) -> list[str]:
    figures = [
        format_interval(row[name], "{:.2f}".format)
        for name in ("acceptance_length", "drafts_per_pass")
    ]
    per_accepted = row["drafts_per_accepted"]
    return [
        row["shape"], *figures, "-" if per_accepted is None else f"{per_accepted:.2f}",
        f"{row['tokens_per_second']:.1f}", format_interval(row.get("over_fixed"), "{:.3f}".format, "x"),
    ]  # fmt: skip


def adaptive_notes(adaptive: Json) -> list[str]:
    """Return a line on whether ending chains by confidence pays."""
    best = adaptive["measured"]["adaptive"]
    ratio = best["over_fixed"]
    fixed = adaptive["measured"]["fixed"]["shape"]
    certain = ratio["low"] is not None and not ratio["low"] <= 1 <= ratio["high"]
    doubt = "" if certain else ", which may be chance"
    return [
        f"Chains that end by confidence, batch size 1: {best['shape']} has "
        f"{format_interval(ratio, '{:.3f}'.format)} times the tokens per second of {fixed}{doubt}."
    ]
