"""The tokens that an engine proposed in every pass, and what this drafter says at the same place.

Each proposal is compared by itself: the drafter's chain reads the engine's own earlier drafts of the pass, so that a
first difference does not make the later ones incomparable. A token that is not the drafter's likeliest is a near-tie
only where it lacks less than rounding can make; everything else is a difference.

How much such a comparison can see depends on the drafter: the export's independent reference is asked how many of the
compared proposals would have been other tokens if attention had seen the current token alone, and under each fault of
:mod:`specdec.diagnostics.planted`.

Legend: A passes, N passes of all answers, K drafts, T tokens, V target vocabulary, H hidden.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.diagnostics import parity_reference as reference
from specdec.diagnostics.anchors import LOG_PROBS_AT_ONCE
from specdec.diagnostics.parity_compare import fused_features, reported_states
from specdec.diagnostics.parity_eight_bits import moved_by_last_bits, of_overflow, plain_files
from specdec.diagnostics.parity_files import Files, ServedDrafter, interpret
from specdec.diagnostics.parity_readings import (
    Margins,
    Readings,
    TextDrafter,
    comparable,
    passes_of_text,
    read_passes,
    shortfall,
)
from specdec.diagnostics.planted import FAULTS, NO_SUCH_PART, Outcome, planted
from specdec.drafter import Drafter
from specdec.engines.proposals import RecordedAnswer
from specdec.target import Target
from specdec.utils.progress import progress

# With fewer proposals, or fewer that the context decides, nothing is concluded.
LEAST_PROPOSALS = 50
LEAST_BY_CONTEXT = 10
EXAMPLES = 5
MOST_PROBED = 128  # passes that each fault is tried on
# An engine may have this many times as many near-ties as the reference, and so many more.
TIES_TIMES = 2
TIES_MORE = 3
CONTEXT = "attention limited to the current token"


@dataclass(frozen=True)
class Probe:
    """Whether a fault would have been seen."""

    fault: str
    proposals: int  # that it was tried on
    # The proposals that it turns into other tokens, beyond a near-tie; None if it was not tried.
    changed: int | None
    not_tried: str | None = None  # the reason

    @property
    def has_no_place(self) -> bool:
        """Whether the drafter lacks the part that the fault concerns."""
        return self.not_tried == NO_SUCH_PART.value


@dataclass(frozen=True)
class Rounding:
    """Near-ties of two sound implementations, on the proposals that faults were tried on."""

    engine: int
    reference: int  # of the export's reference, on the same passes; of a quantized one, with its activations moved

    @property
    def explains(self) -> bool:
        """Whether the engine has about as few as the reference."""
        return self.engine <= TIES_TIMES * self.reference + TIES_MORE


@dataclass(frozen=True)
class DraftPosition:
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
        return f"equal except for {self.near_ties} near-ties" if self.near_ties else "equal"


@dataclass(frozen=True)
class Difference:
    """One proposal that is not this drafter's."""

    text: int  # the prompt's number, from 0
    place: int  # in the text, of the proposed token
    position: int  # in the pass, from 1
    proposed: int
    likeliest: int  # this drafter's
    margin: float  # what the proposed token lacks of the likeliest one's score, as a share of the scores' range


@dataclass(frozen=True)
class ProposalComparison:
    """A real engine's answers and proposals compared with ours."""

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
    misread: int  # passes inside prompts whose last token is not the prompt's: see parity_readings
    # The largest error of the engine's products of 8-bit integers, as a share of the largest; None if not measured.
    int8_error: float | None = None

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
        """The difference beyond rounding, in words; None if there is none."""
        if self.wrong_tokens:
            return f"{self.wrong_tokens} of {self.tokens} tokens are not this target's"
        if self.misread:
            return (
                f"at {self.misread} places inside prompts the engine's drafter read another token than the text has "
                "there: vLLM 0.32 does so at the end of every chunk of a prompt that it processes in pieces: give "
                "--max-num-batched-tokens of at least the longest prompt's tokens"
            )
        if self.different:
            cause = of_overflow(self.int8_error)
            return f"{self.different} of {self.proposals:,} proposals are not this drafter's{cause}"
        return None

    @property
    def too_weak(self) -> str | None:
        """Why equal proposals would prove nothing; None if they do."""
        if self.proposals < LEAST_PROPOSALS:
            return f"only {self.proposals} were compared, and {LEAST_PROPOSALS} are needed"
        context = self.probes[0] if self.probes else None
        if context is None or context.changed is None:
            return "the export was not compared, so it is unknown what a fault would change"
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


