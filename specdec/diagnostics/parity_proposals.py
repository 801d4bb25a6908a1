"""What an engine proposed in every pass, token by token beside what this drafter says at the same place.

Each proposal is compared for itself: the drafter's chain reads the engine's own earlier drafts of the pass, so that a
first difference does not make the later ones incomparable. A token that is not the drafter's likeliest is a near-tie
only where it lacks less than rounding can make; everything else is a difference.

How much such a comparison can see depends on the drafter. So the export's independent reference is asked, too: how
many of the compared proposals would have been other tokens if attention had seen its own place alone, and under each
fault of :mod:`specdec.diagnostics.planted`?

Legend: A passes, K drafts, T tokens, V target vocabulary, H hidden.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.diagnostics import parity_reference as reference
from specdec.diagnostics.anchors import AnchoredText
from specdec.diagnostics.parity_compare import fused_features, reported_states
from specdec.diagnostics.planted import FAULTS, planted
from specdec.drafter import Drafter
from specdec.engines.proposals import RecordedAnswer, RecordedPass
from specdec.target import Target

MOST_PROBED = 128  # passes that each fault is tried on
LEAST_PROPOSALS = 50  # without which, and without so many that the context decides, nothing is concluded
LEAST_BY_CONTEXT = 10
EXAMPLES = 5
CONTEXT = "attention sees its own place alone"


class DraftPosition(NamedTuple):
    """All proposals at one place of their passes."""

    position: int  # from 1
    proposals: int
    near_ties: int  # those that are not the drafter's likeliest token, within rounding of it
    different: int  # those beyond rounding
    accepted: int  # passes of which the engine accepted as many drafts
    expected: int  # the same of this drafter, which reads the text's own tokens

    @property
    def verdict(self) -> str:
        """``equal``, or what differs."""
        if self.different:
            return f"DIFFERENT in {self.different}"
        return f"equal but for {self.near_ties} near-ties" if self.near_ties else "equal"


class Difference(NamedTuple):
    """One proposal that is not this drafter's."""

    text: int  # the prompt's number, from 0
    place: int  # in the text, of the proposed token
    position: int  # in the pass, from 1
    proposed: int
    likeliest: int  # this drafter's
    margin: float  # what the proposed token lacks of the likeliest one's score, as a share of the scores' range


class Probe(NamedTuple):
    """Whether a fault would have been seen."""

    fault: str
    proposals: int  # that it was tried on
    changed: int | None  # of them, those that it makes other tokens; None where the drafter has no place for it


class ProposalComparison(NamedTuple):
    """A real engine's answers and proposals beside ours."""

    positions: list[DraftPosition]
    allowed: float  # share of a distribution's range that two tokens of equal rank may differ by
    largest_near_tie: float  # margin, as a share of the range
    differences: list[Difference]  # the first few
    probes: list[Probe]
    tokens: int  # of all answers
    near_tokens: int  # of them, those that are not the target's likeliest, within rounding of it
    wrong_tokens: int  # those beyond rounding: the engine runs another target
    left_out: int  # passes that begin behind the end of an answer, whose text is not known
    apart: int  # passes of which the engine and this drafter accept other numbers of drafts: all that counters show
    misread: int  # passes inside prompts whose last token is not the prompt's: see :func:`_misread`

    @property
    def proposals(self) -> int:
        """How many were compared."""
        return sum(position.proposals for position in self.positions)

    @property
    def fault(self) -> str | None:
        """What differs beyond rounding; None if nothing does."""
        if self.wrong_tokens:
            return f"{self.wrong_tokens} of {self.tokens} tokens are not this target's"
        if self.misread:
            return (
                f"at {self.misread} places inside prompts the engine's drafter read another token than the text has "
                "there: vLLM 0.32 does so at the end of every chunk of a prompt that it processes in pieces: give "
                "--max-num-batched-tokens of at least the longest prompt's tokens"
            )
        different = sum(position.different for position in self.positions)
        return f"{different} of {self.proposals:,} proposals are not this drafter's" if different else None

    @property
    def too_weak(self) -> str | None:
        """Why equal proposals would prove nothing; None if they do."""
        if self.proposals < LEAST_PROPOSALS:
            return f"{self.proposals} proposals were compared, at least {LEAST_PROPOSALS} are needed"
        context = self.probes[0] if self.probes else None
        if context is None or context.changed is None:
            return "the export was not compared, so that nobody knows what a fault would change"
        if context.changed < LEAST_BY_CONTEXT:
            return (
                f"only {context.changed} of {context.proposals} proposals depend on more than the last token, at least "
                f"{LEAST_BY_CONTEXT} are needed"
            )
        return None

    @property
    def unseen(self) -> list[str]:
        """The faults that none of the proposals would have shown."""
        return [probe.fault for probe in self.probes if probe.changed == 0]


