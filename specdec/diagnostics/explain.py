"""``specdec explain``: where acceptance is lost, bar by bar, from perfect drafts to what decoding accepts.

Of each prompt the target writes a greedy answer y_1 ... y_N. A *place* n is where a target pass can begin: y_1 to y_n
are known, y_n is the root, and the D drafts are to be y_n+1 ... y_n+D. At every level a draft is right or wrong:

- ``perfect``: always right;
- ``vocabulary``: right if the token is in the draft vocabulary;
- ``true_features``: right if the drafter says it after the target's own states of everything before;
- ``own_features``: the same in a chain, which from its second step on reads the drafter's own states.

What is accepted at a place is the number of right drafts before the first wrong one. A level's passes are those of
decoding with its drafts; two levels borrow passes: drift is what ``own_features`` loses at the passes of
``true_features``, exposure what ``own_tokens`` loses with the same drafts at their own passes. ``observed`` is the
decoder itself, another code path. The bars between the levels add up to it, and the report checks that.

Legend: A places, S places and some more, K drafts, P prompts.
"""

import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from specdec.decoding import Chain, Request, SpeculativeDecoder
from specdec.diagnostics.anchors import AnchoredText, AnsweredText, answered_texts
from specdec.drafter import Drafter
from specdec.evaluation.benchmark import cpu_matmul_backend
from specdec.evaluation.config import MeasurementConfig, drafter_facts, load_pair
from specdec.evaluation.prompts import first_turns
from specdec.evaluation.statistics import Array, Measured, measured, ratio
from specdec.evaluation.style import (
    GREY,
    ReportTable,
    few_prompts,
    print_report,
    save_figure,
    shown,
    whiskers,
    write_report,
)
from specdec.target import Target
from specdec.utils.files import staged_directory, write_json
from specdec.utils.progress import progress

PERFECT, VOCABULARY, TRUE_FEATURES, OWN_FEATURES = "perfect", "vocabulary", "true_features", "own_features"
OWN_TOKENS, OBSERVED = "own_tokens", "observed"
DOWN = (PERFECT, VOCABULARY, TRUE_FEATURES, OWN_FEATURES, OWN_TOKENS)
INVISIBLE = 0.01  # tokens per target pass, which no figure shows
TOGETHER = 16  # sequences decoded side by side
REPORT, FIGURE, NUMBERS = "report.md", "explain.png", "explain.json"

SAYS = {  # title, and what a loss there means
    PERFECT: ("perfect drafts", "every draft is right"),
    VOCABULARY: ("draft vocabulary", "what it lacks cannot be drafted; a larger one wins this back"),
    TRUE_FEATURES: ("true features", "wrong though the drafter reads the target's states; more training or data"),
    OWN_FEATURES: ("own features", "drift: it reads its own states; more ttt_steps, or PostNorm"),
    OWN_TOKENS: ("own tokens", "exposure: own drafts decide where the next pass begins"),
    OBSERVED: ("observed by decoding", "what specdec evaluate measures for this chain"),
}

Levels = dict[str, list[list[int]]]
"""By name: the drafts that are accepted in every pass of every prompt."""


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(MeasurementConfig):
    """What is explained.

    Args:
        drafter: the drafter's directory.
        depth: drafts a pass, in a chain.
    """

    drafter: str
    depth: int = 5

    def __post_init__(self) -> None:
        Chain(self.depth)
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens must be at least 2, for a pass to measure, not {self.max_new_tokens}")


