"""What an engine proposed in every pass, token by token beside what this drafter says at the same place.

Each proposal is compared for itself: the drafter's chain reads the engine's own earlier drafts of the pass, so that a
first difference does not make the later ones incomparable. A token that is not the drafter's likeliest is a near-tie
only where it lacks less than rounding can make; everything else is a difference.

How much such a comparison can see depends on the drafter. So the export's independent reference is asked, too: how
many of the compared proposals would have been other tokens if attention had seen the current token alone, and under
each fault of :mod:`specdec.diagnostics.planted`?

Legend: A passes, K drafts, T tokens, V target vocabulary, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.diagnostics import parity_reference as reference
from specdec.diagnostics.anchors import LOG_PROBS_AT_ONCE, AnchoredText
from specdec.diagnostics.parity_compare import fused_features, reported_states
from specdec.diagnostics.planted import FAULTS, NO_SUCH_PART, Outcome, planted
from specdec.drafter import Drafter
from specdec.engines.proposals import RecordedAnswer, RecordedPass
from specdec.target import Target

MOST_PROBED = 128  # passes that each fault is tried on
# without which, and without so many that the context decides, nothing is concluded
LEAST_PROPOSALS = 50
LEAST_BY_CONTEXT = 10
# how many more near-ties an engine may have than the reference
TIES_TIMES = 2
TIES_MORE = 3
EXAMPLES = 5
CONTEXT = "attention limited to the current token"


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
    changed: (
        int | None
    )  # of them, those that it makes tokens beyond a near-tie; None where it was not tried
    not_tried: str | None = None  # why

    @property
    def has_no_place(self) -> bool:
        """Whether the drafter has no part that the fault is of."""
        return self.not_tried == NO_SUCH_PART.value


class Rounding(NamedTuple):
    """Near-ties of two sound implementations, on the proposals that faults were tried on."""

    engine: int
    reference: int  # of the export's reference, on the same passes

    @property
    def explains(self) -> bool:
        """Whether the engine has about as few as the reference."""
        return self.engine <= TIES_TIMES * self.reference + TIES_MORE


class ProposalComparison(NamedTuple):
    """A real engine's answers and proposals beside ours."""

    positions: list[DraftPosition]
    allowed: float  # share of a distribution's range that two tokens of equal rank may differ by
    largest_near_tie: float  # margin, as a share of the range
    differences: list[Difference]  # the first few
    probes: list[Probe]
    rounding: Rounding | None  # None without probes
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
    def different(self) -> int:
        """How many are not this drafter's, beyond rounding."""
        return sum(position.different for position in self.positions)

    @property
    def near_ties(self) -> int:
        """How many are not this drafter's likeliest, within rounding of it."""
        return sum(position.near_ties for position in self.positions)

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
        if self.different:
            return f"{self.different} of {self.proposals:,} proposals are not this drafter's"
        return None

    @property
    def too_weak(self) -> str | None:
        """Why equal proposals would prove nothing; None if they do."""
        if self.proposals < LEAST_PROPOSALS:
            return f"only {self.proposals} were compared, and {LEAST_PROPOSALS} are needed"
        context = self.probes[0] if self.probes else None
        if context is None or context.changed is None:
            return "the export was not compared, so that nobody knows what a fault would change"
        if context.changed < LEAST_BY_CONTEXT:
            return (
                f"only {context.changed} of {context.proposals} proposals depend on more than the last token, and "
                f"{LEAST_BY_CONTEXT} are needed"
            )
        if self.rounding is not None and not self.rounding.explains:
            return (
                f"{self.rounding.engine} of {context.proposals} are near-ties, where an independent implementation has "
                f"{self.rounding.reference}: rounding does not explain them, so compare in float32"
            )
        return None

    @property
    def unseen(self) -> list[str]:
        """The faults that none of the proposals would have shown."""
        return [probe.fault for probe in self.probes if probe.changed == 0]

    @property
    def not_tried(self) -> list[str]:
        """The faults of parts that the drafter has, which nothing is known of."""
        return [
            probe.fault for probe in self.probes if probe.changed is None and not probe.has_no_place
        ]


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
        read = _passes_of_text(target, answer)
        misread += len(answer.passes) - len(read)
        short_T = _shortfall_of_text(target, answer)
        wrong_T = ~(short_T <= allowed)  # so that NaN is none of the target's
        near_tokens += int(((short_T > 0) & ~wrong_T).sum())
        wrong_tokens += int(wrong_T.sum())
        inside = [
            recorded for recorded in read if recorded.place < len(answer.prompt) + len(answer.ids)
        ]
        left_out += len(read) - len(inside)
        if inside:
            readings.append(_read(target, drafter, number, answer, inside))
        on_text()
    if not readings:
        raise ValueError(
            "the engine proposed nothing inside its answers: give more --max_new_tokens"
        )
    margins_NK = torch.cat([reading.margin_AK for reading in readings])
    near_NK = (margins_NK > 0) & (margins_NK <= allowed)
    probes: list[Probe] = []
    rounding = None
    if files is not None:
        probes, rounding = _probe(target, readings, files, method, allowed)
    return ProposalComparison(
        positions=_positions(readings, allowed),
        allowed=allowed,
        largest_near_tie=float(margins_NK[near_NK].max()) if bool(near_NK.any()) else 0.0,
        differences=_differences(readings, allowed)[:EXAMPLES],
        probes=probes,
        rounding=rounding,
        tokens=sum(len(answer.ids) for answer in answers),
        near_tokens=near_tokens,
        wrong_tokens=wrong_tokens,
        left_out=left_out,
        misread=misread,
        apart=sum(int((reading.accepted_A != reading.expected_A).sum()) for reading in readings),
    )


