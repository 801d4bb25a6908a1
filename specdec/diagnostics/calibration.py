"""Whether a drafter knows when it is right: its confidence in drafts, compared with how often they are accepted.

What stops drafting early (llama.cpp's ``p_min``, adaptive draft lengths of vLLM and SGLang) compares such a confidence
with a threshold. It can rely on three things: that the confidence ranks drafts well, that it means what it says
(calibration: of drafts with 0.8, eight in ten are accepted; Guo et al. 2017, https://arxiv.org/abs/1706.04599), and
that both hold at every draft step.

Example of a bin: 50 drafts with confidences from 0.7 to 0.8, 0.74 in the mean, of which 31 are accepted, 0.62. The
drafter is overconfident there by 0.12, which counts 50 times in the expected calibration error.

From few drafts the error of a calibrated drafter is not 0 either, since a bin's share is never exactly its chance:
:func:`error_if_calibrated` is what it would be.

Legend: A chains, K draft steps, D draft vocabulary, C kinds of confidence, B bins, R fine bins, P prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.report.statistics import SHARE, Array, Interval, interval, ratio

BINS = 10  # of equal width, from 0 to 1
FINE_BINS = 1000  # that drafts are ranked by
CONFIDENCES = {  # each from 0 to 1
    "top": "the draft's probability",
    "margin": "the draft's probability less the second token's",
    "entropy": "1 - entropy over its largest possible",
    "product": "product of the probabilities of the draft and of all drafts before it",
}
OF_HEAD = {  # of a drafter with a confidence head (DSpark), behind those
    "head": "the confidence head's estimate",
    "head_product": "product of the head's estimates of the draft and of all drafts before it",
}
ALL_KINDS = CONFIDENCES | OF_HEAD
# These are compared with the acceptance of the whole chain so far.
WHOLE_CHAIN = ("product", "head_product")
COLUMNS = ("drafts", "confidence", "accepted")  # sums of a bin


def confidences(log_probs_AKD: Tensor, head_AK: Tensor | None = None) -> Tensor:
    """Return every kind of confidence in every draft, (A, K, C) float64, in the order of :data:`ALL_KINDS`.

    Args:
        head_AK: what a confidence head says of each draft, if there is one.
    """
    log_probs_AKD = log_probs_AKD.double()
    first_AK, second_AK = log_probs_AKD.topk(2, dim=-1).values.exp().unbind(-1)
    entropy_AK = torch.special.entr(log_probs_AKD.exp()).sum(-1)
    most = np.log(log_probs_AKD.shape[-1])
    kinds = [first_AK, first_AK - second_AK, 1 - entropy_AK / most, first_AK.cumprod(1)]
    if head_AK is not None:
        head_AK = head_AK.double()
        kinds += [head_AK, head_AK.cumprod(1)]
    return torch.stack(kinds, -1).clamp(0, 1)


def binned(confidence_AKC: Tensor, right_AK: Tensor) -> Tensor:
    """Add up chains by fine bin, (C, K, R, 3) float64: how many drafts, their confidence, and how many were accepted.

    A draft counts if all before it were accepted: no engine verifies another one. The product of a chain's confidences
    counts for every chain, compared with whether all of its drafts so far were accepted.

    Args:
        right_AK: bool, whether the draft is the target's token.
    """
    so_far_AK = right_AK.cumprod(1).bool()
    before_AK = torch.cat([torch.ones_like(so_far_AK[:, :1]), so_far_AK[:, :-1]], 1)
    steps_K = torch.arange(right_AK.shape[1], device=right_AK.device)
    sums = []
    for kind, confidence_AK in zip(ALL_KINDS, confidence_AKC.unbind(-1), strict=False):
        counts_AK = torch.ones_like(before_AK) if kind in WHOLE_CHAIN else before_AK
        # 1 belongs to the last bin
        bin_AK = (confidence_AK * FINE_BINS).long().clamp_max(FINE_BINS - 1)
        place_AK = bin_AK + FINE_BINS * steps_K
        columns_AK3 = torch.stack([torch.ones_like(confidence_AK), confidence_AK, so_far_AK], -1)
        sums_F3 = columns_AK3.new_zeros(len(steps_K) * FINE_BINS, 3)
        sums_F3.index_add_(0, place_AK[counts_AK], columns_AK3[counts_AK])
        sums.append(sums_F3.view(len(steps_K), FINE_BINS, 3))
    return torch.stack(sums).double().cpu()


@dataclass(frozen=True)
class Binned:
    """A kind of confidence at some draft steps.

    Args:
        sums_PF: of every prompt the sums of each fine bin, (P, R * 3).
    """

    sums_PF: Array

    def error(self) -> Interval | None:
        """Return the expected calibration error with its interval over prompts; None without a draft."""
        return interval(self._with_drafts(), calibration_error, SHARE)

    def error_if_calibrated(self) -> float | None:
        """Return the error of a drafter that is calibrated, from as many drafts; None without a draft."""
        total_F = self.sums_PF.sum(0)
        return float(error_if_calibrated(total_F)) if self.drafts() else None

    def drafts(self) -> int:
        """Return how many drafts there are."""
        return int(_bins(self.sums_PF)[..., 0].sum())

    def ranking(self) -> Interval | None:
        """Return the chance that an accepted draft has more confidence than a rejected one, a tie counted half.

        Confidences in the same thousandth are a tie.
        """
        figure = interval(self._with_drafts(), ranking, SHARE)
        return figure if figure is not None and np.isfinite(figure.mean) else None

    def bins(self) -> list[dict[str, Any]]:
        """Return every bin that has drafts: their number, mean confidence, and the share accepted with its interval."""
        rows = []
        for drafts_P, confidence_P, accepted_P in np.moveaxis(_bins(self.sums_PF), 0, -1):
            if not drafts_P.sum():
                continue
            sums_P2 = np.stack([accepted_P, drafts_P], -1)[drafts_P > 0]
            accepted = interval(sums_P2, ratio, SHARE)
            assert accepted is not None
            rows.append(
                {
                    "drafts": int(drafts_P.sum()),
                    "confidence": float(confidence_P.sum() / drafts_P.sum()),
                    **accepted._asdict(),
                }
            )
        return rows

    def _with_drafts(self) -> Array:
        return self.sums_PF[_bins(self.sums_PF)[..., 0].sum(-1) > 0]


def calibration(bins: Sequence[Tensor]) -> dict[str, Any]:
    """Return what ``drift.json`` holds of a drafter's confidence, by kind, of all draft steps and of each.

    Args:
        bins: of every prompt, (C, K, R, 3), as :func:`binned` gives them.
    """
    sums_CKPF = torch.stack([*bins], 2).flatten(-2).numpy()
    out: dict[str, Any] = {}
    for (name, title), sums_KPF in zip(ALL_KINDS.items(), sums_CKPF, strict=False):
        steps = [_measured(Binned(sums_PF)) for sums_PF in sums_KPF]
        out[name] = {
            "title": title,
            "all_steps": _measured(Binned(sums_KPF.sum(0))),
            "steps": steps,
        }
    return out


def _measured(binned_drafts: Binned) -> dict[str, Any]:
    error = binned_drafts.error()
    order = binned_drafts.ranking()
    return {
        "drafts": binned_drafts.drafts(),
        "calibration_error": error and error._asdict(),
        "error_if_calibrated": binned_drafts.error_if_calibrated(),
        "ranking": order and order._asdict(),
        "bins": binned_drafts.bins(),
    }


def _bins(sums_F: Array) -> Array:
    """Return the sums by bin, (..., B, 3)."""
    return _fine_bins(sums_F).reshape(*sums_F.shape[:-1], BINS, -1, len(COLUMNS)).sum(-2)


def _fine_bins(sums_F: Array) -> Array:
    """Return the sums by fine bin, (..., R, 3)."""
    return sums_F.reshape(*sums_F.shape[:-1], FINE_BINS, len(COLUMNS))


def calibration_error(sums_F: Array) -> Array:
    """The mean distance between a bin's confidence and the share that is accepted, weighted by its drafts."""
    drafts_B, confidence_B, accepted_B = np.moveaxis(_bins(sums_F), -1, 0)
    return np.abs(confidence_B - accepted_B).sum(-1) / drafts_B.sum(-1)


def error_if_calibrated(sums_F: Array) -> Array:
    """The mean of :func:`calibration_error` where every draft is accepted with its confidence, independently.

    A bin's accepted drafts are then nearly normal around its confidences, with the variance n c (1 - c) at most, and
    the mean distance of a normal number from its mean is the root of 2/pi of its variance.
    """
    drafts_B, confidence_B, _ = np.moveaxis(_bins(sums_F), -1, 0)
    variance_B = confidence_B * (1 - confidence_B / np.maximum(drafts_B, 1))
    return np.sqrt(2 / np.pi * variance_B).sum(-1) / drafts_B.sum(-1)


def ranking(sums_F: Array) -> Array:
    """The area under the curve of accepted over rejected drafts (the ROC)."""
    drafts_R, _, accepted_R = np.moveaxis(_fine_bins(sums_F), -1, 0)
    rejected_R = drafts_R - accepted_R
    # every accepted draft compared with the rejected ones of lower bins, and half of its own bin's
    lower_R = rejected_R.cumsum(-1) - rejected_R / 2
    return (accepted_R * lower_R).sum(-1) / (accepted_R.sum(-1) * rejected_R.sum(-1))