class _Readings(NamedTuple):
    """Passes of one answer, and what the drafter says there."""

    text: int
    ids_T: Tensor  # prompt and answer
    places_A: Tensor  # of the last known token
    proposed_AK: Tensor
    likeliest_AK: Tensor
    margin_AK: Tensor  # 0 where the proposal is the likeliest; infinite where the drafter does not know the token
    accepted_A: Tensor  # drafts that are the text's own, from the first on: by the engine
    expected_A: Tensor  # and by this drafter


@torch.no_grad()
def compare_proposals(
    target: Target, drafter: Drafter, answers: Sequence[RecordedAnswer], share: float,
    files: reference.Files | None = None, method: str = "eagle3", on_text: Callable[[], object] = lambda: None,
) -> ProposalComparison:  # fmt: skip
    """Compare every proposal of every pass, and say what the comparison could see.

    Args:
        drafter: in the target's dtype, on its device.
        share: of a distribution's range, that rounding may make of one log-probability.
        files: of the export that was served, for the probes; without them there are none.
        method: as the export is served.
        on_text: called as each answer is done.

    Raises:
        ValueError: tokens are none of the target's, a recorded token is not the text's, or no pass was recorded.
    """
    allowed = 2 * share  # each of two candidates has an error of its own
    readings: list[_Readings] = []
    near_tokens = wrong_tokens = left_out = misread = 0
    for number, answer in enumerate(answers):
        _check_answer(target, answer)
        read = [made for made in answer.passes if not _misread(answer, made)]
        misread += len(answer.passes) - len(read)
        short_T = _shortfall_of_text(target, answer)
        near_tokens += int(((short_T > 0) & (short_T <= allowed)).sum())
        wrong_tokens += int((short_T > allowed).sum())
        inside = [made for made in read if made.place < len(answer.prompt) + len(answer.ids)]
        left_out += len(read) - len(inside)
        if inside:
            readings.append(_read(target, drafter, number, answer, inside))
        on_text()
    if not readings:
        raise ValueError("the engine proposed nothing inside its answers: give more --max_new_tokens")
    margins_NK = torch.cat([reading.margin_AK for reading in readings])
    near_NK = (margins_NK > 0) & (margins_NK <= allowed)
    return ProposalComparison(
        positions=_positions(readings, allowed),
        allowed=allowed,
        largest_near_tie=float(margins_NK[near_NK].max()) if bool(near_NK.any()) else 0.0,
        differences=_differences(readings, allowed)[:EXAMPLES],
        probes=[] if files is None else _probes(target, readings, files, method),
        tokens=sum(len(answer.ids) for answer in answers),
        near_tokens=near_tokens,
        wrong_tokens=wrong_tokens,
        left_out=left_out,
        misread=misread,
        apart=sum(int((reading.accepted_A != reading.expected_A).sum()) for reading in readings),
    )


