"""One drafter on one text: every quantity at every draft step, as sums over chains.

Legend: A chains, K depths, F quantities, G quantities of sources, S key slots, T positions of the text.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.drafter import Drafter
from specdec.drift import series
from specdec.drift.chains import Trunk
from specdec.drift.masses import Rows, masses
from specdec.drift.quantities import by_depth, of_sources
from specdec.drift.settings import Settings
from specdec.drift.texts import OwnText
from specdec.target import Target

SIDE_BY_SIDE = 64  # chains, at most
NUMBERS = 2**24  # of the drafter's laws that are kept at once


class Sums(NamedTuple):
    """Of one prompt, on the CPU, float64."""

    series_FK2: Tensor
    """Of every row of :func:`series.rows`, at every depth: the sum over chains, and how many there are."""
    sources_G2: Tensor
    """Of every row of :func:`series.source_rows`, the same."""
    top_2: Tensor
    """The text's position that takes the most weight, over all chains and steps, and the mean of that weight."""

    @property
    def chains(self) -> int:
        """A."""
        return int(self.sources_G2[0, 1])

    @classmethod
    def empty(cls, drafter: Drafter, depths: int) -> "Sums":
        """Of no chain."""
        shapes = (len(series.rows(drafter.config)), depths, 2), (len(series.source_rows(drafter.config)), 2), (2,)
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))


@torch.inference_mode()
def measure(target: Target, drafter: Drafter, text: OwnText, settings: Settings) -> Sums:
    """Draft from the text's anchors, verify what was drafted, and add up; of no chain where the text is too short.

    Nothing is drawn at random, and neither target nor drafter change.

    Raises:
        ValueError: the text with a chain is too long for the target.
    """
    anchors = text.anchors(settings.anchors, settings.depths)
    if not anchors:
        return Sums.empty(drafter, settings.depths)
    together = min(len(anchors), _side_by_side(target, drafter, text, settings.depths))
    trunk = Trunk(target, drafter, text, together, settings.depths)
    weight_T = torch.zeros(trunk.rows, dtype=torch.float64)
    parts = [
        _of_chains(trunk, anchors[at : at + together], settings, weight_T) for at in range(0, len(anchors), together)
    ]
    series_FK2, sources_G2 = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    most = weight_T.max(0)
    top_2 = torch.stack([most.indices.double(), most.values / (len(anchors) * settings.depths)])
    return Sums(series_FK2, sources_G2, top_2)


def _side_by_side(target: Target, drafter: Drafter, text: OwnText, depths: int) -> int:
    """Chains that are drafted together, by the memory of their laws and by the slots that the target can have."""
    most = min(SIDE_BY_SIDE, NUMBERS // (depths * drafter.config.draft_vocab_size))
    if target.most_slots is not None:
        most = min(most, (target.most_slots - len(text.ids)) // depths)
    return max(1, most)


def _of_chains(trunk: Trunk, anchors: list[int], settings: Settings, weight_T: Tensor) -> tuple[Tensor, Tensor]:
    """The sums; what each position of the text is given, a mean over heads and layers, is added to ``weight_T``."""
    anchor_A = torch.tensor(anchors, device=trunk.ids_1T.device)
    looks_LAF: list[Tensor] = []

    def look(level: int, weights_AhS: list[Tensor]) -> None:
        rows = Rows(trunk.rows, trunk.prompt, anchor_A, level, weights_AhS[0].shape[-1])
        regions_ARS = rows.regions(settings)
        looks_LAF.append(torch.stack([masses(layer_AhS, regions_ARS) for layer_AhS in weights_AhS]).double())
        given_T = torch.stack([layer_AhS[..., : trunk.rows].mean(1).sum(0) for layer_AhS in weights_AhS]).mean(0)
        weight_T.add_(given_T.double().cpu())

    roots, steps = trunk.draft(anchors, settings.depths, look)
    said = trunk.verify(anchors, [step.tokens_A for step in steps[:-1]])
    series_KF2 = torch.stack(list(by_depth(trunk, roots, steps, looks_LAF, said)))
    return series_KF2.transpose(0, 1).cpu(), of_sources(roots).cpu()
