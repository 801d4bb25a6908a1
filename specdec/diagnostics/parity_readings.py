"""The passes that an engine recorded, and what this drafter says at the same places.

Legend: A passes, K drafts, T tokens, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.diagnostics.anchors import AnchoredText
from specdec.diagnostics.parity_eight_bits import ServedText
from specdec.diagnostics.parity_files import ServedDrafter
from specdec.drafter import Drafter
from specdec.engines.proposals import RecordedAnswer, RecordedPass
from specdec.target import Target


class Readings(NamedTuple):
    """Passes of one answer, and what the drafter says there."""

    text: int  # the prompt's number, from 0
    ids_T: Tensor  # prompt and answer
    places_A: Tensor  # of the last known token
    proposed_AK: Tensor
    likeliest_AK: Tensor
    margin_AK: Tensor  # 0 where the proposal is the likeliest; infinite where the drafter does not know the token
    # The first drafts that are the text's own tokens, by the engine and by this drafter, of passes inside the text.
    accepted_A: Tensor
    expected_A: Tensor


def passes_of_text(target: Target, answer: RecordedAnswer) -> list[RecordedPass]:
    """Return the passes of an answer but the misread ones; ValueError if tokens or a pass are not of this text.

    Misread are passes that prefill a text in chunks and began with another token than the text's. At the end of a chunk
    vLLM 0.32.0 hands its drafter the last token that it knows in place of the next one
    (``prepare_next_token_ids_padded``), and keeps keys and values of it. A chunk ends inside the prompt, or, where a
    request was preempted, at a place that an earlier pass has been beyond.
    """
    text = [*answer.prompt, *answer.ids]
    if not all(0 <= token < target.vocab_size for token in text):
        raise ValueError(
            f"the engine's tokens are none of {target.source}'s: does it serve another target?"
        )
    furthest = len(answer.prompt)
    passes = []
    for recorded in answer.passes:
        place = recorded.place
        if not 0 < place < len(text) or text[place] == recorded.last:
            passes.append(recorded)
        elif place >= furthest:
            raise ValueError(
                f"the recorded pass at place {place} reads token {recorded.last}, the text has {text[place]} there: "
                "this vLLM calls its drafter otherwise than those that are known (0.32)"
            )
        furthest = max(furthest, place)
    return passes


# Makes of a text's tokens and a depth what drafts behind its places.
TextDrafter = Callable[[Sequence[int], int], AnchoredText | ServedText]
# What proposed tokens lack of the likeliest, by log-probabilities: see :func:`margins`.
Margins = Callable[[Tensor, Tensor], Tensor]


def comparable(
    target: Target, drafter: Drafter, served: ServedDrafter | None
) -> tuple[TextDrafter, Margins]:
    """Return what an engine's proposals are compared with: the drafter itself, or the reference of a quantized export.

    Args:
        served: the export as the engine reads it.
    """
    if served is not None and served.rounded:
        return partial(ServedText, target, served), shortfall_or_unknown
    return partial(AnchoredText, target, drafter), partial(margins, drafter)


def read_passes(
    target: Target, of: tuple[TextDrafter, Margins], number: int, answer: RecordedAnswer,
    passes: Sequence[RecordedPass],
) -> Readings:  # fmt: skip
    """Draft behind every recorded place, on the engine's drafts and on the text's own tokens.

    Args:
        of: see :func:`comparable`.
        number: the answer's, from 0.
        passes: passes of the answer.
    """
    ids_T = torch.tensor([*answer.prompt, *answer.ids], device=target.device)
    depths = {len(recorded.drafts) for recorded in passes}
    if len(depths) > 1:
        raise ValueError(
            f"the engine proposes {sorted(depths)} tokens a pass: serve one number of drafts"
        )
    (depth,) = depths
    proposed_AK = torch.tensor([recorded.drafts for recorded in passes], device=target.device)
    places_A = torch.tensor([recorded.place for recorded in passes], device=target.device)
    # The text is padded behind its end; passes that reach so far are not counted below.
    padded_T = torch.cat([ids_T, ids_T.new_zeros(depth)])
    text_AK = padded_T[places_A[:, None] + torch.arange(1, depth + 1, device=target.device)]
    given_AK = proposed_AK.clamp(0, target.vocab_size - 1)
    text_drafter, margins_of = of
    text = text_drafter(ids_T.tolist(), depth)
    likeliest = []
    margins_of_groups = []
    drafts_on_text = []
    for rows in torch.arange(len(passes)).split(text.side_by_side):
        places = places_A[rows].tolist()
        chains = text.draft(places, given_AK[rows])
        likeliest.append(chains.tokens_AK)
        margins_of_groups.append(margins_of(chains.log_probs_AKD, proposed_AK[rows]))
        drafts_on_text.append(text.draft(places, text_AK[rows]).tokens_AK)
    whole_A = places_A + depth < len(ids_T)
    expected_AK = (torch.cat(drafts_on_text) == text_AK).cumprod(1)
    accepted_AK = (proposed_AK == text_AK).cumprod(1)
    return Readings(
        text=number,
        ids_T=ids_T,
        places_A=places_A,
        proposed_AK=proposed_AK,
        likeliest_AK=torch.cat(likeliest),
        margin_AK=torch.cat(margins_of_groups),
        accepted_A=accepted_AK.sum(1)[whole_A],
        expected_A=expected_AK.sum(1)[whole_A],
    )


def margins(drafter: Drafter, log_probs_AKD: Tensor, proposed_AK: Tensor) -> Tensor:
    """Return what proposed tokens lack of the likeliest, as shares of the range, (A, K).

    The margin is infinite for tokens that the draft vocabulary lacks.

    Args:
        log_probs_AKD: the drafter's log-probabilities over the draft vocabulary.
        proposed_AK: target ids.
    """
    vocabulary = drafter.config.vocab_size
    outside_AK = (proposed_AK < 0) | (proposed_AK >= vocabulary)
    draft_AK = drafter.vocab.to_draft(proposed_AK.clamp(0, vocabulary - 1))
    unknown_AK = outside_AK | (draft_AK < 0)
    return shortfall(log_probs_AKD, draft_AK.clamp_min(0)).masked_fill(unknown_AK, float("inf"))


def shortfall_or_unknown(log_probs_AKV: Tensor, proposed_AK: Tensor) -> Tensor:
    """Return the same of log-probabilities over the target's vocabulary, (A, K)."""
    vocabulary = log_probs_AKV.shape[-1]
    outside_AK = (proposed_AK < 0) | (proposed_AK >= vocabulary)
    margin_AK = shortfall(log_probs_AKV, proposed_AK.clamp(0, vocabulary - 1))
    return margin_AK.masked_fill(outside_AK, float("inf"))


def shortfall(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return what tokens (...) lack of the best one's score (..., V), as a share of the scores' range."""
    best = scores.amax(-1)
    least = scores.where(scores.isfinite(), best[..., None]).amin(-1)
    return (best - scores.gather(-1, tokens[..., None])[..., 0]) / (best - least).clamp_min(1e-30)