def _check_answer(target: Target, answer: RecordedAnswer) -> None:
    text = [*answer.prompt, *answer.ids]
    if not all(0 <= token < target.vocab_size for token in text):
        raise ValueError(f"the engine's tokens are none of {target.source}'s: does it serve another target?")
    for made in answer.passes:
        known = 0 < made.place < len(text) and not _misread(answer, made)
        if known and text[made.place] != made.last:
            raise ValueError(
                f"the recorded pass at place {made.place} reads token {made.last}, the text has {text[made.place]} "
                "there: this vLLM calls its drafter otherwise than those that are known (0.32, 0.33)"
            )


def _misread(answer: RecordedAnswer, made: RecordedPass) -> bool:
    """Whether a pass inside the prompt began with another token than the prompt's.

    At the end of a chunk of a prompt vLLM 0.32.0 hands its drafter the prompt's last token in place of the next one
    (``prepare_next_token_ids_padded``), and keeps keys and values that were made of it.
    """
    return made.place < len(answer.prompt) and answer.prompt[made.place] != made.last


def _shortfall_of_text(target: Target, answer: RecordedAnswer) -> Tensor:
    """What each generated token lacks of the target's likeliest, as a share of the range, (T,)."""
    ids_T = torch.tensor([*answer.prompt, *answer.ids], device=target.device)
    start = len(answer.prompt)
    logits_TV = target.model(input_ids=ids_T[None], use_cache=False).logits[0, start - 1 : -1]
    return shortfall(logits_TV, ids_T[start:])


def _read(
    target: Target, drafter: Drafter, number: int, answer: RecordedAnswer, passes: Sequence[RecordedPass]
) -> _Readings:
    """Run the drafter behind every recorded place, on the engine's drafts and on the text's own tokens."""
    ids = [*answer.prompt, *answer.ids]
    places = [made.place for made in passes]
    depths = {len(made.drafts) for made in passes}
    if len(depths) > 1:
        raise ValueError(f"the engine proposes {sorted(depths)} tokens a pass: serve one number of drafts")
    (depth,) = depths
    proposed_AK = torch.tensor([made.drafts for made in passes], device=target.device)
    # behind the end of the text the engine's own drafts stand for it: no pass there is accepted by anybody
    longer_T = torch.tensor(ids + [0] * depth, device=target.device)
    due_AK = longer_T[torch.tensor(places, device=target.device)[:, None] + torch.arange(1, depth + 1)]
    text = AnchoredText(target, drafter, ids, depth)
    log_probs = []
    likeliest = []
    own_drafts = []
    for start in range(0, len(places), text.side_by_side):
        rows = slice(start, start + text.side_by_side)
        chains = text.draft(places[rows], proposed_AK[rows].clamp(0, target.vocab_size - 1))
        likeliest.append(chains.tokens_AK)
        log_probs.append(margins(drafter, chains.log_probs_AKD, proposed_AK[rows]))
        own_drafts.append(text.draft(places[rows], due_AK[rows]).tokens_AK)
    whole_A = torch.tensor([place + depth < len(ids) for place in places], device=target.device)
    ours_AK = (torch.cat(own_drafts) == due_AK).cumprod(1)
    theirs_AK = (proposed_AK == due_AK).cumprod(1)
    return _Readings(
        text=number,
        ids_T=torch.tensor(ids, device=target.device),
        places_A=torch.tensor(places, device=target.device),
        proposed_AK=proposed_AK,
        likeliest_AK=torch.cat(likeliest),
        margin_AK=torch.cat(log_probs),
        accepted_A=theirs_AK.sum(1)[whole_A],
        expected_A=ours_AK.sum(1)[whole_A],
    )


def margins(drafter: Drafter, log_probs_AKD: Tensor, proposed_AK: Tensor) -> Tensor:
    """What proposed tokens lack of the likeliest, as shares of the range, (A, K); infinite for tokens that the draft
    vocabulary lacks."""
    vocabulary = drafter.config.vocab_size
    outside_AK = (proposed_AK < 0) | (proposed_AK >= vocabulary)
    draft_AK = drafter.vocab.to_draft(proposed_AK.clamp(0, vocabulary - 1))
    unknown_AK = outside_AK | (draft_AK < 0)
    return shortfall(log_probs_AKD, draft_AK.clamp_min(0)).masked_fill(unknown_AK, float("inf"))


