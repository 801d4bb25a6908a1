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
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.decoding import Chain, Request, SpeculativeDecoder
from specdec.diagnostics.anchors import ANSWERS_SIDE_BY_SIDE, AnchoredText, AnsweredText
from specdec.diagnostics.drift_measure import Document, drafted, no_sums, read_inputs
from specdec.drafter import Drafter
from specdec.report.statistics import LENGTH, Array, Measured, less, measured
from specdec.report.tables import ReportTable, format_interval
from specdec.target import Target
from specdec.utils.text import how_many

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
        "a ceiling: no draft is a token outside it; raise model.drafter.draft_vocab_size to lift the ceiling",
    ),
    TRUE_FEATURES: (
        "true features",
        "wrong drafts although the drafter reads the target's states; try more training or data",
    ),
    OWN_FEATURES: (
        "own features",
        "drift: from draft 2 on it reads no true state; try more ttt_steps or PostNorm, of a block more training",
    ),
    OWN_TOKENS: ("own tokens", "exposure: own drafts decide where the next pass begins"),
    OBSERVED: ("observed by decoding", "what specdec evaluate measures for this chain"),
}

# the drafts that are accepted in every pass of every prompt
Passes = list[list[int]]
Levels = dict[str, Passes]


class MeasuredText(NamedTuple):
    """The drafts at the places of one answer, counted."""

    prompt_id: str
    prompt: list[int]
    accepted: dict[str, list[int]]  # drafts accepted at each place, by level
    sums_FK2: Tensor  # see :class:`Drafted`, of the chains that lie within the answer
    bins_CKR3: Tensor
    inputs_FR2: Tensor  # see :func:`read_inputs`


def pass_starts(accepted: Sequence[int]) -> list[int]:
    """Return the places where passes begin, each behind the last token that the one before committed.

    Args:
        accepted: drafts accepted at every place.
    """
    places = list[int]()
    place = 0
    while place < len(accepted):
        places.append(place)
        place += accepted[place] + 1
    return places


def measure_levels(
    target: Target, drafter: Drafter, answers: Sequence[AnsweredText], max_new_tokens: int, depths: int,
    advance: Callable[[int], object] = lambda done: None,
) -> tuple[Levels, list[MeasuredText]]:  # fmt: skip
    """Draft at every place of the target's answers, and decode; answers without a target pass are left out.

    Args:
        answers: of ``max_new_tokens``, with ``depths`` more tokens behind them.
        advance: called with 1 for each answer that is drafted at, and each that is decoded.

    Raises:
        ValueError: no answer comes to a target pass.
    """
    texts = list[MeasuredText]()
    for answer in answers:
        tokens = min(max_new_tokens, len(answer.ids) - answer.prompt)
        if tokens > 1:
            texts.append(measure_text(target, drafter, answer, tokens, depths))
        advance(1)
    if not texts:
        raise ValueError("no answer comes to a target pass: all end with their first token")
    # Drift is the loss at the passes of true features, exposure the loss of the same drafts at their own passes.
    drafts_and_passes = {name: (name, name) for name in DOWN} | {
        OWN_FEATURES: (OWN_FEATURES, TRUE_FEATURES),
        OWN_TOKENS: (OWN_FEATURES, OWN_FEATURES),
    }
    levels = {
        level: [
            [text.accepted[drafts][place] for place in pass_starts(text.accepted[passes])]
            for text in texts
        ]
        for level, (drafts, passes) in drafts_and_passes.items()
    }
    levels[OBSERVED] = observed_passes(
        target, drafter, [text.prompt for text in texts], max_new_tokens, depths, advance
    )
    return levels, texts


@torch.no_grad()
def measure_text(
    target: Target, drafter: Drafter, text: AnsweredText, tokens: int, depth: int
) -> MeasuredText:
    """Draft from every place of an answer of ``tokens``, behind which ``depth`` more stand unless it has ended."""
    answer_tokens = len(text.ids) - text.prompt
    device = target.device
    # Pad behind an end token; nothing reads the padding.
    ids = text.ids + [text.ids[-1]] * (tokens + depth - answer_tokens)
    anchors = range(text.prompt, text.prompt + tokens - 1)
    # The drafts of the last place can read true states only if these places are drafted from, too.
    extended = range(anchors.start, anchors.stop + depth - 1)
    anchored = AnchoredText(target, drafter, ids, depth, len(extended))
    drafts = list[Tensor]()
    sums_FK2, bins_CKR3 = no_sums(depth, drafter.config.drafting.has_confidence)
    for group in anchored.groups(extended):
        part = drafted(anchored, group, text.prompt, text.prompt + tokens - depth)
        drafts.append(part.chains.tokens_AK)
        sums_FK2 += part.sums_FK2
        bins_CKR3 += part.bins_CKR3
    steps_K = torch.arange(depth, device=device)
    draft_SK = torch.arange(len(extended), device=device)[:, None] + steps_K
    text_SK = torch.tensor([*ids, *[-1] * depth], device=device)[draft_SK + anchors.start + 1]
    right_SK = torch.cat(drafts) == text_SK
    text_AK = text_SK[: tokens - 1]
    hits = {
        PERFECT: torch.ones_like(text_AK, dtype=torch.bool),
        VOCABULARY: drafter.vocab.to_draft(text_AK) >= 0,
        # The draft at step k is the first one of the chain that begins k places further on.
        TRUE_FEATURES: right_SK[:, 0][draft_SK[: tokens - 1]],
        OWN_FEATURES: right_SK[: tokens - 1],
    }
    most_A = torch.full((tokens - 1,), depth, device=device)
    # An end token is the last one of its pass: nothing is accepted behind it.
    if text.ids[-1] in target.eos_token_ids:
        most_A = most_A.minimum(answer_tokens - 1 - torch.arange(1, tokens, device=device))
    accepted = {
        name: hit_AK.cumprod(1).sum(1).minimum(most_A).tolist() for name, hit_AK in hits.items()
    }
    inputs_FR2 = read_inputs(target, drafter, ids[: text.prompt + tokens], text.prompt)
    return MeasuredText(
        text.prompt_id, text.ids[: text.prompt], accepted, sums_FK2, bins_CKR3, inputs_FR2
    )


