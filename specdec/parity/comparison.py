"""Two ways of running a drafter beside each other.

Legend: A anchors, K depths, H width, V target vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.parity.said import Said

# what two orders of the same sums may differ by, as a share of the numbers' range, by the dtype that all run in
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# never less is allowed, however little training and decoding differ
LEAST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TIMES = 4  # as much as training and decoding differ by, of another implementation
NO_NUMBER = float("inf")


class Row(NamedTuple):
    """All anchors of one kind at one depth."""

    pair: str
    place: str
    depth: int
    anchors: int
    agree: int
    """Anchors at which both have the same most likely token."""
    gap: float
    """Largest difference of a log-probability; infinite if the two know other tokens, or one is no number."""
    share: float
    """The same, as a share of the range of the log-probabilities."""
    feature_share: float
    """Largest difference in what was read, as a share of the largest number there."""
    allowed: float
    """Of a share."""

    @property
    def equal(self) -> bool:
        """Whether the difference is that of rounding."""
        return self.share <= self.allowed

    @property
    def verdict(self) -> str:
        """``equal``, or where the first difference lies."""
        if self.equal:
            return "equal"
        if self.feature_share > self.allowed:
            what = "what the step before handed on" if self.depth else "the target's states, or how they are fused"
            return f"DIFFERENT: {what}"
        if self.gap == NO_NUMBER:
            return "DIFFERENT: the tokens that the head knows"
        return "DIFFERENT: the layer, its positions or the head"


def compare(pair: str, place: str, one: Said, two: Said) -> list[Row]:
    """A row for each depth."""
    allowed = TOLERANCE[one.features_AKH.dtype]
    rows = []
    for k in range(one.log_probs_AKV.shape[1]):
        ours, theirs = one.log_probs_AKV[:, k], two.log_probs_AKV[:, k]
        agree = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        gap, share = _laws(ours, theirs)
        feature_share = _features(one.features_AKH[:, k], two.features_AKH[:, k])
        rows.append(Row(pair, place, k, len(ours), agree, gap, share, feature_share, allowed))
    return rows


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row for each pair, place and depth, in the order in which they come first."""
    found: dict[tuple[str, str, int], Row] = {}
    for one in rows:
        row, key = one, (one.pair, one.place, one.depth)
        if key in found:
            old = found[key]
            row = row._replace(
                anchors=old.anchors + row.anchors,
                agree=old.agree + row.agree,
                gap=max(old.gap, row.gap),
                share=max(old.share, row.share),
                feature_share=max(old.feature_share, row.feature_share),
            )
        found[key] = row
    return list(found.values())


def rounding(rows: Iterable[Row], dtype: torch.dtype) -> float:
    """The share that another implementation may differ by, where our own two differ as ``rows`` say.

    In 16 bits the tolerance is wide enough to hide a norm that was left out; what rounding really does there is seen
    where training and decoding are compared.
    """
    seen = max((max(row.share, row.feature_share) for row in rows), default=0.0)
    return min(TOLERANCE[dtype], max(LEAST[dtype], TIMES * seen))


def _laws(one: Tensor, two: Tensor) -> tuple[float, float]:
    """The largest difference, and its share of the range."""
    known = one.isfinite()
    if bool(one.isnan().any() | two.isnan().any() | (known != two.isfinite()).any()):
        return NO_NUMBER, NO_NUMBER
    gap, spread = (one - two)[known].abs().max(), one[known].max() - one[known].min()
    return float(gap), float(gap / spread.clamp_min(1e-30))


def _features(one: Tensor, two: Tensor) -> float:
    share = float((one - two).abs().max() / one.abs().max().clamp_min(1e-30))
    return share if share == share else NO_NUMBER