def shortfall(scores: Tensor, tokens: Tensor) -> Tensor:
    """What tokens lack of the best one's score (..., V), as a share of the scores' range."""
    best = scores.amax(-1)
    least = scores.where(scores.isfinite(), best[..., None]).amin(-1)
    return (best - scores.gather(-1, tokens[..., None])[..., 0]) / (best - least).clamp_min(1e-30)


def _positions(readings: Sequence[_Readings], allowed: float) -> list[DraftPosition]:
    margins_NK = torch.cat([reading.margin_AK for reading in readings])
    accepted_N = torch.cat([reading.accepted_A for reading in readings])
    expected_N = torch.cat([reading.expected_A for reading in readings])
    positions = []
    for k, margins_N in enumerate(margins_NK.unbind(1)):
        different = int((margins_N > allowed).sum())
        near_ties = int((margins_N > 0).sum()) - different
        accepted, expected = int((accepted_N > k).sum()), int((expected_N > k).sum())
        positions.append(DraftPosition(k + 1, len(margins_N), near_ties, different, accepted, expected))
    return positions


def _differences(readings: Sequence[_Readings], allowed: float) -> list[Difference]:
    """Every proposal beyond rounding, in the order of texts and places."""
    differences = []
    for reading in readings:
        for row, k in (reading.margin_AK > allowed).nonzero().tolist():
            place = int(reading.places_A[row]) + 1 + k
            tokens = int(reading.proposed_AK[row, k]), int(reading.likeliest_AK[row, k])
            differences.append(Difference(reading.text, place, k + 1, *tokens, float(reading.margin_AK[row, k])))
    return differences


def _probes(target: Target, readings: Sequence[_Readings], files: reference.Files, method: str) -> list[Probe]:
    """How many proposals each fault changes, on up to :data:`MOST_PROBED` passes, spread over the answers."""
    most = max(1, MOST_PROBED // len(readings))
    shares = [_spread(reading, most) for reading in readings]
    states = [reported_states(target, reading.ids_T) for reading in shares]

    def proposals(served: reference.ServedDrafter) -> Tensor:
        """What the reference proposes on the engine's own drafts, (N, K)."""
        rows = []
        for reading, (boundaries, final_TH) in zip(shares, states, strict=True):
            features_TH = fused_features(served, boundaries, final_TH)
            slots = (reading.places_A - 1).tolist()
            depth = reading.proposed_AK.shape[1] - 1
            _, log_probs_AKV = reference.draft(
                served, reading.ids_T, features_TH, slots, depth, reading.proposed_AK.clamp(0, target.vocab_size - 1)
            )
            rows.append(log_probs_AKV.argmax(-1))
        return torch.cat(rows)

    def read(changed: reference.Files) -> reference.ServedDrafter:
        return reference.interpret(changed, method, target.embedding_weight(), target.head_weight(), target.num_layers)

    sound = read(files)
    sound_NK = proposals(sound)
    alone = sound._replace(settings=sound.settings._replace(windows=(1,) * len(sound.settings.windows)))
    probes = [Probe(CONTEXT, sound_NK.numel(), int((proposals(alone) != sound_NK).sum()))]
    for name in FAULTS:
        changed = planted(name, files, target.head_weight(), target.num_layers)
        count = None if changed is None else int((proposals(read(changed)) != sound_NK).sum())
        probes.append(Probe(name, sound_NK.numel(), count))
    return probes


def _spread(reading: _Readings, most: int) -> _Readings:
    """At most so many of its passes, the first and the last among them."""
    passes = len(reading.places_A)
    rows = torch.linspace(0, passes - 1, min(most, passes)).round().long().to(reading.places_A.device)
    return reading._replace(places_A=reading.places_A[rows], proposed_AK=reading.proposed_AK[rows])
