"""Acceptance length during training: decode a few held-out prompts whenever the drafter is validated.

Legend: G growths, P prompts, A accepted drafts of a pass (0 to the deepest growth's depth).
"""

import copy
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from specdec.data import TokenData
from specdec.decoding import Growth, SpeculativeDecoder, check_length, parse_growth
from specdec.drafter import Drafter
from specdec.evaluation.beginnings import SHORTEST, beginnings
from specdec.evaluation.prompts import Conversation, load_prompts
from specdec.evaluation.record import Answer
from specdec.evaluation.statistics import acceptance_length, accepted_per_position
from specdec.target import Target
from specdec.training.module import DrafterModule

log = logging.getLogger(__name__)


class AcceptanceLength(pl.Callback):
    """Decodes greedily with the drafter as it stands and logs what was accepted, bonus token included.

    Logged are ``val/acceptance_length``, its 95 % interval over prompts ``..._low`` and ``..._high``, and
    ``val/accepted_at_k``, the share of target passes that accepted at least k drafts; with several growths each name
    ends in its growth's. Weights, gradients and random state of the training are left alone; several processes
    share the prompts.

    Args:
        prompts: files as ``specdec evaluate`` reads them, of which first turns are used, or ``validation``: how the
            validation documents begin.
        growths: what is decoded with: ``chain``, ``tree``, ``chain:depth=3``, ``tree:depth=6,top_k=10,nodes=59``.
        max_new_tokens: tokens per answer.
        count: prompts at most.
        prompt_tokens: length of a prompt cut from plain text; a conversation is cut where its first answer begins.
        every_n_validations: decode at every n-th validation of a fit; 0 never decodes.

    Raises:
        ValueError: a number is out of range, a growth is unknown or named twice, or a prompts file is wrong.
    """

    def __init__(
        self,
        prompts: str | list[str] = "validation",
        growths: str | list[str] = "chain:depth=5",
        max_new_tokens: int = 64,
        count: int = 8,
        prompt_tokens: int = 64,
        every_n_validations: int = 1,
    ) -> None:
        names = [growths] if isinstance(growths, str) else growths
        self.growths = {re.sub(r"\W+", "_", name): parse_growth(name) for name in names}
        if not self.growths or len(self.growths) < len(names):
            raise ValueError(f"acceptance.growths is {names}: name at least one, and each once")
        if min(max_new_tokens, count) < 1 or prompt_tokens < SHORTEST or every_n_validations < 0:
            raise ValueError(
                f"acceptance: max_new_tokens {max_new_tokens} and count {count} must be at least 1, prompt_tokens "
                f"{prompt_tokens} at least {SHORTEST}, every_n_validations {every_n_validations} 0 or more"
            )
        files = [prompts] if isinstance(prompts, str) else prompts
        self.prompts = None if files == ["validation"] else load_prompts(files, count)
        self.max_new_tokens, self.count, self.prompt_tokens = max_new_tokens, count, prompt_tokens
        self.every_n_validations = every_n_validations
        self._validations = 0
        self._ids: list[list[int]] | None = None  # the prompts as tokens
        self._told = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find what is wrong before anything is trained."""
        if self.every_n_validations and trainer.enable_validation:
            self._prepare(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Decode and log, at the validation's first batch: there averaged weights are in place, at its end no more."""
        if batch_idx or dataloader_idx or trainer.sanity_checking or not self.every_n_validations:
            return
        self._validations += 1
        if trainer.state.fn == TrainerFn.FITTING and self._validations % self.every_n_validations:
            return
        prompts = self._prepare(trainer, pl_module)
        assert isinstance(pl_module, DrafterModule) and pl_module.drafter is not None
        begin = time.perf_counter()
        drafter = decoding_copy(pl_module.drafter, pl_module.target)
        growths = list(self.growths.values())
        mine = range(trainer.global_rank, len(prompts), trainer.world_size)
        counts_GPA = decode(pl_module.target, drafter, growths, prompts, mine, self.max_new_tokens)
        counts_GPA = trainer.strategy.reduce(counts_GPA.to(pl_module.device), reduce_op="sum").cpu()
        for (name, growth), counts_PA in zip(self.growths.items(), counts_GPA, strict=True):
            found = figures(growth, counts_PA)
            end = f"_{name}" if len(self.growths) > 1 else ""
            pl_module.log_dict({f"val/{key}{end}": value for key, value in found.items()}, sync_dist=True, batch_size=1)
        if trainer.is_global_zero and not self._told:
            self._told = True
            seconds = time.perf_counter() - begin
            log.info("acceptance length of %d prompts: %.1f s per validation", len(prompts), seconds)

    def _prepare(self, trainer: pl.Trainer, module: pl.LightningModule) -> list[list[int]]:
        """The prompts as tokens, made once.

        Raises:
            ValueError: there is no prompt, or one or a growth does not fit target or drafter.
        """
        if self._ids is not None:
            return self._ids
        assert isinstance(module, DrafterModule) and module.drafter is not None
        for growth in self.growths.values():
            growth.check(module.drafter.config.draft_vocab_size)
        if self.prompts is None:
            data: TokenData = trainer.datamodule  # type: ignore[attr-defined]
            room = module.target.config.max_position_embeddings - self.max_new_tokens
            self._ids = beginnings(data.splits.validation, self.count, self.prompt_tokens, room)
            return self._ids
        made: list[list[int]] = []
        for prompt in self.prompts:
            ids = Conversation(prompt, module.tokenizer).next_ids()
            assert ids is not None
            try:
                check_length(module.target, ids, self.max_new_tokens)
            except ValueError as error:
                raise ValueError(f"acceptance.prompts: prompt {prompt.prompt_id}: {error}") from error
            made.append(ids)
        self._ids = made
        return made