def explain(config: ExplainConfig) -> int:
    """Where acceptance is lost, bar by bar: vocabulary, drafter, drift, exposure.

    The exit status is 1 if the bars do not add up to what decoding accepts.

    Example: specdec explain --target Qwen/Qwen3-4B --drafter runs/a/drafter --prompts mt_bench.jsonl --limit 40
    """
    depth, tokens = config.depth, config.max_new_tokens
    with staged_directory(config.place("explain")) as folder:
        prompts = config.load_prompts()
        pair = load_pair(config.target, config.drafter, config.device, config.other_target)
        ids, skipped = first_turns(pair.target, prompts, tokens + depth, depth + 1)
        left_out = {one.prompt_id for one in skipped}
        kept = [prompt for prompt in prompts if prompt.prompt_id not in left_out]
        named = [(prompt.prompt_id, own) for prompt, own in zip(kept, ids, strict=True)]
        levels, texts = measure_levels(pair.target, pair.drafter, named, tokens, depth)
        context = {"drafter": drafter_facts(config.drafter, pair), **config.context(pair.target, kept)}
        told = {
            "version": 1,
            "depth": depth,
            **waterfall(levels),
            "prompts": [text.prompt_id for text in texts],
            "skipped": [one._asdict() for one in skipped],
            **context,
        }
        tables, notes = report_tables(told), [verdict(told), *few_prompts(len(texts))]
        plot_waterfall(told, folder / FIGURE)
        write_report(folder / REPORT, "Where acceptance is lost", notes, FIGURE, tables, context)
        write_json(folder / NUMBERS, told)
    print_report(tables[:1], notes)
    return 0 if told["check"]["holds"] else 1


class ExplainedText(NamedTuple):
    """A prompt and what the target said to it."""

    prompt_id: str
    ids: list[int]  # prompt, answer, and D tokens behind it; behind an end token repetitions of it, which nothing reads
    prompt: int  # tokens of the prompt
    kept: int  # N, tokens of the answer
    end: int | None  # the first end token's place in the answer and the D tokens behind it, from 1

    @property
    def anchors(self) -> range:
        """Of the places n = 1 to N - 1."""
        return range(self.prompt, self.prompt + self.kept - 1)

    def most(self, depth: int) -> list[int]:
        """Drafts that can be accepted at each place: none behind an end token, which is the pass's last token."""
        return [depth if self.end is None else min(depth, self.end - n - 1) for n in range(1, self.kept)]

    @classmethod
    def of(cls, text: AnsweredText, max_new_tokens: int, depth: int, end: frozenset[int]) -> "ExplainedText":
        """From an answer of ``max_new_tokens + depth`` tokens, or of fewer up to an end token."""
        made = len(text.ids) - text.prompt
        kept = min(max_new_tokens, made)
        padding = [text.ids[-1]] * (kept + depth - made)
        return cls(*text._replace(ids=[*text.ids, *padding]), kept, made if text.ids[-1] in end else None)


def passes(accepted: Sequence[int]) -> list[int]:
    """Where passes begin, from place 0 on, if each begins behind what the one before has committed.

    Args:
        accepted: drafts accepted at each place.
    """
    found, place = list[int](), 0
    while place < len(accepted):
        found.append(place)
        place += accepted[place] + 1
    return found


def measure_levels(
    target: Target, drafter: Drafter, prompts: Sequence[tuple[str, list[int]]], max_new_tokens: int, depth: int
) -> tuple[Levels, list[ExplainedText]]:
    """Every level of the prompts whose answers come to a target pass, and their texts.

    Args:
        prompts: ids and tokens, each with room for the answer and ``depth`` tokens behind it.

    Raises:
        ValueError: no answer comes to a target pass.
    """
    end = target.eos_token_ids
    with progress("explaining", "prompts", 3 * len(prompts)) as advance, cpu_matmul_backend(target):
        answers = answered_texts(target, prompts, max_new_tokens + depth, on_answer=lambda: advance(1))
        every = [ExplainedText.of(text, max_new_tokens, depth, end) for text in answers]
        texts = [text for text in every if text.anchors]
        if not texts:
            raise ValueError("no answer comes to a target pass: all end with their first token")
        advance(2 * (len(every) - len(texts)))
        runs = [at_every_place(target, drafter, text, depth, advance) for text in texts]
        # drift is what the passes of true features lose, exposure what the same drafts lose at their own passes
        begun = {name: name for name in (PERFECT, VOCABULARY, TRUE_FEATURES)} | {OWN_FEATURES: TRUE_FEATURES}
        levels = {name: [_at(run[name], run[of]) for run in runs] for name, of in begun.items()}
        levels[OWN_TOKENS] = [_at(run[OWN_FEATURES], run[OWN_FEATURES]) for run in runs]
        asked = [text.ids[: text.prompt] for text in texts]
        levels[OBSERVED] = observed(target, drafter, asked, max_new_tokens, depth, advance)
    return levels, texts


