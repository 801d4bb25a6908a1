"""``specdec parity`` of a quantized export: is the file the drafter's rounding, and what may rounding change?

The file is compared with the drafter matrix by matrix, to within half a step of each row's scale; then training,
decoding and the reference run on the numbers that the file stands for. An engine also rounds what the matrices read.
Its proposals are compared with the export's reference, which rounds alike. A number on the edge between two steps falls
to either side by the order of a sum, and such a step is large: how much it may change is measured, by moving the
reference's activations by a few of their dtype's last bits before they are rounded.

Legend: A passes, K drafts, V target vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.diagnostics import parity_reference as reference
from specdec.diagnostics.anchors import LOG_PROBS_AT_ONCE
from specdec.diagnostics.parity_compare import fused_features, reported_states
from specdec.diagnostics.parity_files import Files, ServedDrafter, read_files
from specdec.diagnostics.parity_quantized import read_quantized
from specdec.diagnostics.parity_settings import Misread
from specdec.drafter import Drafter
from specdec.export.checkpoint import OURS, read_checkpoint
from specdec.export.known_formats import FORMATS
from specdec.export.quantize import Quantization, quantization_of, rounding_faults
from specdec.export.read import import_checkpoint
from specdec.export.subject import Subject
from specdec.export.tensors import normalize_name
from specdec.target import Target

# Last bits of their dtype by which activations of two sound implementations differ.
LAST_BITS = 8
# Beyond this share of the largest result, an engine's products of 8-bit integers are wrong, not rounded.
MOST_INT8_ERROR = 1e-3


class RoundedDrafter(NamedTuple):
    """The drafter that a quantized export stands for."""

    drafter: Drafter  # with the file's numbers; the saved one if there are faults
    faults: list[str]  # what in the file is not the saved drafter's rounding
    quantization: Quantization  # of the file


def rounded_drafter(
    directory: Path, saved: Drafter, target: Target, subject: Subject
) -> RoundedDrafter | None:
    """Compare a quantized export with the drafter that it was made of; None if the export is not quantized.

    Raises:
        ValueError: the directory cannot be read.
    """
    try:
        raw, tensors = read_files(directory)
    except Misread:  # parity reports it with the reference's other findings
        return None
    quantization = quantization_of(tensors)
    if quantization is None:
        return None
    checkpoint = read_checkpoint(directory) if (directory / OURS).is_file() else None
    record = (checkpoint.ours if checkpoint else None) or {}
    layout = FORMATS[str(record.get("exported_as", "vllm"))]
    plain = {
        str(normalize_name(name)): value for name, value in layout.tensors(saved, subject).items()
    }
    written = {str(normalize_name(name)): value for name, value in tensors.items()}
    faults = rounding_faults(plain, written)
    try:
        read_quantized(raw, tensors, target.num_layers)
    except Misread as error:
        faults.append(str(error))
    if faults:
        return RoundedDrafter(saved, faults, quantization)
    imported = import_checkpoint(checkpoint or read_checkpoint(directory), target)
    return RoundedDrafter(imported, [], quantization)


def plain_files(files: Files, layers: int) -> Files:
    """Return an export's files as if they had been written without quantization, with the numbers that they stand for.

    Args:
        layers: of the target.
    """
    raw, tensors = files
    plain, _ = read_quantized(raw, tensors, layers)
    return {key: value for key, value in raw.items() if key != "quantization_config"}, plain


class ServedDrafts(NamedTuple):
    """Chains of drafts by the export's reference."""

    tokens_AK: Tensor
    log_probs_AKD: (
        Tensor  # over the target's vocabulary, -inf for tokens that the drafter does not know
    )


class ServedText:
    """A text, and what the export's reference drafts behind its places; see :class:`AnchoredText`."""

    def __init__(
        self, target: Target, served: ServedDrafter, ids: Sequence[int], depth: int
    ) -> None:
        """Run the target on the text.

        Args:
            served: as the engine reads the files.
            depth: drafts of a chain.
        """
        self.served = served
        self.depth = depth
        self.ids_T = torch.tensor(list(ids), device=target.device)
        self.features_TH = fused_features(served, *reported_states(target, self.ids_T))
        self.side_by_side = max(1, LOG_PROBS_AT_ONCE // (depth * target.vocab_size))

    @torch.no_grad()
    def draft(self, places: Sequence[int], given_AK: Tensor) -> ServedDrafts:
        """Draft K tokens behind every place; step k + 1 reads token k of ``given_AK``."""
        slots = [place - 1 for place in places]
        log_probs_AKV = reference.draft(
            self.served, self.ids_T, self.features_TH, slots, self.depth - 1, given_AK
        ).log_probs_AKV
        return ServedDrafts(log_probs_AKV.argmax(-1), log_probs_AKV)


class Moved(NamedTuple):
    """What a few last bits of the activations change in the drafts of a quantized drafter."""

    share: float  # the largest difference of a log-probability, as a share of the range
    changed: int  # proposals that become other tokens


def moved_by_last_bits(
    target: Target, served: ServedDrafter, texts: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> Moved:
    """Measure what moving the reference's activations by :data:`LAST_BITS` last bits changes.

    Args:
        texts: of each text its tokens (T,), the places of passes (A,), and the engine's drafts there (A, K).
    """
    nudge = LAST_BITS * torch.finfo(target.dtype).eps
    moved_drafter = served._replace(nudge=nudge)
    share = 0.0
    changed = 0
    for ids_T, places_A, proposed_AK in texts:
        depth = proposed_AK.shape[1]
        given_AK = proposed_AK.clamp(0, target.vocab_size - 1)
        pair = [
            ServedText(target, read, ids_T.tolist(), depth).draft(places_A.tolist(), given_AK)
            for read in (served, moved_drafter)
        ]
        sound, moved = pair
        known = sound.log_probs_AKD.isfinite()
        gap = (sound.log_probs_AKD - moved.log_probs_AKD).where(known, torch.zeros(())).abs()
        best_AK = sound.log_probs_AKD.amax(-1)
        least_AK = sound.log_probs_AKD.where(known, best_AK[..., None]).amin(-1)
        shares_AK = gap.amax(-1) / (best_AK - least_AK).clamp_min(1e-30)
        share = max(share, float(shares_AK.max()))
        changed += int((sound.tokens_AK != moved.tokens_AK).sum())
    return Moved(share, changed)


def of_overflow(int8_error: float | None) -> str:
    """Return the end of a sentence about differing proposals: what the engine's own products have to do with it.

    Args:
        int8_error: see :meth:`specdec.engines.proposals.ProposalEngine.int8_error`.
    """
    if int8_error is None or int8_error <= MOST_INT8_ERROR:
        return ""
    return (
        f"; on this processor the engine's products of 8-bit integers are wrong by up to {int8_error:.0%}: oneDNN "
        "adds them in 16 bits where a CPU has no VNNI: serve int8 on another processor, or export with --quantize fp8"
    )