def _passes_of_text(target: Target, answer: RecordedAnswer) -> list[RecordedPass]:
    """The passes of an answer but the misread ones; ValueError if tokens or a pass are not of this text."""
    text = [*answer.prompt, *answer.ids]
    if not all(0 <= token < target.vocab_size for token in text):
        raise ValueError(
            f"the engine's tokens are none of {target.source}'s: does it serve another target?"
        )
    misread = _misread(answer)
    passes = [recorded for recorded in answer.passes if recorded not in misread]
    for recorded in passes:
        if 0 < recorded.place < len(text) and text[recorded.place] != recorded.last:
            raise ValueError(
                f"the recorded pass at place {recorded.place} reads token {recorded.last}, the text has "
                f"{text[recorded.place]} there: this vLLM calls its drafter otherwise than those that are known (0.32)"
            )
    return passes


def _misread(answer: RecordedAnswer) -> list[RecordedPass]:
    """The passes that prefill a text in chunks and began with another token than the text's.

    At the end of a chunk vLLM 0.32.0 hands its drafter the last token that it knows in place of the next one
    (``prepare_next_token_ids_padded``), and keeps keys and values of it. A chunk ends inside the prompt, or, where a
    request was preempted, at a place that an earlier pass has been beyond.
    """
    text = [*answer.prompt, *answer.ids]
    furthest = len(answer.prompt)
    misread = []
    for recorded in answer.passes:
        if 0 < recorded.place < min(furthest, len(text)) and text[recorded.place] != recorded.last:
            misread.append(recorded)
        furthest = max(furthest, recorded.place)
    return misread


def _shortfall_of_text(target: Target, answer: RecordedAnswer) -> Tensor:
    """What each generated token lacks of the target's likeliest, as a share of the range, (T,)."""
    ids_T = torch.tensor([*answer.prompt, *answer.ids], device=target.device)
    start = len(answer.prompt)
    logits_TV = target.model(input_ids=ids_T[None], use_cache=False).logits[0, start - 1 : -1]
    return shortfall(logits_TV, ids_T[start:])


def _read(
    target: Target,
    drafter: Drafter,
    number: int,
    answer: RecordedAnswer,
    passes: Sequence[RecordedPass],
) -> _Readings:
    """Run the drafter behind every recorded place, on the engine's drafts and on the text's own tokens."""
    ids = [*answer.prompt, *answer.ids]
    places = [recorded.place for recorded in passes]
    depths = {len(recorded.drafts) for recorded in passes}
    if len(depths) > 1:
        raise ValueError(
            f"the engine proposes {sorted(depths)} tokens a pass: serve one number of drafts"
        )
    (depth,) = depths
    proposed_AK = torch.tensor([recorded.drafts for recorded in passes], device=target.device)
    # behind the end of the text the engine's own drafts stand for it: no pass there is accepted by anybody
    longer_T = torch.tensor(ids + [0] * depth, device=target.device)
    due_AK = longer_T[
        torch.tensor(places, device=target.device)[:, None]
        + torch.arange(1, depth + 1, device=target.device)
    ]
    text = AnchoredText(target, drafter, ids, depth)
    margins_of_groups = []
    likeliest = []
    own_drafts = []
    for start in range(0, len(places), text.side_by_side):
        rows = slice(start, start + text.side_by_side)
        chains = text.draft(places[rows], proposed_AK[rows].clamp(0, target.vocab_size - 1))
        likeliest.append(chains.tokens_AK)
        margins_of_groups.append(margins(drafter, chains.log_probs_AKD, proposed_AK[rows]))
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
        margin_AK=torch.cat(margins_of_groups),
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
        different = int((~(margins_N <= allowed)).sum())  # NaN is no rounding
        near_ties = int((margins_N > 0).sum()) - int((margins_N > allowed).sum())
        accepted = int((accepted_N > k).sum())
        expected = int((expected_N > k).sum())
        positions.append(
            DraftPosition(k + 1, len(margins_N), near_ties, different, accepted, expected)
        )
    return positions


