"""The set-up that is examined, with a few real rows of its data; and what a check says of it.

Legend: B rows, T tokens, N aux layers, H hidden, K unroll steps, D draft vocabulary.
"""

import copy
import dataclasses
import math
import operator
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.data import Batch, TokenData
from specdec.drafter import Drafter, DrafterSpec, Step, load, save
from specdec.drafter.io import FORMAT
from specdec.evaluation.callback import decoding_copy
from specdec.export.read import fetch, import_checkpoint, read_checkpoint
from specdec.nn.optimizers import hidden_matrix
from specdec.nn.unroll import unroll_kernel
from specdec.nn.view import View
from specdec.target import Target
from specdec.training.building import FromDrafter
from specdec.training.module import DrafterModule
from specdec.training.step import ObjectiveConfig
from specdec.training.ttt import ORACLE, ttt_unroll
from specdec.utils.files import read_json

ROWS = 4  # of the loader's first batch
SAMPLE = 96  # tokens of the one document on which the drafter itself is examined
RULES = {"<=": operator.le, ">=": operator.ge, ">": operator.gt, "<": operator.lt}


class CheckResult(StrEnum):
    """How a check came out."""

    SOUND = "sound"
    FAULTY = "faulty"
    UNCHECKED = "cannot be checked"


class Finding(NamedTuple):
    """One thing that was checked."""

    what: str
    result: CheckResult
    figure: float | None = None
    wanted: str = ""
    note: str = ""
    """Of a fault its likely cause and what to do; of what cannot be checked why; else a remark."""
    check: str = ""
    """The name of the check that found it, which whoever runs the check fills in."""


def judged(what: str, figure: float, rule: str, bound: float, fault: str, remark: str = "") -> Finding:
    """Sound, with the remark, if the figure keeps its bound, which NaN never does; else faulty."""
    sound = not math.isnan(figure) and RULES[rule](figure, bound)
    result = CheckResult.SOUND if sound else CheckResult.FAULTY
    return Finding(what, result, figure, f"{rule} {bound:.4g}", remark if sound else fault)


def unchecked(what: str, why: str, figure: float | None = None) -> Finding:
    """What cannot be said here."""
    return Finding(what, CheckResult.UNCHECKED, figure, note=why)


class PackedDocument(NamedTuple):
    """One document as a batch has it."""

    row: int
    first: int  # its first token's place in the row
    ids_T: Tensor
    loss_mask_T: Tensor


def documents(batch: Batch) -> Iterator[PackedDocument]:
    """The documents of a batch."""
    for row, (ids_T, mask_T, documents_T) in enumerate(zip(*batch, strict=True)):
        for number in documents_T[documents_T >= 0].unique().tolist():
            (places,) = (documents_T == number).nonzero(as_tuple=True)
            yield PackedDocument(row, int(places[0]), ids_T[places], mask_T[places])