def decoding_copy(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with its present weights and mode, in the target's dtype and on its device."""
    return copy.deepcopy(drafter).requires_grad_(False).to(device=target.device, dtype=target.dtype)


def decode(
    target: Target,
    drafter: Drafter,
    growths: Sequence[Growth],
    prompts: Sequence[list[int]],
    chosen: Sequence[int],
    max_new_tokens: int,
) -> Tensor:
    """How many target passes accepted A drafts, (G, P, A) int64; zero for prompts that are not ``chosen``."""
    counts_GPA = torch.zeros(len(growths), len(prompts), 1 + max(growth.depth for growth in growths), dtype=torch.int64)
    for counts_PA, growth in zip(counts_GPA, growths, strict=True):
        decoder = SpeculativeDecoder(target, drafter, growth)
        for number in chosen:
            accepted = decoder.generate(prompts[number], max_new_tokens, target.eos_token_ids).accepted
            counts_PA[number] = torch.bincount(torch.tensor(accepted, dtype=torch.int64), minlength=counts_PA.shape[1])
    return counts_GPA


def figures(growth: Growth, counts_PA: Tensor) -> dict[str, float]:
    """What is logged of one growth; nothing when every answer ended before its first target pass."""
    answers = []
    for number, counts_A in enumerate(counts_PA.tolist()):
        accepted = tuple(drafts for drafts, times in enumerate(counts_A) for _ in range(times))
        drafted = (growth.depth,) * len(accepted)
        answers.append(Answer(str(number), None, sum(accepted) + len(accepted), accepted, drafted, 0.0, 0.0, 0, None))
    if not counts_PA.any():
        log.warning("no acceptance length: the target ended every answer at its first token")
        return {}
    interval = acceptance_length(answers)
    out = {"acceptance_length": interval.mean}
    if interval.low is not None and interval.high is not None:
        out |= {"acceptance_length_low": interval.low, "acceptance_length_high": interval.high}
    return out | {f"accepted_at_{k}": share for k, share in enumerate(accepted_per_position(answers).joint, start=1)}
