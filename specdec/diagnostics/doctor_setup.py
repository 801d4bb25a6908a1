"""The set-up that the doctor examines, and its findings.

Legend: B rows, T tokens, N aux layers, H hidden, K unroll steps, D draft vocabulary, V vocabulary, C positions.
"""

import copy
import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.data import Batch, ChatData, Document, TextData, TokenData
from specdec.data.template import template_of
from specdec.data.tokens import EncodedDocument
from specdec.drafter import Drafter, DrafterConfig, load_drafter
from specdec.evaluation.callback import decoding_copy
from specdec.export.planned import missing_kernels, planned_subject, served, unserved
from specdec.nn.kernels import unroll_kernel
from specdec.nn.optimizers import hidden_matrix
from specdec.nn.unroll import DENSE
from specdec.nn.view import View
from specdec.target import NotServable
from specdec.target.loading import load_config
from specdec.training.building import FromDrafter, check_shapes, early_config
from specdec.training.module import DrafterModule

ROWS = 4  # of the loader's first batch
SAMPLE = 96  # tokens of the one document on which the drafter itself is examined
RULES = {"<=": operator.le, ">=": operator.ge, ">": operator.gt, "<": operator.lt}


class CheckResult(StrEnum):
    """How a check came out."""

    SOUND = "sound"
    FAULTY = "FAULTY"
    UNCHECKED = "not checked"


class Finding(NamedTuple):
    """One thing that was checked."""

    what: str
    result: CheckResult
    figure: float | None = None
    wanted: str = ""
    # of a fault its likely cause and what to do; of what cannot be checked why; else a remark
    note: str = ""
    check: str = ""  # the name of the check that found it, which whoever runs the check fills in


Findings = Iterator[Finding]


def judged(
    what: str, figure: float, rule: str, bound: float, fault: str, remark: str = ""
) -> Finding:
    """Return a sound finding, with the remark, if the figure keeps its bound, else a faulty one; NaN keeps none."""
    sound = RULES[rule](figure, bound)
    return Finding(
        what,
        CheckResult.SOUND if sound else CheckResult.FAULTY,
        figure,
        f"{rule} {bound:.4g}",
        remark if sound else fault,
    )


def unchecked(what: str, why: str, figure: float | None = None) -> Finding:
    """Return a finding that cannot be made here."""
    return Finding(what, CheckResult.UNCHECKED, figure, note=why)


class PackedDocument(NamedTuple):
    """One document as a batch has it."""

    row: int
    first: int  # its first token's place in the row
    ids_T: Tensor
    loss_mask_T: Tensor


def last_supervised(mask_T: Tensor) -> Tensor:
    """Mark the last token of every supervised run: it is followed by one that is not supervised, or by none."""
    return mask_T & ~F.pad(mask_T[1:], (0, 1))


def turn_ends(documents: Iterable[Document | EncodedDocument]) -> Counter[int]:
    """Count the tokens that supervised runs end with."""
    ends = Counter[int]()
    for document in documents:
        ends.update(document.ids_T[last_supervised(document.loss_mask_T)].tolist())
    return ends


def documents(batch: Batch) -> Iterator[PackedDocument]:
    """Yield the documents of a batch."""
    for row, (ids_T, mask_T, documents_T) in enumerate(zip(*batch, strict=True)):
        for number in documents_T[documents_T >= 0].unique().tolist():
            (places,) = (documents_T == number).nonzero(as_tuple=True)
            yield PackedDocument(row, int(places[0]), ids_T[places], mask_T[places])


