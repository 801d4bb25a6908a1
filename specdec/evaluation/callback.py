"""Acceptance length during training: a few held-out prompts are decoded whenever the drafter is validated.

Legend: T tokens of a row.
"""

import copy
import logging
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from specdec.data import Batch
from specdec.decoding import SpeculativeDecoder, parse_shape
from specdec.drafter import Drafter
from specdec.evaluation.metrics import Answer, acceptance_length, accepted_per_position
from specdec.evaluation.prompts import PromptConversation, Skipped, load_prompts, next_ids
from specdec.target import Target
from specdec.training.distributed import whole
from specdec.training.module import DrafterModule

log = logging.getLogger(__name__)

SHORTEST = 8  # tokens of a prompt that is cut from a text

FixedPrompts = list[tuple[str, list[int]]]
"""Ids and tokens of prompts."""


class ValidationCallback(pl.Callback):
    """Base of callbacks that look at a drafter on a few fixed prompts whenever it is validated.

    Args:
        prompts: and what follows it, as of :class:`AcceptanceLength`.
        behind: tokens behind an answer that the target's positions have to hold too.

    Raises:
        ValueError: a number is out of range, or a prompts file is wrong.
    """

    who: ClassVar[str]
    """Whose arguments messages name."""

    def __init__(
        self, prompts: str | list[str], max_new_tokens: int, count: int, prompt_tokens: int, every_n_validations: int,
        behind: int = 0,
    ) -> None:  # fmt: skip
        if min(max_new_tokens, count) < 1 or prompt_tokens < SHORTEST or every_n_validations < 0:
            raise ValueError(
                f"{self.who}: max_new_tokens {max_new_tokens} and count {count} must be at least 1, prompt_tokens "
                f"{prompt_tokens} at least {SHORTEST}, every_n_validations {every_n_validations} 0 or more"
            )
        files = [prompts] if isinstance(prompts, str) else prompts
        self.prompts = None if files == ["validation"] else load_prompts(files, count)
        self.max_new_tokens, self.count, self.prompt_tokens = max_new_tokens, count, prompt_tokens
        self.every_n_validations, self.behind = every_n_validations, behind
        self._validations = 0
        self._asked: FixedPrompts | None = None

    def look(self, trainer: pl.Trainer, module: DrafterModule, asked: FixedPrompts) -> None:
        """Measure with the drafter as it stands, on every process, and log what was found."""
        raise TypeError(f"{type(self).__name__} must say what it looks at")

    def prepare(self, trainer: pl.Trainer, module: DrafterModule) -> FixedPrompts:
        """The prompts, made once; ValueError if there is none, or one does not fit the target."""
        tokens = self.max_new_tokens + self.behind
        if self._asked is None and self.prompts is None:
            rows: Batch = trainer.datamodule.splits.validation  # type: ignore[attr-defined]
            room = module.target.config.max_position_embeddings - tokens
            found = document_prompts(rows, self.count, self.prompt_tokens, room, self.who)
            self._asked = [(f"validation-{number}", ids) for number, ids in enumerate(found)]
        elif self._asked is None:
            self._asked = []
            for prompt in self.prompts or []:
                ids = next_ids(PromptConversation(prompt, module.tokenizer), module.target, tokens)
                if isinstance(ids, Skipped):
                    raise ValueError(f"{self.who}.prompts: prompt {prompt.prompt_id}: {ids.reason}")
                self._asked.append((prompt.prompt_id, ids or []))
        return self._asked

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Look, at the validation's first batch: there averaged weights are in place, at its end no more."""
        if batch_idx or dataloader_idx or trainer.sanity_checking or not self.every_n_validations:
            return
        self._validations += 1
        if trainer.state.fn == TrainerFn.FITTING and self._validations % self.every_n_validations:
            return
        assert isinstance(pl_module, DrafterModule)
        self.look(trainer, pl_module, self.prepare(trainer, pl_module))


