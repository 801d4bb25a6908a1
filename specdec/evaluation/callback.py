"""Acceptance length during training: a few held-out prompts are decoded whenever the drafter is validated.

Legend: T tokens of a row.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from specdec.data import Batch
from specdec.decoding import SpeculativeDecoder, parse_shape
from specdec.drafter import Drafter
from specdec.evaluation.metrics import Answer, acceptance_length, accepted_per_position
from specdec.target import Target
from specdec.training.distributed import unsharded
from specdec.training.module import DrafterModule

log = logging.getLogger(__name__)

SHORTEST = 8  # tokens of a prompt that is cut from a text


class AcceptanceLength(pl.Callback):
    """Decodes greedily with the drafter as it stands and logs what was accepted, bonus token included.

    Logged are ``val/acceptance_length``, its 95 % interval over prompts ``..._low`` and ``..._high``, and
    ``val/accepted_at_k``, the share of target passes that accepted at least k drafts. Prompts are how the validation
    documents begin; several processes share them. Weights, gradients and random state of the training are left alone.

    Args:
        shape: the draft shape: ``chain``, ``tree``, ``static``, with parameters as ``chain:depth=3``,
            ``tree:depth=6,top_k=10,nodes=59``.
        max_new_tokens: tokens per answer.
        count: prompts at most.
        prompt_tokens: length of a prompt cut from plain text; a conversation is cut where its first answer begins.
        every_n_validations: decode at every n-th validation of a fit; 0 never decodes.

    Raises:
        ValueError: a number is out of range, or the shape is unknown.
    """

    def __init__(
        self,
        shape: str = "chain:depth=5",
        max_new_tokens: int = 64,
        count: int = 8,
        prompt_tokens: int = 64,
        every_n_validations: int = 1,
    ) -> None:
        if min(max_new_tokens, count) < 1 or prompt_tokens < SHORTEST or every_n_validations < 0:
            raise ValueError(
                f"acceptance: max_new_tokens {max_new_tokens} and count {count} must be at least 1, prompt_tokens "
                f"{prompt_tokens} at least {SHORTEST}, every_n_validations {every_n_validations} 0 or more"
            )
        self.shape, self.max_new_tokens = parse_shape(shape), max_new_tokens
        self.count, self.prompt_tokens, self.every_n_validations = count, prompt_tokens, every_n_validations
        self._validations = 0
        self._prompts: list[list[int]] = []  # made at the first look

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find what is wrong (ValueError) before anything is trained."""
        assert isinstance(pl_module, DrafterModule)
        if self.every_n_validations and trainer.enable_validation:
            assert pl_module.drafter is not None
            self.shape.check(pl_module.drafter.config.draft_vocab_size)
            self._prepare(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Decode this process's share of the prompts at the validation's first batch, and log: there averaged weights
        are in place, at its end no more."""
        if batch_idx or dataloader_idx or trainer.sanity_checking or not self.every_n_validations:
            return
        self._validations += 1
        if trainer.state.fn == TrainerFn.FITTING and self._validations % self.every_n_validations:
            return
        assert isinstance(pl_module, DrafterModule) and pl_module.drafter is not None
        self._prepare(trainer, pl_module)
        target = pl_module.target
        decoder = SpeculativeDecoder(target, decoding_copy(pl_module.drafter, target), self.shape)
        answers = []
        for number in range(trainer.global_rank, len(self._prompts), trainer.world_size):
            made = decoder.generate(self._prompts[number], self.max_new_tokens, target.eos_token_ids)
            answer = Answer(str(number), None, len(made.ids), made.accepted, made.drafted, made.seconds, 0, 0, None)
            answers.append(answer)
        found = logged_figures(of_all_processes(answers))
        pl_module.log_dict({f"val/{key}": value for key, value in found.items()}, sync_dist=True, batch_size=1)

    def _prepare(self, trainer: pl.Trainer, module: DrafterModule) -> None:
        """Make the prompts, once; ValueError if there is none."""
        if not self._prompts:
            rows: Batch = trainer.datamodule.splits.validation  # type: ignore[attr-defined]
            room = module.target.config.max_position_embeddings - self.max_new_tokens
            self._prompts = document_prompts(rows, self.count, self.prompt_tokens, room)


def decoding_copy(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with its present weights and mode, in the target's dtype and on its device; of all processes."""
    return copy.deepcopy(unsharded(drafter)).requires_grad_(False).to(device=target.device, dtype=target.dtype)


def of_all_processes(answers: list[Answer]) -> list[Answer]:
    """The answers of every process, in the same order on each; all have to ask, those without an answer too."""
    if not torch.distributed.is_initialized():
        return answers
    shares: list[list[Answer]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(shares, answers)
    return [answer for share in shares for answer in share]


def logged_figures(answers: Sequence[Answer]) -> dict[str, float]:
    """What is logged; nothing when every answer ended before its first target pass."""
    length, joint = acceptance_length(answers), accepted_per_position(answers)["joint"]
    if length is None:
        log.warning("no acceptance length: the target ended every answer at its first token")
        return {}
    out = {"acceptance_length": length.mean}
    if length.low is not None and length.high is not None:
        out |= {"acceptance_length_low": length.low, "acceptance_length_high": length.high}
    return out | {f"accepted_at_{k}": share for k, share in enumerate(joint, start=1)}


def document_prompts(rows: Batch, count: int, prompt_tokens: int, room: int) -> list[list[int]]:
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
            "beside acceptance.max_new_tokens"
        )
    return out
