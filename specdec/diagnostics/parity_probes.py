"""The faults of an export that a comparison of proposals could have shown.

The export's independent reference is asked how many of the compared proposals would have been other tokens if attention
had seen the current token alone, and under each fault of :mod:`specdec.diagnostics.planted`.

Legend: A passes, N passes of all answers, K drafts, T tokens, V target vocabulary, H hidden.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.diagnostics import parity_reference as reference
from specdec.diagnostics.anchors import LOG_PROBS_AT_ONCE
from specdec.diagnostics.parity_compare import fused_features, reported_states
from specdec.diagnostics.parity_files import Files, ServedDrafter, interpret
from specdec.diagnostics.parity_readings import Readings, shortfall
from specdec.diagnostics.planted import FAULTS, NO_SUCH_PART, Outcome, planted
from specdec.target import Target

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
    reference: int  # of the export's reference, on the same passes

    @property
    def explains(self) -> bool:
        """Whether the engine has about as few as the reference."""
        return self.engine <= TIES_TIMES * self.reference + TIES_MORE


def probe_faults(
    target: Target, readings: Sequence[Readings], files: Files, method: str, allowed: float
) -> tuple[list[Probe], Rounding]:
    """Count the proposals that each fault changes beyond a near-tie.

    Args:
        readings: all answers'; up to :data:`MOST_PROBED` passes of them are used.
        files: the export's.
        method: as the export is served.
        allowed: margin of a near-tie, as a share of the range.
    """
    most = max(1, MOST_PROBED // len(readings))
    samples = [_sample_passes(reading, most) for reading in readings]
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
                )[1]

    def changed_by(faulty: ServedDrafter) -> int:
        """Count the proposals that the sound reference would call different, and not a near-tie."""
        pairs = zip(log_probs(sound), log_probs(faulty), strict=True)
        margins = (shortfall(sound_AKV, other_AKV.argmax(-1)) for sound_AKV, other_AKV in pairs)
        return sum(int((margin_AK > allowed).sum()) for margin_AK in margins)

    sound = served(files)
    windows = (1,) * len(sound.settings.windows)
    alone = sound._replace(settings=sound.settings._replace(windows=windows))
    sound_NK = torch.cat([log_probs_AKV.argmax(-1) for log_probs_AKV in log_probs(sound)])
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


def _sample_passes(reading: Readings, most: int) -> Readings:
    """Return at most so many of the passes, the first and the last among them."""
    passes = len(reading.places_A)
    rows = torch.linspace(0, passes - 1, min(most, passes)).round().long()
    names = ("places_A", "proposed_AK", "likeliest_AK", "margin_AK")
    chosen = {name: getattr(reading, name)[rows.to(reading.ids_T.device)] for name in names}
    return reading._replace(**chosen)
