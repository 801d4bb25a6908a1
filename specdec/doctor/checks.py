"""The checks, in the order in which they are made."""

from collections.abc import Callable, Iterator

from specdec.doctor import agreement, gradient, labels, masks, overfit, rope, switches, taps, vocabulary
from specdec.doctor.finding import Finding
from specdec.doctor.subject import Subject

Check = Callable[[Subject], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    taps.NAME: taps.taps,
    masks.NAME: masks.masks,
    labels.NAME: labels.labels,
    vocabulary.NAME: vocabulary.vocabulary,
    gradient.NAME: gradient.gradient,
    switches.NAME: switches.switches,
    rope.NAME: rope.rope,
    agreement.NAME: agreement.agreement,
    overfit.NAME: overfit.overfit,
}
"""The last one trains the drafter, so nothing comes after it."""
