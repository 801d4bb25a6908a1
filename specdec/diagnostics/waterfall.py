"""Where acceptance is lost, bar by bar, from perfect drafts to what decoding accepts.

Of each prompt the target writes a greedy answer y_1 ... y_N. A *place* n is where a target pass can begin: y_1 to y_n
are known, y_n is the root, and the K drafts are to be y_n+1 ... y_n+K. At every level a draft is right or wrong:

- ``perfect``: always right;
- ``vocabulary``: right if the token is in the draft vocabulary;
- ``true_features``: right if the drafter says it after the target's own states of everything before;
- ``own_features``: the same in a chain, which from its second step on reads the drafter's own states.

What is accepted at a place is the number of right drafts before the first wrong one. A level's passes are those of
decoding with its drafts; two levels borrow passes: drift is what ``own_features`` loses at the passes of
``true_features``, exposure what ``own_tokens`` loses with the same drafts at their own passes. ``observed`` is the
decoder itself, another code path. The bars between the levels add up to it, which is checked.

Legend: A places, S places and some more, K drafts, P prompts, F series.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.decoding import Chain, Request, SpeculativeDecoder
from specdec.diagnostics.anchors import ANSWERS_SIDE_BY_SIDE, AnchoredText, AnsweredText
from specdec.diagnostics.drift_measure import SERIES, drafted, read_inputs
from specdec.drafter import Drafter
from specdec.report.statistics import LENGTH, Array, Measured, less, measured
from specdec.report.tables import ReportTable, shown, style, whiskers
from specdec.target import Target
from specdec.utils.text import how_many

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PERFECT = "perfect"
VOCABULARY = "vocabulary"
TRUE_FEATURES = "true_features"
OWN_FEATURES = "own_features"
OWN_TOKENS = "own_tokens"
OBSERVED = "observed"
DOWN = (PERFECT, VOCABULARY, TRUE_FEATURES, OWN_FEATURES, OWN_TOKENS)
INVISIBLE = 0.01  # tokens per target pass, which no figure shows

MEANINGS = {  # title, and what a loss there means
    PERFECT: ("perfect drafts", "every draft is right"),
    VOCABULARY: (
        "draft vocabulary",
        "what it lacks cannot be drafted; a larger one wins this back",
    ),
    TRUE_FEATURES: (
        "true features",
        "wrong though the drafter reads the target's states; more training or data",
    ),
    OWN_FEATURES: (
        "own features",
        "drift: it reads its own states, or a mask; more ttt_steps, PostNorm, or no mask",
    ),
    OWN_TOKENS: ("own tokens", "exposure: own drafts decide where the next pass begins"),
    OBSERVED: ("observed by decoding", "what specdec evaluate measures for this chain"),
}

# by name: the drafts that are accepted in every pass of every prompt
Levels = dict[str, list[list[int]]]


class MeasuredText(NamedTuple):
    """What was drafted at the places of one answer."""

    prompt_id: str
    prompt: list[int]
    accepted: dict[str, list[int]]  # drafts accepted at each place, by level
    sums_FK2: Tensor  # as of :func:`drafted`, of the chains that lie within the answer
    inputs_FR2: Tensor  # as of :func:`read_inputs`


def passes(accepted: Sequence[int]) -> list[int]:
    """Where passes begin, from place 0 on, given the drafts accepted at each: each behind what the last committed."""
    found = list[int]()
    place = 0
    while place < len(accepted):
        found.append(place)
        place += accepted[place] + 1
    return found


def measure_levels(
    target: Target, drafter: Drafter, answers: Sequence[AnsweredText], max_new_tokens: int, depths: int,
    advance: Callable[[int], object] = lambda done: None,
) -> tuple[Levels, list[MeasuredText]]:  # fmt: skip
    """Draft at every place of the target's answers, and decode: every level, of the answers that come to a target pass.

    Answers are of ``max_new_tokens`` and ``depths`` behind them; ``advance`` is told of each that is drafted at, and of
    each that is decoded. ValueError if no answer comes to a target pass.
    """
    texts = list[MeasuredText]()
    for one in answers:
        if (kept := min(max_new_tokens, len(one.ids) - one.prompt)) > 1:
            texts.append(measure_text(target, drafter, one, kept, depths))
        advance(1)
    if not texts:
        raise ValueError("no answer comes to a target pass: all end with their first token")
    # drift is what the passes of true features lose, exposure what the same drafts lose at their own passes
    of = {
        PERFECT: PERFECT,
        VOCABULARY: VOCABULARY,
        TRUE_FEATURES: TRUE_FEATURES,
        OWN_FEATURES: TRUE_FEATURES,
    }
    levels = {name: [_at(one.accepted, name, begun) for one in texts] for name, begun in of.items()}
    levels[OWN_TOKENS] = [_at(one.accepted, OWN_FEATURES, OWN_FEATURES) for one in texts]
    levels[OBSERVED] = observed(
        target, drafter, [one.prompt for one in texts], max_new_tokens, depths, advance
    )
    return levels, texts


@torch.no_grad()
def measure_text(
    target: Target, drafter: Drafter, text: AnsweredText, kept: int, depth: int
) -> MeasuredText:
    """Draft from every place of an answer of ``kept`` tokens, behind which ``depth`` more stand unless it has ended."""
    made = len(text.ids) - text.prompt
    device = target.device
    # behind an end token, which nothing reads
    ids = text.ids + [text.ids[-1]] * (kept + depth - made)
    anchors = range(text.prompt, text.prompt + kept - 1)
    # where the drafts of the last place can read true states
    more = range(anchors.start, anchors.stop + depth - 1)
    anchored = AnchoredText(target, drafter, ids, depth, len(more))
    drafts = list[Tensor]()
    sums_FK2 = torch.zeros(len(SERIES), depth, 2, dtype=torch.float64)
    for some in anchored.groups(more):
        chains, part_FK2 = drafted(anchored, some, text.prompt, text.prompt + kept - depth)
        drafts.append(chains.tokens_AK)
        sums_FK2 += part_FK2.cpu()
    draft_SK = torch.arange(len(more), device=device)[:, None] + torch.arange(depth, device=device)
    due_SK = torch.tensor([*ids, *[-1] * depth], device=device)[draft_SK + anchors.start + 1]
    right_SK = torch.cat(drafts) == due_SK
    due_AK = due_SK[: kept - 1]
    draft_AK = draft_SK[: kept - 1]
    hits = {
        PERFECT: torch.ones_like(due_AK, dtype=torch.bool),
        VOCABULARY: drafter.vocab.to_draft(due_AK) >= 0,
        # the first draft of the chain that begins k places further on
        TRUE_FEATURES: right_SK[:, 0][draft_AK],
        OWN_FEATURES: right_SK[: kept - 1],
    }
    most_A = torch.full((kept - 1,), depth, device=device)
    # nothing is accepted behind an end token, which is a pass's last token
    if text.ids[-1] in target.eos_token_ids:
        most_A = most_A.minimum(made - 1 - torch.arange(1, kept, device=device))
    accepted = {
        name: hit_AK.cumprod(1).sum(1).minimum(most_A).tolist() for name, hit_AK in hits.items()
    }
    inputs_FR2 = read_inputs(target, drafter, ids[: text.prompt + kept], text.prompt)
    return MeasuredText(text.prompt_id, text.ids[: text.prompt], accepted, sums_FK2, inputs_FR2)


def _at(accepted: dict[str, list[int]], name: str, begun: str) -> list[int]:
    """What one level accepts at the passes of another."""
    return [accepted[name][place] for place in passes(accepted[begun])]


def observed(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_new_tokens: int, depth: int,
    advance: Callable[[int], object],
) -> list[list[int]]:  # fmt: skip
    """Drafts that every pass of decoding with a chain accepts, by prompt."""
    batch = min(ANSWERS_SIDE_BY_SIDE, target.most_texts, len(prompts))
    decoder = SpeculativeDecoder(target, drafter, Chain(depth), batch=batch)
    found: dict[int, list[int]] = {}
    for number, made in decoder.generate_all(
        [Request(ids, max_new_tokens) for ids in prompts], target.eos_token_ids
    ):
        found[number] = list(made.accepted)
        advance(1)
    return [found[number] for number in range(len(prompts))]


def waterfall(levels: Levels) -> dict[str, Any]:
    """Levels, the bars between them, and whether they add up to what decoding accepts; JSON-ready.

    ``levels`` are those of :data:`DOWN`, then ``observed``. ValueError if one has no target pass.
    """
    own = levels[OWN_TOKENS]
    decoded = levels[OBSERVED]
    difference = _less(own, decoded)
    mean, low, high = (difference[key] for key in ("mean", "low", "high"))
    assert mean is not None
    holds = mean == 0 if low is None or high is None else abs(mean) < INVISIBLE or low <= 0 <= high
    alike = [pair for pair in zip(own, decoded, strict=True) if len(pair[0]) == len(pair[1])]
    same = sum(a == b for one, two in alike for a, b in zip(one, two, strict=True))
    check = {
        "holds": holds,
        "difference": difference,
        "passes": sum(map(len, decoded)),
        "same_passes": same,
    }
    told = []
    for name, accepted in levels.items():
        sums_P2 = _sums(accepted)
        committed, begun = sums_P2.astype(int).T.tolist()
        length = measured(sums_P2, bounds=LENGTH)
        told.append(
            {"name": name, "acceptance_length": length, "committed": committed, "passes": begun}
        )
    pairs = itertools.pairwise(DOWN)
    bars = [{"from": one, "to": two, "loss": _less(levels[one], levels[two])} for one, two in pairs]
    return {"levels": told, "bars": bars, "check": check}


def _sums(accepted: Sequence[Sequence[int]]) -> Array:
    """Tokens committed, and passes, of every prompt, (P, 2)."""
    return np.array([(sum(own) + len(own), len(own)) for own in accepted], dtype=np.float64)


def _less(upper: list[list[int]], lower: list[list[int]]) -> Measured:
    """One level's acceptance length less another's; of the prompts with a pass on both."""
    sums_P4 = np.concatenate([_sums(upper), _sums(lower)], axis=1)
    both_P4 = sums_P4[(sums_P4[:, 1::2] > 0).all(1)]
    found = measured(both_P4, less)
    if found["mean"] is None:
        raise ValueError(
            "no target pass to measure on two levels: give prompts with longer answers"
        )
    return found


def waterfall_table(found: dict[str, Any], depth: int) -> ReportTable:
    """Levels with what was lost to each."""
    losses = {bar["to"]: bar["loss"] for bar in found["bars"]}
    rows = []
    for one in found["levels"]:
        title, meaning = MEANINGS[one["name"]]
        rows.append(
            [title, _figure(one["acceptance_length"]), _figure(losses.get(one["name"])), meaning]
        )
    headings = ["Level", "Acceptance length", "Loss", "What it means"]
    return ReportTable(f"Where acceptance is lost: chains of {depth}", headings, rows)


def _figure(value: Measured | None) -> str:
    return shown(value, lambda each: f"{each:z.2f}")


def verdict(found: dict[str, Any]) -> str:
    """Whether the bars add up to what decoding accepts, with the sum."""
    check = found["check"]
    levels = {level["name"]: level["acceptance_length"]["mean"] for level in found["levels"]}
    parts = [levels[PERFECT], *(-bar["loss"]["mean"] for bar in found["bars"])]
    total = (
        " + ".join(f"{part:z.3f}" for part in parts).replace("+ -", "- ")
        + f" = {levels[OWN_TOKENS]:.3f}"
    )
    passes = how_many(check["passes"], "pass")
    decoded = f"decoding accepts {levels[OBSERVED]:.3f}, {check['same_passes']} of {passes} alike"
    if check["holds"]:
        return f"The bars add up: {total}; {decoded}."
    return (
        f"THE BARS DO NOT ADD UP: {total}, but {decoded}: specdec parity says where the two part."
    )


def draw_waterfall(measured_by_drafter: Sequence[dict[str, Any]], axes: "Axes") -> None:
    """Draw a bar for each step, hanging from the level above; a bar for each drafter, in its colour."""
    count = len(measured_by_drafter)
    longest = 1.2
    for number, found in enumerate(measured_by_drafter):
        lengths = {level["name"]: level["acceptance_length"] for level in found["levels"]}
        rows = [(0.0, lengths[PERFECT])]  # where it hangs, what
        rows += [(lengths[bar["from"]]["mean"], bar["loss"]) for bar in found["bars"]]
        rows.append((0.0, lengths[OBSERVED]))
        longest = max(longest, *(length["mean"] for length in lengths.values()))
        for row, (upper, one) in enumerate(rows):
            y = row + 0.7 * ((number + 0.5) / count - 0.5)
            # a loss leads down from the level above
            end = upper - one["mean"] if upper else one["mean"]
            below, above = whiskers(one)[:: -1 if upper else 1]
            gained = "" if not upper or one["mean"] >= 0 else "////"
            bar = {
                "height": 0.7 / count,
                "color": style(number)["color"],
                "edgecolor": "black",
                "hatch": gained,
            }
            axes.barh(y, end - upper, left=upper, linewidth=0.6, **bar)
            axes.errorbar(
                [end], [y], xerr=[[below], [above]], color="black", capsize=2, elinewidth=1
            )
            where: dict[str, Any] = {
                "xytext": (6, 0),
                "textcoords": "offset points",
                "va": "center",
            }
            axes.annotate(
                _figure(one), (max(end + above, upper), y), fontsize=max(5, 9 - count), **where
            )
    axes.set(
        xlim=(1, longest + 0.4 * (longest - 1)), ylim=(len(DOWN) + 0.6, -0.6), xticks=range(1, int(longest) + 1),
        xlabel="tokens per target pass, bonus token included; hatched: gained", title="Where acceptance is lost",
    )  # fmt: skip
    axes.set_yticks(range(len(DOWN) + 1), [MEANINGS[name][0] for name in (*DOWN, OBSERVED)])
    axes.spines[["top", "right"]].set_visible(False)
