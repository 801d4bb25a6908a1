"""Acceptance length during training: a few held-out prompts are decoded whenever the drafter is validated.

Legend: T tokens of a row.
"""

import copy
import logging
import time
from collections.abc import Sequence
from typing import Annotated, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from specdec.data import Batch
from specdec.decoding import Request, SpeculativeDecoder, parse_shape
from specdec.drafter import Drafter
from specdec.evaluation.benchmark import answer_of
from specdec.evaluation.metrics import Answer, acceptance_length, accepted_per_position
from specdec.evaluation.prompts import Prompt
from specdec.report.tables import format_interval
from specdec.target import Target
from specdec.training.callbacks import RunRecord
from specdec.training.distributed import unsharded
from specdec.training.module import DrafterModule
from specdec.utils.numbers import (
    MOST_TOKENS,
    PositiveShare,
    Range,
    Side,
    Tokens,
    Whole,
    check_numbers,
)

log = logging.getLogger(__name__)

SHORTEST = 8  # tokens of a prompt that is cut from a text


class AcceptanceLength(pl.Callback):
    """Decodes greedily with the drafter as it stands and logs what was accepted, bonus token included.

    Logged are ``val/acceptance_length``, its 95 % interval over prompts ``..._low`` and ``..._high``, and
    ``val/accepted_at_k``, the share of target passes that accepted at least k drafts. Prompts are how the validation
    documents begin; several processes share them. Weights, gradients and random state of the training are left alone.
    The drafter with the highest acceptance length so far is kept in the run's ``drafter_best/``, averaged where the
    average is validated.

    Decoding takes ``share`` of the training time at most: a validation is passed over, and the log says so, while this
    decoding and the run's last one would take more. The first tells what one takes. The last validation of a run whose
    length is known is never passed over, so that a very short run may spend more. ``val/acceptance_seconds`` is what
    was spent.

    Args:
        shape: the draft shape: ``chain``, ``tree``, ``static``, with parameters as ``chain:depth=3``,
            ``tree:depth=6,top_k=10,nodes=59``.
        max_new_tokens: tokens per answer.
        count: prompts at most.
        prompt_tokens: length of a prompt cut from plain text; a conversation is cut where its first answer begins.
        every_n_validations: decode at every n-th validation of a fit; 0 never decodes.
        share: of the training time that decoding may take, as 0.05; 1 decodes at every n-th validation, come what may.

    Raises:
        ValueError: a number is out of range, or the shape is unknown.
    """

    def __init__(
        self,
        shape: str = "chain:depth=5",
        max_new_tokens: Tokens = 64,
        count: Side = 8,
        prompt_tokens: Annotated[int, Range(SHORTEST, MOST_TOKENS)] = 64,
        every_n_validations: Whole = 1,
        share: PositiveShare = 0.05,
    ) -> None:
        check_numbers(AcceptanceLength.__init__, locals(), "acceptance.")
        self._decoded = {
            "shape": shape,
            "max_new_tokens": max_new_tokens,
            "prompt_tokens": prompt_tokens,
            "count": count,
        }
        self.shape = parse_shape(shape)
        self.max_new_tokens = max_new_tokens
        self.count = count
        self.prompt_tokens = prompt_tokens
        self.every_n_validations = every_n_validations
        self.share = share
        self.clock = time.monotonic
        # of the whole run, resumed or not; seconds
        self._seen: dict[str, Any] = {
            "validations": 0, "step": 0, "decodings": 0, "spent": 0.0, "last": 0.0, "trained": 0.0, "found": None,
        }  # fmt: skip
        self._since: float | None = None  # when training went on, in a fit
        self._passed_over = False  # at the validation before
        self._prompts: list[list[int]] = []  # made at the first look

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find what is wrong (ValueError) before anything is trained."""
        assert isinstance(pl_module, DrafterModule)
        if self.every_n_validations and trainer.enable_validation:
            assert pl_module.drafter is not None
            if not pl_module.target.whole:
                raise ValueError(
                    "model.target.parts: acceptance takes the whole target: set acceptance.every_n_validations 0"
                )
            try:
                self.shape.check(pl_module.drafter.config)
            except ValueError as error:
                raise ValueError(f"acceptance.shape: {error}") from error
            self._prepare(trainer, pl_module)

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Decode this process's share of the prompts at the validation's first batch, and log: there averaged weights
        are in place, at its end no more."""
        if batch_idx or dataloader_idx or trainer.sanity_checking or not self.every_n_validations:
            return
        assert isinstance(pl_module, DrafterModule)
        if trainer.state.fn == TrainerFn.FITTING:
            self._seen["validations"] += 1
            due = self._seen["validations"] % self.every_n_validations == 0
            # the first process's clock
            if not trainer.strategy.broadcast(due and self._affords(trainer, pl_module)):
                return
        if trainer.is_global_zero and not self._seen["decodings"]:
            log.info("decoding up to %d prompts for val/acceptance_length", self.count)
        start = self.clock()
        figures = logged_figures(of_all_processes(self._answers(trainer, pl_module)))
        if trainer.state.fn == TrainerFn.FITTING and "acceptance_length" in figures:
            self._choose(trainer, pl_module, figures)
        seconds = self.clock() - start
        if self._since is not None:
            self._since += seconds  # no part of the training time
        self._seen["decodings"] += 1
        self._seen["spent"] += seconds
        self._seen["last"] = seconds
        if trainer.is_global_zero and "acceptance_length" in figures:
            length = format_interval(self._length(figures), "{:.2f}".format)
            log.info(
                "step %d: val/acceptance_length %s (%.1f s)", trainer.global_step, length, seconds
            )
        figures["acceptance_seconds"] = self._seen["spent"]
        pl_module.log_dict(
            {f"val/{key}": value for key, value in figures.items()}, sync_dist=True, batch_size=1
        )

    @staticmethod
    def _length(figures: dict[str, float]) -> dict[str, float | None]:
        """Return the acceptance length among logged figures with its interval, as reports write it."""
        ends = {end: figures.get(f"acceptance_length_{end}") for end in ("low", "high")}
        return {"mean": figures["acceptance_length"], **ends}

    def _choose(
        self, trainer: pl.Trainer, module: DrafterModule, figures: dict[str, float]
    ) -> None:
        """Remember the acceptance length, and keep the drafter if it is the best so far of a run of ``specdec fit``."""
        decoded = {
            "step": trainer.global_step,
            **self._length(figures),
            "decoded": self._decoded,
        }
        self._seen["found"] = decoded
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunRecord):
                callback.keep_best(module, decoded)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last acceptance length of the run, as :meth:`RunRecord.keep_best` takes it; None: nothing was decoded."""
        return self._seen["found"]

    def _answers(self, trainer: pl.Trainer, module: DrafterModule) -> list[Answer]:
        """This process's share, decoded as one batch, of no more tokens than one of the training."""
        assert module.drafter is not None
        self._prepare(trainer, module)
        target = module.target
        data = trainer.datamodule  # type: ignore[attr-defined]
        mine = range(trainer.global_rank, len(self._prompts), trainer.world_size)
        requests = [Request(self._prompts[number], self.max_new_tokens) for number in mine]
        longest = (
            max((len(request.prompt) for request in requests), default=0) + self.max_new_tokens
        )
        batch = max(
            1, min(len(requests), target.most_texts, data.batch_size * data.seq_len // longest)
        )
        decoder = SpeculativeDecoder(
            target, decoding_copy(module.drafter, target), self.shape, batch=batch
        )
        generations = sorted(decoder.generate_all(requests, target.eos_token_ids))
        return [
            answer_of(Prompt(str(mine[n]), None, None, None, ""), generation)
            for n, generation in generations
        ]

    def _affords(self, trainer: pl.Trainer, module: DrafterModule) -> bool:
        """Whether to decode: within the share, or for the last time; logs the first of those that are passed over."""
        seen = self._seen
        step = trainer.global_step
        between, seen["step"] = step - seen["step"], step
        is_last = (length := module.length) is not None and step + between > length
        trained = self._trained()
        # this one, and the last of the run
        would = (seen["spent"] + 2 * seen["last"]) / max(trained, 1e-9)
        passed_over = self._passed_over
        may_be = seen["decodings"] > 0 and not is_last and self.share < 1
        self._passed_over = may_be and would > self.share
        if self._passed_over and not passed_over:
            log.info(
                "no acceptance length at step %d, nor until it is affordable: decoding takes %.1f s, and would come to "
                "%.0f %% of the %.0f s of training, more than acceptance.share (%.0f %%)",
                step, seen["last"], 100 * would, trained, 100 * self.share,
            )  # fmt: skip
        return not self._passed_over

    def _trained(self) -> float:
        return self._seen["trained"] + (0.0 if self._since is None else self.clock() - self._since)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._since = self.clock()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what decoding took."""
        if self._seen["decodings"]:
            seen = self._seen
            trained = self._trained()
            log.info(
                "acceptance lengths at %d of %d validations took %.1f s, %.1f %% of the training time",
                seen["decodings"], seen["validations"], seen["spent"], 100 * seen["spent"] / max(trained, 1e-9),
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and times with which a resumed run continues."""
        return {**self._seen, "trained": self._trained()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the counts and times of a checkpoint."""
        self._seen |= state_dict

    def _prepare(self, trainer: pl.Trainer, module: DrafterModule) -> None:
        """Make the prompts, once; ValueError if there is none."""
        if not self._prompts:
            rows: Batch = trainer.datamodule.splits.validation  # type: ignore[attr-defined]
            room = module.target.config.max_position_embeddings - self.max_new_tokens
            prefix = trainer.datamodule.prefix  # type: ignore[attr-defined]
            self._prompts = document_prompts(rows, self.count, self.prompt_tokens, room, prefix)


def decoding_copy(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with its present weights and mode, in the target's dtype and on its device; of all processes."""
    return (
        copy.deepcopy(unsharded(drafter))
        .requires_grad_(False)
        .to(device=target.device, dtype=target.dtype)
    )


def of_all_processes(answers: list[Answer]) -> list[Answer]:
    """The answers of every process, in the same order on each; all have to ask, those without an answer too."""
    if not torch.distributed.is_initialized():
        return answers
    shares: list[list[Answer]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(shares, answers)
    return [answer for share in shares for answer in share]


def logged_figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the figures to log; none when every answer ended before its first target pass."""
    length = acceptance_length(answers)
    joint = accepted_per_position(answers)["joint"]
    if length is None:
        log.warning("no acceptance length: the target ended every answer at its first token")
        return {}
    out = {"acceptance_length": length.mean}
    if length.low is not None and length.high is not None:
        out |= {"acceptance_length_low": length.low, "acceptance_length_high": length.high}
    return out | {f"accepted_at_{k}": share for k, share in enumerate(joint, start=1)}


def best_and_last(best: dict[str, Any], last: dict[str, Any]) -> str:
    """``2.31 [2.10, 2.50] at step 400; last: 2.25 [2.05, 2.45] at step 600``, and whether that difference says much.

    Args:
        best: what the kept drafter was chosen by; see :meth:`RunRecord.keep_best`.
        last: the last one decoded.
    """

    def figure(length: dict[str, Any]) -> str:
        return f"{format_interval(length, '{:.2f}'.format)} at step {length['step']}"

    if best == last:
        return f"{figure(best)}, the last one decoded"
    both = f"{figure(best)}; last: {figure(last)}"
    if best["low"] is None or last["high"] is None:
        return f"{both}; without intervals, so the choice may be noise"
    if best["low"] <= last["high"]:
        return f"{both}; the intervals overlap: the choice is within the noise"
    return f"{both}; the intervals are apart"


def document_prompts(
    rows: Batch, count: int, prompt_tokens: int, room: int, prefix: Sequence[int] = ()
) -> list[list[int]]:
    """The first ``count`` prompts that packed documents make, in their order; ValueError if none makes one.

    A document that is supervised from its first token on, or from behind the ``prefix`` of a text, is text: its first
    ``prompt_tokens`` tokens, at most half of it, are the prompt. Any other is a conversation: all that stands before
    the first supervised token. No prompt is longer than ``room``: a text's is cut, a conversation is left out.
    """
    out: list[list[int]] = []
    for ids_T, mask_T, documents_T in zip(*rows, strict=True):
        for number in range(int(documents_T.max()) + 1):
            inside_T = documents_T == number
            ids = ids_T[inside_T].tolist()
            mask = mask_T[inside_T].tolist()
            if True not in mask:
                continue
            length = mask.index(True)
            shortest = 1
            if length == 0 or ids[:length] == list(prefix):  # a text
                length = min(prompt_tokens, len(ids) // 2, room)
                shortest = SHORTEST
            if shortest <= length <= room:
                out.append(ids[:length])
            if len(out) == count:
                return out
    if not out:
        raise ValueError(
            f"no validation document can be made a prompt: texts of at least {2 * SHORTEST} tokens are needed, or "
            f"conversations whose first answer begins within {room} tokens, which is what the target's positions leave "
            "next to acceptance.max_new_tokens"
        )
    return out