@torch.no_grad()
def compare_proposals(
    target: Target, drafter: Drafter, answers: Sequence[RecordedAnswer], share: float,
    files: Files | None = None, method: str = "eagle3",
) -> ProposalComparison:  # fmt: skip
    """Compare every proposal of every pass, and say what the comparison could see.

    Args:
        drafter: in the target's dtype, on its device.
        share: of a distribution's range, that rounding may make of one log-probability.
        files: of the export that was served, for the probes; without them there are none.
        method: as the export is served.

    Raises:
        ValueError: tokens are none of the target's, a recorded token is not the text's, or no pass was recorded.
    """
    allowed = 2 * share  # each of two candidates has an error of its own
    served = None
    if files is not None:
        served = interpret(
            files, method, target.embedding_weight(), target.head_weight(), target.num_layers
        )
    readings, counts = _read_answers(target, comparable(target, drafter, served), answers, allowed)
    if not readings:
        raise ValueError(
            "the engine proposed nothing inside its answers: give more --max_new_tokens"
        )
    quantized = served if served is not None and served.rounded else None
    moved = None
    if quantized is not None:
        moved = moved_by_last_bits(
            target, quantized, [_of_text(reading) for reading in _samples(readings)]
        )
        allowed = 2 * max(share, moved.share)
    margins_NK = torch.cat([reading.margin_AK for reading in readings])
    near_NK = (margins_NK > 0) & (margins_NK <= allowed)
    probes: list[Probe] = []
    rounding = None
    if files is not None:
        unrounded = plain_files(files, target.num_layers) if quantized else files
        probes, rounding = probe_faults(target, readings, unrounded, method, allowed)
        rounding = rounding if moved is None else Rounding(rounding.engine, moved.changed)
    return ProposalComparison(
        positions=_positions(readings, allowed),
        allowed=allowed,
        largest_near_tie=float(margins_NK[near_NK].max()) if near_NK.any() else 0.0,
        differences=_differences(readings, allowed)[:EXAMPLES],
        probes=probes,
        rounding=rounding,
        **counts,
        apart=sum(int((reading.accepted_A != reading.expected_A).sum()) for reading in readings),
    )


def _read_answers(
    target: Target, of: tuple[TextDrafter, Margins], answers: Sequence[RecordedAnswer], allowed: float
) -> tuple[list[Readings], Counter[str]]:  # fmt: skip
    """Return the readings of all answers with passes inside them, and the counts of tokens and passes.

    Args:
        of: see :func:`comparable`.
        allowed: share of a distribution's range that two tokens of equal rank may differ by.
    """
    readings: list[Readings] = []
    counts = Counter[str]()
    with progress("comparing proposals", "text", len(answers)) as done:
        for number, answer in enumerate(answers):
            passes = passes_of_text(target, answer)
            text_T = torch.tensor([*answer.prompt, *answer.ids], device=target.device)
            begin = len(answer.prompt)
            end = len(text_T)
            logits_1TV = target.model(input_ids=text_T[None], use_cache=False).logits
            short_T = shortfall(logits_1TV[0, begin - 1 : -1], text_T[begin:])
            wrong_T = ~(short_T <= allowed)  # NaN is wrong too
            inside = [recorded for recorded in passes if recorded.place < end]
            counts.update(
                tokens=len(answer.ids),
                near_tokens=int(((short_T > 0) & ~wrong_T).sum()),
                wrong_tokens=int(wrong_T.sum()),
                left_out=len(passes) - len(inside),
                misread=len(answer.passes) - len(passes),
            )
            if inside:
                readings.append(read_passes(target, of, number, answer, inside))
            done(1)
    return readings, counts


def _positions(readings: Sequence[Readings], allowed: float) -> list[DraftPosition]:
    """Return the counts at every place in a pass."""
    margins_NK = torch.cat([reading.margin_AK for reading in readings])
    accepted_N = torch.cat([reading.accepted_A for reading in readings])
    expected_N = torch.cat([reading.expected_A for reading in readings])
    return [
        DraftPosition(
            k + 1,
            len(margins_N),
            near_ties=int(((margins_N > 0) & (margins_N <= allowed)).sum()),
            different=int((~(margins_N <= allowed)).sum()),  # NaN is no rounding
            accepted=int((accepted_N > k).sum()),
            expected=int((expected_N > k).sum()),
        )
        for k, margins_N in enumerate(margins_NK.unbind(1))
    ]