@dataclasses.dataclass
class SetUp:
    """Everything that a training would use.

    Args:
        drafter: as training begins with it, in training's own dtype of weights; no check may change it but the last.
        batch: the first rows that the training loader hands out, on the target's device.
        trainer: the trainer's settings: precision, accelerator and gradient clipping.
        saved: whether the drafter begins with a saved one's weights rather than the target's.
        seconds: for the overfitted sample.
    """

    module: DrafterModule
    data: TokenData
    drafter: Drafter
    batch: Batch
    trainer: Any
    saved: bool
    seconds: float

    def __post_init__(self) -> None:
        self.target = self.module.target
        self.objective = self.module.objective

    def sample(self) -> Batch:
        """Return a row of one document: real text around where its supervised tokens begin."""

        def supervised(document: PackedDocument) -> int:
            return min(int(document.loss_mask_T.sum()), SAMPLE // 2)

        document = max(documents(self.batch), key=supervised)
        start = max(
            0,
            min(
                int(document.loss_mask_T.long().argmax()) - SAMPLE // 2,
                len(document.ids_T) - SAMPLE,
            ),
        )
        places = slice(start, start + SAMPLE)
        ids_1T = document.ids_T[None, places]
        return Batch(ids_1T, document.loss_mask_T[None, places], torch.zeros_like(ids_1T))

    def aux(self, ids_1T: Tensor) -> Tensor:
        """Return the target's states of one document, (1, T, N, H) float64, as the drafter asks for them."""
        config = self.drafter.config
        view = View.packed(torch.zeros_like(ids_1T))
        return self.target.forward(
            ids_1T, view, config.aux_layers, config.fusion.final_norm
        ).aux_BTNH.double()

    def precise(self) -> Drafter:
        """Return the drafter in float64."""
        return copy.deepcopy(self.drafter).double()

    def decoding(self) -> Drafter:
        """Return the drafter as it decodes, in the target's dtype."""
        return decoding_copy(self.drafter, self.target).eval()

    def lively(self) -> Drafter:
        """Return the drafter in float64 with norm weights away from one, so that a norm left out shows.

        Hidden matrices that start at random get unit gain, so that a part of a block left out shows.
        """
        drafter = self.precise()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in drafter.named_parameters():
                if weight.ndim == 1:
                    weight.copy_(
                        0.5 + torch.rand(weight.shape, generator=generator, dtype=torch.float64)
                    )
                elif hidden_matrix(name, weight) and not self.saved:
                    weight.div_(weight.square().mean().sqrt() * weight.shape[1] ** 0.5)
        return drafter.requires_grad_(False)


def set_up(
    module: DrafterModule, data: TokenData, trainer: Any, drafter: str | None, seconds: float
) -> SetUp:
    """Build what ``specdec fit`` would train: target, data, drafter and features.

    Args:
        drafter: a directory of a saved drafter, in place of the one that the run would make.

    Raises:
        ValueError: ``specdec fit`` would refuse the set-up, in the same words.
    """
    gpu = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    module.target.to(device)
    if drafter is not None:
        module.spec = load_drafter(drafter).config.design()
        module.objective.check(module.spec)
        module.start = FromDrafter(drafter)
        module.train_head = module.train_head and module.spec.head == "own"
    data.prepare(module.tokenizer)
    built = module.build(data)
    module.open(data, built)
    # refuses what training would refuse, whatever is checked
    module.make_optimizer([*built.named_parameters()])
    module.objective = dataclasses.replace(
        module.objective, kernel=unroll_kernel(module.attention, device)[1]
    )
    batch = Batch(*(column[:ROWS].to(device) for column in next(iter(data.train_dataloader()))))
    return SetUp(
        module,
        data,
        built.to(device),
        batch,
        trainer,
        isinstance(module.start, FromDrafter),
        seconds,
    )


@torch.no_grad()
def logits_of(drafter: Drafter, ids_1T: Tensor, aux_1TNH: Tensor, steps: int) -> Tensor:
    """Return the steps' logits over one document, (K, T, D), by the plainest of the kernels."""
    unroll = drafter.unroll(ids_1T, aux_1TNH, torch.zeros_like(ids_1T), steps, DENSE)
    return torch.stack([drafter.logits(step.normed_BTH[0]) for step in unroll])


def first_findings(module: DrafterModule, data: TokenData, saved: str | None) -> Findings:
    """The drafter's shapes, the engines that will serve it, the tokenizer's template and its first token.

    Args:
        saved: the directory of a saved drafter that stands in place of a new one.

    Raises:
        ValueError: config or tokenizer cannot be read.
    """
    source = module.target_source
    hf_config = load_config(source.directory(), source.revision, source.trust_remote_code)
    configs: list[DrafterConfig] = []

    def shapes() -> str:
        """Keeps the drafter's config where design and target have one."""
        config = load_drafter(saved).config if saved else early_config(module.spec, hf_config)
        if config is None:
            raise ValueError(
                f"{source.source}: its config names no attention heads: it is of no family for a target"
            )
        configs.append(config)
        check_shapes(config)
        heads = f"{config.num_attention_heads} heads of {config.head_dim}, {config.num_key_value_heads} for keys"
        return f"{heads}, boundaries {list(config.aux_layers)}"

    yield _attempted("the drafter has a shape that engines load", shapes)
    if configs:
        yield _served(module, configs[0], hf_config)
    yield from _tokenizer(source.load_tokenizer(), data)


def _attempted(what: str, attempt: Callable[[], str]) -> Finding:
    """Sound, with what the attempt returns as its remark; faulty if it raises ValueError."""
    try:
        remark = attempt()
    except ValueError as error:
        return Finding(what, CheckResult.FAULTY, note=str(error))
    return Finding(what, CheckResult.SOUND, note=remark)


def _served(module: DrafterModule, config: DrafterConfig, hf_config: Any) -> Finding:
    """Whether an engine will serve the drafter, and what the others lack."""
    what = "an engine will serve the drafter"
    try:
        module.target_source.servable()
    except NotServable as error:
        return unchecked(what, str(error))
    subject = planned_subject(config, hf_config, module.train_embed, module.train_head)
    reasons = unserved(subject)
    remarks = [f"{engine} will not: {text}" for engine, text in reasons.items()]
    if kernels := missing_kernels(config):
        remarks.append(kernels)
    if served(reasons):
        return Finding(what, CheckResult.SOUND, note="; ".join(remarks))
    remarks.append("it can be trained and evaluated here alone")
    return Finding(what, CheckResult.FAULTY, note="; ".join(remarks))


def _tokenizer(tokenizer: Any, data: TokenData) -> Findings:
    """A template for conversations, and a first token that is added."""
    if isinstance(data, ChatData):

        def template() -> str:
            template_of(tokenizer)
            return ""

        yield _attempted("the tokenizer has a chat template that writes conversations", template)
    bos = tokenizer.bos_token
    if bos is None or not isinstance(data, ChatData | TextData):
        return
    what = f"texts begin with the BOS token {bos}, which the tokenizer names"
    if isinstance(data, ChatData):
        source = str(tokenizer.chat_template)
        added = "bos_token" in source or bos in source
        where = "chat template writes"
    else:
        added = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        where = "post-processor adds"
    if added:
        yield Finding(what, CheckResult.SOUND)
        return
    yield unchecked(
        what,
        f"no {where} it: if the model was trained with it, mend the tokenizer (add_bos_token, or its template), since "
        "engines begin texts as this tokenizer does",
    )