@torch.no_grad()
def at_every_place(
    target: Target, drafter: Drafter, text: ExplainedText, depth: int, advance: Callable[[int], None] = lambda n: None
) -> dict[str, list[int]]:
    """Drafts accepted at each place of one answer, by level."""
    anchors = text.anchors
    more = range(anchors.start, anchors.stop + depth - 1)  # where the drafts of the last place can read true states
    anchored, padded = AnchoredText(target, drafter, text.ids, depth, len(more)), [*text.ids, *[-1] * depth]
    right_SK = torch.cat([anchored.draft(some).matched(padded, some) for some in anchored.groups(more)])
    draft_AK = torch.arange(len(anchors), device=target.device)[:, None] + torch.arange(depth, device=target.device)
    due_AK = torch.tensor(text.ids, device=target.device)[draft_AK + anchors.start + 1]
    hits = {
        PERFECT: torch.ones_like(due_AK, dtype=torch.bool),
        VOCABULARY: drafter.vocab.to_draft(due_AK) >= 0,
        TRUE_FEATURES: right_SK[:, 0][draft_AK],  # the first draft of the chain that begins k places further on
        OWN_FEATURES: right_SK[: len(anchors)],
    }
    most_A = torch.tensor(text.most(depth), device=target.device)
    advance(1)
    return {name: hit_AK.cumprod(1).sum(1).minimum(most_A).tolist() for name, hit_AK in hits.items()}


def _at(accepted: Sequence[int], begun: Sequence[int]) -> list[int]:
    """What is accepted at each place, at the passes of a level."""
    return [accepted[place] for place in passes(begun)]


def observed(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_new_tokens: int, depth: int,
    advance: Callable[[int], None] = lambda n: None,
) -> list[list[int]]:  # fmt: skip
    """Drafts that every pass of decoding with a chain accepts, by prompt."""
    decoder = SpeculativeDecoder(target, drafter, Chain(depth), batch=min(TOGETHER, len(prompts)))
    found: dict[int, list[int]] = {}
    for number, made in decoder.generate_all([Request(ids, max_new_tokens) for ids in prompts], target.eos_token_ids):
        found[number] = list(made.accepted)
        advance(1)
    return [found[number] for number in range(len(prompts))]


def waterfall(levels: Levels) -> dict[str, Any]:
    """Levels, the bars between them, and whether they add up to what decoding accepts; JSON-ready.

    Args:
        levels: those of :data:`DOWN`, then ``observed``.

    Raises:
        ValueError: a level has no target pass.
    """
    own, decoded = levels[OWN_TOKENS], levels[OBSERVED]
    difference = _less(own, decoded)
    mean, low, high = (difference[key] for key in ("mean", "low", "high"))
    assert mean is not None
    holds = mean == 0 if low is None or high is None else abs(mean) < INVISIBLE or low <= 0 <= high
    alike = [pair for pair in zip(own, decoded, strict=True) if len(pair[0]) == len(pair[1])]

    return {
        "levels": [_level(name, accepted) for name, accepted in levels.items()],
        "bars": [
            {"from": upper, "to": lower, "loss": _less(levels[upper], levels[lower])}
            for upper, lower in itertools.pairwise(DOWN)
        ],
        "check": {
            "holds": holds,
            "difference": difference,
            "passes": sum(map(len, decoded)),
            "same_passes": sum(a == b for one, two in alike for a, b in zip(one, two, strict=True)),
        },
    }


def _level(name: str, accepted: list[list[int]]) -> dict[str, Any]:
    length = measured(_sums(accepted))
    if length["mean"] is None:
        raise ValueError(f"{name}: no target pass to measure: give prompts with longer answers")
    return {
        "name": name,
        "acceptance_length": length,
        "committed": [sum(own) + len(own) for own in accepted],
        "passes": [len(own) for own in accepted],
    }


def _sums(accepted: Sequence[Sequence[int]]) -> Array:
    """Tokens committed, and passes, of every prompt, (P, 2)."""
    return np.array([(sum(own) + len(own), len(own)) for own in accepted], dtype=np.float64)


