"""What looks at a drafter on a few fixed prompts whenever it is validated."""

import logging
import time
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from specdec.evaluation.fixed_prompts import fixed_prompts
from specdec.evaluation.prompts import load_prompts
from specdec.training.module import DrafterModule

log = logging.getLogger(__name__)

Asked = list[tuple[str, list[int]]]
"""Ids and tokens of prompts."""


class WhileValidating(pl.Callback):
    """Base of the callbacks that look: :meth:`look` measures and logs, on every process.

    Args:
        behind: tokens behind an answer that the target's positions have to hold too.

    Raises:
        ValueError: a prompts file is wrong.
    """

    what: ClassVar[str]
    """What is measured, for the log."""
    who: ClassVar[str]
    """Whose arguments messages name."""
    without: ClassVar[str]
    """How to go on without prompts."""

    def __init__(
        self,
        prompts: str | list[str],
        max_new_tokens: int,
        count: int,
        prompt_tokens: int,
        every_n_validations: int,
        behind: int = 0,
    ) -> None:
        files = [prompts] if isinstance(prompts, str) else prompts
        self.prompts = None if files == ["validation"] else load_prompts(files, count)
        self.max_new_tokens, self.count, self.prompt_tokens = max_new_tokens, count, prompt_tokens
        self.every_n_validations, self.behind = every_n_validations, behind
        self._validations = 0
        self._asked: Asked | None = None
        self._told = False

    def look(self, trainer: pl.Trainer, module: DrafterModule, asked: Asked) -> None:
        """Measure with the drafter as it stands, and log what was found."""
        raise TypeError(f"{type(self).__name__} must say what it looks at")

    def prepare(self, trainer: pl.Trainer, module: DrafterModule) -> Asked:
        """The prompts, made once.

        Raises:
            ValueError: there is no prompt, or one does not fit the target.
        """
        if self._asked is None:
            self._asked = fixed_prompts(
                trainer, module, self.prompts, count=self.count, prompt_tokens=self.prompt_tokens,
                max_new_tokens=self.max_new_tokens + self.behind, who=self.who, without=self.without,
            )  # fmt: skip
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
        asked = self.prepare(trainer, pl_module)
        begin = time.perf_counter()
        self.look(trainer, pl_module, asked)
        if trainer.is_global_zero and not self._told:
            self._told = True
            log.info("%s of %d prompts: %.1f s per validation", self.what, len(asked), time.perf_counter() - begin)