@dataclasses.dataclass
class SetUp:
    """A set-up.

    Args:
        drafter: as training begins with it, in training's own dtype of weights; no check may change it but the last.
        batch: the first rows that the training loader hands out, on the target's device.
        trainer: the trainer's settings: precision, accelerator and gradient clipping.
        begun: whether the drafter begins with a saved one's weights rather than the target's.
        seconds: for the overfitted sample.
        curve: what the overfitted sample leaves for the report.
    """

    module: DrafterModule
    data: TokenData
    drafter: Drafter
    batch: Batch
    trainer: Any
    begun: bool
    seconds: float
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.target: Target = self.module.target
        self.objective: ObjectiveConfig = self.module.objective
        # for float64, which a GPU's kernels do not know
        gpu = self.target.device.type != "cpu"
        self.precise_objective = dataclasses.replace(self.objective, kernel=ORACLE) if gpu else self.objective

    def sample(self) -> Batch:
        """A row of one document: real text around where its supervised tokens begin."""
        found = max(documents(self.batch), key=lambda one: min(int(one.loss_mask_T.sum()), SAMPLE // 2))
        begin = int(found.loss_mask_T.long().argmax())
        start = max(0, min(begin - SAMPLE // 2, len(found.ids_T) - SAMPLE))
        ids_1T = found.ids_T[None, start : start + SAMPLE]
        return Batch(ids_1T, found.loss_mask_T[None, start : start + SAMPLE], torch.zeros_like(ids_1T))

    def aux(self, ids_1T: Tensor) -> Tensor:
        """The target's states of one document, (1, T, N, H) float64, as the drafter asks for them."""
        config, view = self.drafter.config, View.packed(torch.zeros_like(ids_1T))
        return self.target.forward(ids_1T, view, config.aux_layers, config.fusion.final_norm).aux_BTNH.double()

    def precise(self) -> Drafter:
        """The drafter in float64."""
        return copy.deepcopy(self.drafter).to(torch.float64)

    def decoding(self) -> Drafter:
        """The drafter as it decodes, in the target's dtype."""
        return decoding_copy(self.drafter, self.target).eval()

    def lively(self) -> Drafter:
        """The drafter in float64 with norm weights away from one, so that a norm left out shows.

        Hidden matrices that start at random get unit gain, so that a part of a block left out shows.
        """
        drafter, generator = self.precise(), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in drafter.named_parameters():
                if weight.ndim == 1:
                    weight.copy_(0.5 + torch.rand(weight.shape, generator=generator, dtype=torch.float64))
                elif hidden_matrix(name, weight) and not self.begun:
                    weight.div_(weight.square().mean().sqrt() * weight.shape[1] ** 0.5)
        return drafter.requires_grad_(False)


def set_up(
    module: DrafterModule, data: TokenData, trainer: Any, drafter: str | None, seconds: float, scratch: Path
) -> SetUp:
    """Build what ``specdec fit`` would train: target, data, drafter and features.

    Args:
        drafter: a directory of a saved, exported or published drafter, in place of the one that the run would make.
        scratch: where a published one is imported.

    Raises:
        ValueError: ``specdec fit`` would refuse the set-up, or ``specdec import`` the drafter, in the same words.
    """
    gpu = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    module.target.to(device)
    if drafter is not None:
        _begin_with(module, drafter, scratch)
    data.prepare(module.tokenizer)
    made = module.build(data)
    module.open(data, made)
    module.objective = dataclasses.replace(module.objective, kernel=unroll_kernel(module.attention, device)[1])
    batch = Batch(*(column[:ROWS].to(device) for column in next(iter(data.train_dataloader()))))
    return SetUp(module, data, made.to(device), batch, trainer, isinstance(module.start, FromDrafter), seconds)


def _begin_with(module: DrafterModule, directory: str, scratch: Path) -> None:
    """Let the module begin with this drafter's design and weights."""
    where = Path(directory)
    stored = read_json(where / "config.json") if (where / "config.json").is_file() else {}
    if not (isinstance(stored, dict) and stored.get("format") == FORMAT):
        where = save(import_checkpoint(read_checkpoint(fetch(directory, None)), module.target), scratch / "imported")
    config = load(where).config
    fields = {one.name: getattr(config, one.name) for one in dataclasses.fields(DrafterSpec)}
    module.spec = DrafterSpec(**{**fields, "aux_layers": list(config.aux_layers)})
    module.objective.loss.check(module.spec)
    module.start = FromDrafter(str(where))
    module.train_head = module.train_head and module.spec.head == "own"


@torch.no_grad()
def unrolled(drafter: Drafter, ids_1T: Tensor, aux_1TNH: Tensor, steps: int) -> list[Step]:
    """The steps over one document, by the plainest of the kernels."""
    return list(ttt_unroll(drafter, ids_1T, aux_1TNH, torch.zeros_like(ids_1T), steps, ORACLE))


@torch.no_grad()
def logits_of(drafter: Drafter, ids_1T: Tensor, aux_1TNH: Tensor, steps: int) -> Tensor:
    """The steps' logits over one document, (K, T, D)."""
    return torch.stack([drafter.logits(step.normed_BTH[0]) for step in unrolled(drafter, ids_1T, aux_1TNH, steps)])
