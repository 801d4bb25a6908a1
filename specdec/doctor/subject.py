"""The set-up that is examined: what ``specdec fit`` would train, and a few real rows of its data.

Legend: B rows, T tokens, N aux layers, H hidden, K unroll steps, D draft vocabulary.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.drafter import Drafter, Step
from specdec.evaluation.callback import decoding_copy
from specdec.features import Source
from specdec.nn.view import View
from specdec.optimizers import hidden_matrix
from specdec.target import Target
from specdec.training.module import DrafterModule
from specdec.training.objective import Recipe
from specdec.training.ttt import ORACLE, ttt_unroll

ROWS = 4  # of the loader's first batch
SAMPLE = 96  # tokens of the one document on which the drafter itself is examined


class Trainer(NamedTuple):
    """What the trainer's settings say."""

    precision: Any
    accelerator: str
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None


class Document(NamedTuple):
    """One document as a batch has it."""

    row: int
    ids_T: Tensor
    loss_mask_T: Tensor
    first: int  # its first token's place in the row


@dataclass
class Subject:
    """A set-up.

    Args:
        drafter: as training begins with it, in training's own dtype of weights; no check may change it but the last.
        batch: the first rows that the training loader hands out, on the target's device.
        source: where training has the target's features of them from.
        begun: the drafter begins with a saved one's weights rather than the target's.
        checkpoint: the tensors of a published or exported checkpoint that the drafter was read from, by name.
        seconds: for the overfitted sample.
        on_step: told of seconds that the overfitted sample took.
        curve: what the overfitted sample leaves for the report.
    """

    module: DrafterModule
    data: TokenData
    drafter: Drafter
    batch: Batch
    source: Source
    trainer: Trainer
    begun: bool
    checkpoint: dict[str, Tensor] | None
    seconds: float
    on_step: Callable[[int], None] = lambda seconds: None
    curve: list[dict[str, Any]] = field(default_factory=list)

    @property
    def target(self) -> Target:
        """The target, on its device."""
        return self.module.target

    @property
    def recipe(self) -> Recipe:
        """How the drafter is taught."""
        return self.module.recipe

    @property
    def precise_recipe(self) -> Recipe:
        """The same in float64, which kernels of a GPU do not know."""
        return dataclasses.replace(self.recipe, kernel=ORACLE) if self.target.device.type != "cpu" else self.recipe

    @property
    def depths(self) -> int:
        """Unroll steps looked at: two at least, so that there is a recurrence."""
        return max(2, self.recipe.steps)

    def documents(self) -> Iterator[Document]:
        """Those of the batch."""
        return documents(self.batch)

    def sample(self) -> Batch:
        """A row of one document: a stretch of real text around where its supervised tokens begin."""
        found = max(self.documents(), key=lambda one: min(int(one.loss_mask_T.sum()), SAMPLE // 2))
        begin = int(found.loss_mask_T.long().argmax()) if found.loss_mask_T.any() else 0
        start = max(0, min(begin - SAMPLE // 2, len(found.ids_T) - SAMPLE))
        ids_1T = found.ids_T[None, start : start + SAMPLE]
        return Batch(ids_1T, found.loss_mask_T[None, start : start + SAMPLE], torch.zeros_like(ids_1T))

    def aux(self, ids_1T: Tensor, dtype: torch.dtype) -> Tensor:
        """The target's states of one document, (1, T, N, H), as the drafter asks for them, worked out here."""
        config = self.drafter.config
        view = View.packed(torch.zeros_like(ids_1T))
        return self.target.forward(ids_1T, view, config.aux_layers, config.aux_final_norm).aux_BTNH.to(dtype)

    def precise(self) -> Drafter:
        """The drafter in float64."""
        return copy.deepcopy(self.drafter).to(torch.float64)

    def decoding(self) -> Drafter:
        """The drafter as it decodes, in the target's dtype."""
        return decoding_copy(self.drafter, self.target).eval()

    def lively(self) -> Drafter:
        """The same, its scales away from one: two norms one after the other are then not the same as one.

        Hidden matrices that start at random get unit gain, so that what goes wrong in a block shows.
        """
        drafter, chance = self.precise(), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if parameter.ndim == 1:
                    drawn = torch.rand(parameter.shape, generator=chance, dtype=torch.float64)
                    parameter.copy_(0.5 + drawn.to(parameter.device))
                elif hidden_matrix(name, parameter) and not self.begun:
                    parameter.div_(parameter.square().mean().sqrt() * parameter.shape[1] ** 0.5)
        return drafter.requires_grad_(False)


def documents(batch: Batch) -> Iterator[Document]:
    """Those of any batch."""
    for row, (ids_T, mask_T, documents_T) in enumerate(zip(*batch, strict=True)):
        for number in documents_T[documents_T >= 0].unique().tolist():
            (places,) = (documents_T == number).nonzero(as_tuple=True)
            yield Document(row, ids_T[places], mask_T[places], int(places[0]))


@torch.no_grad()
def unrolled(drafter: Drafter, ids_1T: Tensor, aux_1TNH: Tensor, steps: int) -> list[Step]:
    """The steps over one document, by the plainest of the kernels."""
    return list(ttt_unroll(drafter, ids_1T, aux_1TNH, torch.zeros_like(ids_1T), steps, ORACLE))


@torch.no_grad()
def logits_of(drafter: Drafter, ids_1T: Tensor, aux_1TNH: Tensor, steps: int) -> Tensor:
    """(K, T, D)."""
    return torch.stack([drafter.logits(step.normed_BTH[0]) for step in unrolled(drafter, ids_1T, aux_1TNH, steps)])


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two tensors, as a share of the range of the first."""
    return float((one - other).abs().max() / (one.max() - one.min()).clamp_min(1e-30))