def _less(upper: list[list[int]], lower: list[list[int]]) -> Measured:
    """One level's acceptance length less another's; prompts with a pass on both are drawn for both alike."""
    sums_P4 = np.concatenate([_sums(upper), _sums(lower)], axis=1)
    both_P4 = sums_P4[(sums_P4[:, 1::2] > 0).all(1)]
    found = measured(both_P4, lambda sums: ratio(sums[..., :2]) - ratio(sums[..., 2:]))
    if found["mean"] is None:
        raise ValueError("no target pass to measure on two levels: give prompts with longer answers")
    return found


def report_tables(told: dict[str, Any]) -> list[ReportTable]:
    """Levels with what was lost to each, and prompts left out."""
    losses = {bar["to"]: bar["loss"] for bar in told["bars"]}
    levels = []
    for one in told["levels"]:
        title, meaning = SAYS[one["name"]]
        levels.append([title, _figure(one["acceptance_length"]), _figure(losses.get(one["name"])), meaning])
    skipped = [[one["prompt_id"], one["reason"]] for one in told["skipped"]]
    return [
        ReportTable(f"Chains of {told['depth']}", ["Level", "Acceptance length", "Loss", "What it means"], levels),
        ReportTable("Prompts left out", ["Prompt", "Reason"], skipped, left=2),
    ]


def _figure(value: Measured | None) -> str:
    return shown(value, lambda each: f"{each:z.2f}")


def verdict(told: dict[str, Any]) -> str:
    """Whether the bars add up to what decoding accepts, with the sum."""
    check, levels = told["check"], {level["name"]: level["acceptance_length"]["mean"] for level in told["levels"]}
    parts = [levels[PERFECT], *(-bar["loss"]["mean"] for bar in told["bars"])]
    total = " + ".join(f"{part:z.3f}" for part in parts).replace("+ -", "- ") + f" = {levels[OWN_TOKENS]:.3f}"
    decoded = f"decoding accepts {levels[OBSERVED]:.3f}, {check['same_passes']} of {check['passes']} passes alike"
    if check["holds"]:
        return f"The bars add up: {total}; {decoded}."
    return f"THE BARS DO NOT ADD UP: {total}, but {decoded}: specdec parity says where the two part."


def plot_waterfall(told: dict[str, Any], path: Path) -> None:
    """Draw a bar for each step, hanging from the level above."""
    lengths = {level["name"]: level["acceptance_length"] for level in told["levels"]}
    steps = [(SAYS[bar["to"]][0], lengths[bar["from"]]["mean"], bar["loss"]) for bar in told["bars"]]
    first, last = ((SAYS[name][0], 0.0, lengths[name]) for name in (PERFECT, OBSERVED))
    rows = [first, *steps, last]  # name, where it hangs, what
    figure = Figure(figsize=(10, 1.7 + 0.5 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots()
    for y, (_, upper, found) in enumerate(rows):
        end = upper - found["mean"] if upper else found["mean"]  # a loss leads down from the level above
        below, above = whiskers(found)[:: -1 if upper else 1]
        colour, hatch = (GREY, "") if not upper else ("#D55E00", "//") if found["mean"] >= 0 else ("#56B4E9", "..")
        axes.barh(y, end - upper, left=upper, height=0.6, color=colour, hatch=hatch, edgecolor="black")
        axes.errorbar([end], [y], xerr=[[below], [above]], color="black", capsize=4)
        place = (max(end + above, upper), y)
        axes.annotate(_figure(found), place, (8, 0), textcoords="offset points", va="center")
    longest = max(1.2, *(length["mean"] for length in lengths.values()))
    axes.set(
        xlim=(1, longest + 0.44 * (longest - 1)), ylim=(len(rows) - 0.4, -0.6), xticks=range(1, int(longest) + 1),
        xlabel="tokens per target pass, bonus token included (lines: 95 % interval)",
        title=f"Where acceptance is lost: chains of {told['depth']}",
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), ["\n".join(textwrap.wrap(name, 24)) for name, _, _ in rows])
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