def _differences(readings: Sequence[_Readings], allowed: float) -> list[Difference]:
    """Every proposal beyond rounding, in the order of texts and places."""
    differences = []
    for reading in readings:
        for row, k in (~(reading.margin_AK <= allowed)).nonzero().tolist():
            place = int(reading.places_A[row]) + 1 + k
            tokens = int(reading.proposed_AK[row, k]), int(reading.likeliest_AK[row, k])
            differences.append(
                Difference(reading.text, place, k + 1, *tokens, float(reading.margin_AK[row, k]))
            )
    return differences


def _probe(
    target: Target,
    readings: Sequence[_Readings],
    files: reference.Files,
    method: str,
    allowed: float,
) -> tuple[list[Probe], Rounding]:
    """How many proposals each fault changes beyond a near-tie, on up to :data:`MOST_PROBED` passes over all answers."""
    most = max(1, MOST_PROBED // len(readings))
    shares = [_spread(reading, most) for reading in readings]
    states = [reported_states(target, reading.ids_T) for reading in shares]

    def read(changed: reference.Files) -> reference.ServedDrafter:
        return reference.interpret(
            changed, method, target.embedding_weight(), target.head_weight(), target.num_layers
        )

    sound = read(files)
    sound_NK = _proposals_of(sound, shares, states)

    def count(faulty: reference.ServedDrafter) -> int:
        """Proposals that the sound reference would call different, and not a near-tie."""
        faulty_NK = _proposals_of(faulty, shares, states)
        return int((_margins_of(sound, shares, states, faulty_NK) > allowed).sum())

    alone = sound._replace(
        settings=sound.settings._replace(windows=(1,) * len(sound.settings.windows))
    )
    probes = [Probe(CONTEXT, sound_NK.numel(), count(alone))]
    for name in FAULTS:
        changed = planted(name, files, target.head_weight(), target.num_layers)
        if isinstance(changed, Outcome):
            probes.append(Probe(name, 0, None, changed.value))
        else:
            probes.append(Probe(name, sound_NK.numel(), count(read(changed))))
    engine_NK = torch.cat([reading.margin_AK for reading in shares])
    likeliest_NK = torch.cat([reading.likeliest_AK for reading in shares])
    return probes, Rounding(int((engine_NK > 0).sum()), int((sound_NK != likeliest_NK).sum()))


# of a text, at the boundaries and the final one; see reported_states
States = tuple[list[Tensor], Tensor]


def _reference_log_probs(
    served: reference.ServedDrafter, reading: _Readings, states: States
) -> Iterator[tuple[slice, Tensor]]:
    """What the reference says on the engine's own drafts, (A, K, V), of a few passes at a time."""
    features_TH = fused_features(served, *states)
    passes, depth = reading.proposed_AK.shape
    vocabulary = served.settings.vocab_size
    given_AK = reading.proposed_AK.clamp(0, vocabulary - 1)
    at_once = max(1, LOG_PROBS_AT_ONCE // (depth * vocabulary))
    for start in range(0, passes, at_once):
        rows = slice(start, start + at_once)
        slots = (reading.places_A[rows] - 1).tolist()
        yield (
            rows,
            reference.draft(served, reading.ids_T, features_TH, slots, depth - 1, given_AK[rows])[
                1
            ],
        )


def _proposals_of(
    served: reference.ServedDrafter, shares: Sequence[_Readings], states: Sequence[States]
) -> Tensor:
    """The reference's likeliest tokens, (N, K)."""
    tokens = []
    for reading, of_text in zip(shares, states, strict=True):
        tokens += [
            log_probs.argmax(-1) for _, log_probs in _reference_log_probs(served, reading, of_text)
        ]
    return torch.cat(tokens)


def _margins_of(
    served: reference.ServedDrafter,
    shares: Sequence[_Readings],
    states: Sequence[States],
    tokens_NK: Tensor,
) -> Tensor:
    """What tokens lack of the reference's likeliest ones, (N, K); infinite for those that it does not know."""
    margins_NK = []
    first = 0
    for reading, of_text in zip(shares, states, strict=True):
        for _, log_probs_AKV in _reference_log_probs(served, reading, of_text):
            tokens_AK = tokens_NK[first : first + len(log_probs_AKV)]
            margins_NK.append(shortfall(log_probs_AKV, tokens_AK))
            first += len(log_probs_AKV)
    return torch.cat(margins_NK)


def _spread(reading: _Readings, most: int) -> _Readings:
    """At most so many of its passes, the first and the last among them."""
    passes = len(reading.places_A)
    rows = (
        torch.linspace(0, passes - 1, min(most, passes)).round().long().to(reading.places_A.device)
    )
    of_passes = ("places_A", "proposed_AK", "likeliest_AK", "margin_AK")
    return reading._replace(**{name: getattr(reading, name)[rows] for name in of_passes})
