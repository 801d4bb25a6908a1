"""Acceptance length during training: decode a few held-out prompts whenever the drafter is validated."""

import copy
import logging
import re
from collections.abc import Sequence

import lightning.pytorch as pl
from torchmetrics import MetricCollection

from specdec.decoding import Growth, SpeculativeDecoder, parse_growth
from specdec.drafter import Drafter
from specdec.evaluation.beginnings import SHORTEST
from specdec.evaluation.metrics import decoding_metrics
from specdec.evaluation.record import Answer
from specdec.evaluation.while_validating import Asked, WhileValidating
from specdec.target import Target
from specdec.training.module import DrafterModule
from specdec.training.sharding import whole

log = logging.getLogger(__name__)

LOGGED = ("acceptance_length", "accepted_per_position")


class AcceptanceLength(WhileValidating):
    """Decodes greedily with the drafter as it stands and logs what was accepted, bonus token included.

    Logged are ``val/acceptance_length``, its 95 % interval over prompts ``..._low`` and ``..._high``, and
    ``val/accepted_at_k``, the share of target passes that accepted at least k drafts; with several growths each name
    ends in its growth's. Weights, gradients and random state of the training are left alone; several processes
    share the prompts.

    Args:
        prompts: files or Hub data as ``specdec evaluate`` reads them, of which first turns are used, or
            ``validation``: how the validation documents begin.
        growths: what is decoded with: ``chain``, ``tree``, ``static``, with parameters as ``chain:depth=3``,
            ``tree:depth=6,top_k=10,nodes=59``, ``static:file=PATH``.
        max_new_tokens: tokens per answer.
        count: prompts at most.
        prompt_tokens: length of a prompt cut from plain text; a conversation is cut where its first answer begins.
        every_n_validations: decode at every n-th validation of a fit; 0 never decodes.

    Raises:
        ValueError: a number is out of range, a growth is unknown or named twice, or a prompts file is wrong.
    """

    what, who = "acceptance length", "acceptance"
    without = "acceptance.every_n_validations=0"

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
        super().__init__(prompts, max_new_tokens, count, prompt_tokens, every_n_validations)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find what is wrong before anything is trained."""
        assert isinstance(pl_module, DrafterModule)
        if self.every_n_validations and trainer.enable_validation:
            self.prepare(trainer, pl_module)

    def look(self, trainer: pl.Trainer, module: DrafterModule, asked: Asked) -> None:
        """Decode this process's share of the prompts with every growth, and log."""
        assert module.drafter is not None
        drafter, prompts = decoding_copy(module.drafter, module.target), [ids for _, ids in asked]
        mine = range(trainer.global_rank, len(prompts), trainer.world_size)
        for name, growth in self.growths.items():
            metrics = decoding_metrics(only=LOGGED).to(module.device)
            metrics.update(decode(module.target, drafter, growth, prompts, mine, self.max_new_tokens))
            end = f"_{name}" if len(self.growths) > 1 else ""
            found = {f"val/{key}{end}": value for key, value in figures(metrics).items()}
            module.log_dict(found, sync_dist=True, batch_size=1)

    def prepare(self, trainer: pl.Trainer, module: DrafterModule) -> Asked:
        """The prompts, once the growths are seen to fit.

        Raises:
            ValueError: there is no prompt, or one or a growth does not fit target or drafter.
        """
        if self._asked is None:
            assert module.drafter is not None
            for growth in self.growths.values():
                growth.check(module.drafter.config.draft_vocab_size)
        return super().prepare(trainer, module)


def decoding_copy(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with its present weights and mode, in the target's dtype and on its device; of all processes."""
    return copy.deepcopy(whole(drafter)).requires_grad_(False).to(device=target.device, dtype=target.dtype)


def decode(
    target: Target,
    drafter: Drafter,
    growth: Growth,
    prompts: Sequence[list[int]],
    chosen: Sequence[int],
    max_new_tokens: int,
) -> list[Answer]:
    """Answers to the ``chosen`` prompts, their numbers as ids."""
    decoder = SpeculativeDecoder(target, drafter, growth)
    out = []
    for number in chosen:
        made = decoder.generate(prompts[number], max_new_tokens, target.eos_token_ids)
        out.append(Answer(str(number), None, len(made.ids), made.accepted, made.drafted, made.seconds, 0.0, 0, None))
    return out


def figures(metrics: MetricCollection) -> dict[str, float]:
    """What is logged of one growth; nothing when every answer ended before its first target pass."""
    found = metrics.compute()
    length, positions = (found[name] for name in LOGGED)
    if length is None:
        log.warning("no acceptance length: the target ended every answer at its first token")
        return {}
    out = {"acceptance_length": length.mean}
    if length.low is not None:
        out |= {"acceptance_length_low": length.low, "acceptance_length_high": length.high}
    return out | {f"accepted_at_{k}": share for k, share in enumerate(positions.joint, start=1)}
