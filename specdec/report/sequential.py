"""A test that may be looked at after every window: has a mean fallen below what it was?

Legend: W windows, each with a number of passes and of accepted drafts; J sizes of a fall.
"""

import math

import numpy as np

from specdec.report.statistics import ALPHA, Array

FALLS_J = np.array([0.05, 0.1, 0.2, 0.4, 0.8])  # parts of the reference's lower end
TOTAL = 2.11  # of the weights, rounded up: https://oeis.org/A115563
FEW = 8  # batches of windows from which a variance is taken, at least
LEAST = 1e-3  # variance per pass, in parts of the squared level: one prompt asked again and again shows none
RECENT = 4096  # windows that are kept for it


class FallTest:
    """Whether the drafts accepted per pass have fallen below a level at some window, and stay below since.

    For every window at which a fall may have begun, and every size of it, there is an e-process: a product of factors
    whose mean is at most 1 while the mean is not below the level. Their weighted sum, an e-detector of the
    Shiryaev-Roberts kind (https://arxiv.org/abs/2203.03532), is a supermartingale that begins at 1, once the weights
    still to come are added. By Ville's inequality it reaches 1 / alpha with probability alpha at most, however long one
    looks.

    A window's factor is Bennett's (https://doi.org/10.1080/01621459.1962.10482149). It holds for means of numbers that
    are not negative, if the window's mean, given its passes and the windows before, is at least ``low``, and its
    variance at most ``variance`` over its passes. Both are assumptions. A mean above ``low`` makes no factor larger:
    scaled down to ``low``, the window's numbers are smaller and vary less.

    Args:
        low: accepted drafts per pass, the level.
        variance: of a window's mean times its passes, which counts that passes of one answer are alike. What the
            windows show (:func:`variance_per_pass`) counts where it is more.
    """

    def __init__(self, low: float, variance: float, alpha: float = ALPHA) -> None:
        self.low = low
        self.variance = variance
        self.threshold = -math.log(alpha)
        self.windows = 0
        self._recent_W2 = np.empty((0, 2))
        self.restart()

    def restart(self) -> None:
        """Forget the evidence, as after a server's start. Weights are not given out again: alpha is of all starts."""
        self._log_evidence_J = np.full(len(FALLS_J), -math.inf)
        self._cusum_J = np.zeros(len(FALLS_J))
        self._begin_J = np.full(len(FALLS_J), self.windows)

    @property
    def log_evidence(self) -> float:
        """The natural logarithm of the evidence for a fall; -inf before the first window."""
        return float(np.logaddexp.reduce(self._log_evidence_J)) - math.log(len(FALLS_J))

    @property
    def has_fallen(self) -> bool:
        """Whether the evidence is enough now."""
        return self.log_evidence >= self.threshold

    @property
    def begin(self) -> int:
        """The window, from 0, at which the fall has most likely begun: CUSUM's estimate."""
        return int(self._begin_J[self._cusum_J.argmax()])

    def add(self, passes: float, accepted: float) -> None:
        """Take a window into account; it has at least one pass."""
        known = max(self.variance, variance_per_pass(self._recent_W2), LEAST * self.low**2)
        variance = known / passes
        # the best bet on a fall of this size, and Bennett's bound on what it gains without one
        bet_J = np.log1p(FALLS_J * self.low**2 / variance)
        bound_J = variance / self.low**2 * (np.expm1(bet_J) - bet_J)
        gain_J = bet_J * (1 - accepted / passes / self.low) - bound_J
        # the weight of a fall that begins here: 1 / (s log(s)^2) from s = 2 on, which sums to TOTAL
        start = self.windows + 2
        weight = -math.log(TOTAL * start * math.log(start) ** 2)
        self._log_evidence_J = np.logaddexp(self._log_evidence_J, weight) + gain_J
        self._begin_J = np.where(self._cusum_J > 0, self._begin_J, self.windows)
        self._cusum_J = np.maximum(self._cusum_J, 0) + gain_J
        self.windows += 1
        self._recent_W2 = np.concatenate([self._recent_W2[1 - RECENT :], [[passes, accepted]]])


def variance_per_pass(windows_W2: Array) -> float:
    """Return the variance of windows' means times their passes; 0 from too few windows.

    Neighboring batches of 1, 2, 4, ... windows are compared, so that one fall in between counts once, and the largest
    counts: where long answers span windows, neighbors are alike and only large batches show the variance.

    Args:
        windows_W2: passes and accepted drafts of each window, in order.
    """
    largest = 0.0
    size = 1
    while len(windows_W2) >= FEW * size:
        batches = len(windows_W2) // size
        sums_B2 = windows_W2[-batches * size :].reshape(batches, size, 2).sum(1)
        passes_B = sums_B2[:, 0]
        mean_B = sums_B2[:, 1] / passes_B
        # the variance of the difference of two means is that of a pass times (1 / n + 1 / m)
        pairs = np.diff(mean_B) ** 2 / (1 / passes_B[1:] + 1 / passes_B[:-1])
        largest = max(largest, float(pairs.mean()))
        size *= 2
    return largest