def observed_passes(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_new_tokens: int, depth: int,
    advance: Callable[[int], object],
) -> Passes:  # fmt: skip
    """Return the drafts that every pass of decoding with a chain accepts, by prompt."""
    batch = min(ANSWERS_SIDE_BY_SIDE, target.most_texts, len(prompts))
    decoder = SpeculativeDecoder(target, drafter, Chain(depth), batch=batch)
    requests = [Request(ids, max_new_tokens) for ids in prompts]
    accepted: dict[int, list[int]] = {}
    for number, answer in decoder.generate_all(requests, target.eos_token_ids):
        accepted[number] = list(answer.accepted)
        advance(1)
    return [accepted[number] for number in range(len(prompts))]


def waterfall(levels: Levels) -> Document:
    """Return the levels, the bars between them, and whether they add up to what decoding accepts; JSON-ready.

    Args:
        levels: those of :data:`DOWN`, then ``observed``.

    Raises:
        ValueError: a level has no target pass.
    """
    rows = []
    for name, accepted in levels.items():
        sums_P2 = _sums(accepted)
        committed, passes = sums_P2.astype(int).T.tolist()
        length = measured(sums_P2, bounds=LENGTH)
        rows.append(
            {"name": name, "acceptance_length": length, "committed": committed, "passes": passes}
        )
    bars = [
        {"from": upper, "to": lower, "loss": _loss(levels[upper], levels[lower])}
        for upper, lower in itertools.pairwise(DOWN)
    ]
    expected = levels[OWN_TOKENS]
    observed = levels[OBSERVED]
    difference = _loss(expected, observed)
    mean, low, high = (difference[key] for key in ("mean", "low", "high"))
    assert mean is not None
    holds = mean == 0
    if low is not None and high is not None:
        holds = abs(mean) < INVISIBLE or low <= 0 <= high
    same = sum(
        sum(map(operator.eq, passes, observed_passes))
        for passes, observed_passes in zip(expected, observed, strict=True)
        if len(passes) == len(observed_passes)
    )
    check = {
        "holds": holds,
        "difference": difference,
        "passes": sum(map(len, observed)),
        "same_passes": same,
    }
    return {"levels": rows, "bars": bars, "check": check}


def _sums(accepted: Passes) -> Array:
    """Return tokens committed, and passes, of every prompt, (P, 2)."""
    sums = [(sum(passes) + len(passes), len(passes)) for passes in accepted]
    return np.array(sums, dtype=np.float64)


def _loss(upper: Passes, lower: Passes) -> Measured:
    """Return one level's acceptance length less another's, over the prompts with a pass on both."""
    sums_P4 = np.concatenate([_sums(upper), _sums(lower)], axis=1)
    both_P4 = sums_P4[(sums_P4[:, 1::2] > 0).all(1)]
    loss = measured(both_P4, less)
    if loss["mean"] is None:
        raise ValueError(
            "no target pass to measure on two levels: give prompts with longer answers"
        )
    return loss


def waterfall_table(result: Document, depth: int) -> ReportTable:
    """Return a table of the levels, with what was lost to each."""
    losses = {bar["to"]: bar["loss"] for bar in result["bars"]}
    rows = []
    for level in result["levels"]:
        title, meaning = MEANINGS[level["name"]]
        rows.append(
            [
                title,
                _figure(level["acceptance_length"]),
                _figure(losses.get(level["name"])),
                meaning,
            ]
        )
    return ReportTable(
        f"Where acceptance is lost: chains of {depth}",
        ["Level", "Acceptance length", "Loss", "What it means"],
        rows,
    )


def _figure(value: Measured | None) -> str:
    return format_interval(value, lambda number: f"{number:z.2f}")


def waterfall_verdict(result: Document) -> str:
    """Return whether the bars add up to what decoding accepts, with the sum."""
    check = result["check"]
    levels = {level["name"]: level["acceptance_length"]["mean"] for level in result["levels"]}
    parts = [levels[PERFECT], *(-bar["loss"]["mean"] for bar in result["bars"])]
    terms = " + ".join(f"{part:z.3f}" for part in parts).replace("+ -", "- ")
    total = f"{terms} = {levels[OWN_TOKENS]:.3f}"
    passes = how_many(check["passes"], "pass")
    decoded = f"decoding accepts {levels[OBSERVED]:.3f}, {check['same_passes']} of {passes} alike"
    if check["holds"]:
        return f"The bars add up: {total}; {decoded}."
    return (
        f"THE BARS DO NOT ADD UP: {total}, but {decoded}: specdec parity says where the two part."
    )