def _differences(readings: Sequence[Readings], allowed: float) -> list[Difference]:
    """Return every proposal beyond rounding, in the order of texts and places."""
    return [
        Difference(
            reading.text,
            int(reading.places_A[row]) + 1 + k,
            k + 1,
            int(reading.proposed_AK[row, k]),
            int(reading.likeliest_AK[row, k]),
            float(reading.margin_AK[row, k]),
        )
        for reading in readings
        for row, k in (~(reading.margin_AK <= allowed)).nonzero().tolist()
    ]


def probe_faults(
    target: Target, readings: Sequence[Readings], files: Files, method: str, allowed: float
) -> tuple[list[Probe], Rounding]:
    """Count the proposals that each fault changes beyond a near-tie.

    The sound reference runs once, so its log-probabilities of all passes are in memory together: for
    :data:`MOST_PROBED` passes of three drafts and 150,000 tokens, 230 MB.

    Args:
        readings: all answers'; up to :data:`MOST_PROBED` passes of them are used.
        files: the export's.
        method: as the export is served.
        allowed: margin of a near-tie, as a share of the range.
    """
    samples = _samples(readings)
    states = [reported_states(target, reading.ids_T) for reading in samples]
    head_VH = target.head_weight()

    def served(files: Files) -> ServedDrafter:
        return interpret(files, method, target.embedding_weight(), head_VH, target.num_layers)

    def log_probs(served: ServedDrafter) -> Iterator[Tensor]:
        """Yield the reference's log-probabilities on the engine's own drafts, (A, K, V), a few passes at a time."""
        vocabulary = served.settings.vocab_size
        for reading, text_states in zip(samples, states, strict=True):
            features_TH = fused_features(served, *text_states)
            depth = reading.proposed_AK.shape[1]
            given_AK = reading.proposed_AK.clamp(0, vocabulary - 1)
            at_once = max(1, LOG_PROBS_AT_ONCE // (depth * vocabulary))
            for slots_A, rows_AK in zip(
                (reading.places_A - 1).split(at_once), given_AK.split(at_once), strict=True
            ):
                yield reference.draft(
                    served, reading.ids_T, features_TH, slots_A.tolist(), depth - 1, rows_AK
                ).log_probs_AKV

    def changed_by(faulty: ServedDrafter) -> int:
        """Count the proposals that the sound reference would call different, and not a near-tie."""
        pairs = zip(sound_log_probs, log_probs(faulty), strict=True)
        margins = (shortfall(sound_AKV, other_AKV.argmax(-1)) for sound_AKV, other_AKV in pairs)
        return sum(int((margin_AK > allowed).sum()) for margin_AK in margins)

    sound = served(files)
    alone = sound._replace(
        settings=sound.settings._replace(windows=(1,) * len(sound.settings.windows))
    )
    sound_log_probs = list(log_probs(sound))
    sound_NK = torch.cat([log_probs_AKV.argmax(-1) for log_probs_AKV in sound_log_probs])
    count = sound_NK.numel()
    probes = [Probe(CONTEXT, count, changed_by(alone))]
    for name in FAULTS:
        faulty_files = planted(name, files, head_VH, target.num_layers)
        if isinstance(faulty_files, Outcome):
            probes.append(Probe(name, 0, None, faulty_files.value))
        else:
            probes.append(Probe(name, count, changed_by(served(faulty_files))))
    engine_NK = torch.cat([reading.margin_AK for reading in samples])
    likeliest_NK = torch.cat([reading.likeliest_AK for reading in samples])
    return probes, Rounding(int((engine_NK > 0).sum()), int((sound_NK != likeliest_NK).sum()))


def _samples(readings: Sequence[Readings]) -> list[Readings]:
    """Return all answers with at most :data:`MOST_PROBED` of their passes."""
    most = max(1, MOST_PROBED // len(readings))
    return [_sample_passes(reading, most) for reading in readings]


def _of_text(reading: Readings) -> tuple[Tensor, Tensor, Tensor]:
    return reading.ids_T, reading.places_A, reading.proposed_AK


def _sample_passes(reading: Readings, most: int) -> Readings:
    """Return at most this many of the passes, the first and the last among them."""
    passes = len(reading.places_A)
    rows = torch.linspace(0, passes - 1, min(most, passes)).round().long()
    names = ("places_A", "proposed_AK", "likeliest_AK", "margin_AK")
    chosen = {name: getattr(reading, name)[rows.to(reading.ids_T.device)] for name in names}
    return reading._replace(**chosen)