class AcceptanceLength(ValidationCallback):
    """Decodes greedily with the drafter as it stands and logs what was accepted, bonus token included.

    Logged are ``val/acceptance_length``, its 95 % interval over prompts ``..._low`` and ``..._high``, and
    ``val/accepted_at_k``, the share of target passes that accepted at least k drafts; with several shapes each name
    ends in its shape's. Weights, gradients and random state of the training are left alone; several processes
    share the prompts.

    Args:
        prompts: files or Hub data as ``specdec evaluate`` reads them, of which first turns are used, or
            ``validation``: how the validation documents begin.
        shapes: draft shapes: ``chain``, ``tree``, ``static``, with parameters as ``chain:depth=3``,
            ``tree:depth=6,top_k=10,nodes=59``.
        max_new_tokens: tokens per answer.
        count: prompts at most.
        prompt_tokens: length of a prompt cut from plain text; a conversation is cut where its first answer begins.
        every_n_validations: decode at every n-th validation of a fit; 0 never decodes.

    Raises:
        ValueError: a number is out of range, a shape is unknown or named twice, or a prompts file is wrong.
    """

    who = "acceptance"

    def __init__(
        self,
        prompts: str | list[str] = "validation",
        shapes: str | list[str] = "chain:depth=5",
        max_new_tokens: int = 64,
        count: int = 8,
        prompt_tokens: int = 64,
        every_n_validations: int = 1,
    ) -> None:
        names = [shapes] if isinstance(shapes, str) else shapes
        self.shapes = {re.sub(r"\W+", "_", name): parse_shape(name) for name in names}
        if not self.shapes or len(self.shapes) < len(names):
            raise ValueError(f"acceptance.shapes is {names}: name at least one, and each once")
        super().__init__(prompts, max_new_tokens, count, prompt_tokens, every_n_validations)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find what is wrong (ValueError) before anything is trained."""
        assert isinstance(pl_module, DrafterModule)
        if self.every_n_validations and trainer.enable_validation:
            assert pl_module.drafter is not None
            for shape in self.shapes.values():
                shape.check(pl_module.drafter.config.draft_vocab_size)
            self.prepare(trainer, pl_module)

    def look(self, trainer: pl.Trainer, module: DrafterModule, asked: FixedPrompts) -> None:
        """Decode this process's share of the prompts with every shape, and log."""
        assert module.drafter is not None
        drafter, target = decoding_copy(module.drafter, module.target), module.target
        for name, shape in self.shapes.items():
            decoder = SpeculativeDecoder(target, drafter, shape)
            answers = []
            for number in range(trainer.global_rank, len(asked), trainer.world_size):
                made = decoder.generate(asked[number][1], self.max_new_tokens, target.eos_token_ids)
                answer = Answer(str(number), None, len(made.ids), made.accepted, made.drafted, made.seconds, 0, 0, None)
                answers.append(answer)
            end = f"_{name}" if len(self.shapes) > 1 else ""
            found = {f"val/{key}{end}": value for key, value in logged_figures(of_all_processes(answers)).items()}
            module.log_dict(found, sync_dist=True, batch_size=1)


def decoding_copy(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with its present weights and mode, in the target's dtype and on its device; of all processes."""
    return copy.deepcopy(whole(drafter)).requires_grad_(False).to(device=target.device, dtype=target.dtype)


def of_all_processes(answers: list[Answer]) -> list[Answer]:
    """The answers of every process, in the same order on each; all have to ask, those without an answer too."""
    if not torch.distributed.is_initialized():
        return answers
    shares: list[list[Answer]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(shares, answers)
    return [answer for share in shares for answer in share]


def logged_figures(answers: Sequence[Answer]) -> dict[str, float]:
    """What is logged of one shape; nothing when every answer ended before its first target pass."""
    length, joint = acceptance_length(answers), accepted_per_position(answers)["joint"]
    if length is None:
        log.warning("no acceptance length: the target ended every answer at its first token")
        return {}
    out = {"acceptance_length": length.mean}
    if length.low is not None and length.high is not None:
        out |= {"acceptance_length_low": length.low, "acceptance_length_high": length.high}
    return out | {f"accepted_at_{k}": share for k, share in enumerate(joint, start=1)}


def document_prompts(
    rows: Batch, count: int, prompt_tokens: int, room: int, who: str = "acceptance"
) -> list[list[int]]:
    """The first ``count`` prompts that packed documents make, in their order; ValueError if none makes one.

    A document that is supervised from its first token on is text: its first ``prompt_tokens`` tokens, at most half of
    it, are the prompt. Any other is a conversation: all that stands before the first supervised token. No prompt is
    longer than ``room``: a text's is cut, a conversation is left out.
    """
    out: list[list[int]] = []
    for ids_T, mask_T, documents_T in zip(*rows, strict=True):
        for number in range(int(documents_T.max()) + 1):
            inside_T = documents_T == number
            ids, mask = ids_T[inside_T].tolist(), mask_T[inside_T].tolist()
            if True not in mask:
                continue
            length, least = mask.index(True), 1
            if length == 0:
                length, least = min(prompt_tokens, len(ids) // 2, room), SHORTEST
            if least <= length <= room:
                out.append(ids[:length])
            if len(out) == count:
                return out
    if not out:
        raise ValueError(
            f"no validation document can be made a prompt: texts of at least {2 * SHORTEST} tokens are needed, or "
            f"conversations whose first answer begins within {room} tokens, which is what the target's positions leave "
            f"beside {who}.max_new_tokens; or give {who}.prompts a file"
        )
    return out
