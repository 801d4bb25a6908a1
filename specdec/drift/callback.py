"""Attention drift during training: a few chains are drafted and looked into whenever the drafter is validated."""

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch

from specdec.drafter import Drafter, DrafterConfig
from specdec.drift.measure import Sums, measure
from specdec.drift.results import Document, document, measured, nothing
from specdec.drift.settings import Settings
from specdec.drift.summary import figures, summary
from specdec.drift.texts import OwnText, own_texts
from specdec.evaluation.beginnings import SHORTEST
from specdec.evaluation.callback import decoding_copy
from specdec.evaluation.skipping import Skipped
from specdec.evaluation.while_validating import Asked, WhileValidating
from specdec.files import write_json
from specdec.provenance import provenance
from specdec.training.ema import drafter_to_keep
from specdec.training.module import DrafterModule


class AttentionDrift(WhileValidating):
    """Measures what ``specdec drift`` measures with the drafter as it stands, and logs the summary's means.

    Logged are ``drift/state_rms_growth``, ``drift/sink_mass_first``, ``drift/sink_mass_last`` and the other figures of
    docs/drift.md. When training ends, ``drift.json``, ``drift.png`` and ``drift.pdf`` of the drafter that is kept are
    written into the run directory. Weights, gradients, modes and random state of the training are left alone; several
    processes share the prompts.

    Args:
        prompts: files or Hub data as ``specdec evaluate`` reads them, of which first turns are used, or
            ``validation``: how the validation documents begin.
        max_new_tokens: tokens of the target's answers, which chains begin at places of.
        count: prompts at most.
        prompt_tokens: length of a prompt cut from plain text; a conversation is cut where its first answer begins.
        every_n_validations: measure at every n-th validation of a fit; 0 measures at the end of training alone.
        depths: draft steps; may exceed the trained ones.
        anchors: chains for each prompt.
        sink_tokens: first positions of the text that count as the sink.
        recent: committed tokens that count as recent.

    Raises:
        ValueError: a number is out of range, or a prompts file is wrong.
    """

    what, who, without = "attention drift", "AttentionDrift", "leave AttentionDrift out"

    def __init__(
        self,
        prompts: str | list[str] = "validation",
        max_new_tokens: int = 64,
        count: int = 8,
        prompt_tokens: int = 64,
        every_n_validations: int = 1,
        depths: int = 8,
        anchors: int = 8,
        sink_tokens: int = 1,
        recent: int = 16,
    ) -> None:
        self.settings = Settings(depths, anchors, sink_tokens, recent)
        self.settings.check_length(max_new_tokens)
        if count < 1 or prompt_tokens < SHORTEST or every_n_validations < 0:
            raise ValueError(
                f"AttentionDrift: count {count} must be at least 1, prompt_tokens {prompt_tokens} at least {SHORTEST}, "
                f"every_n_validations {every_n_validations} 0 or more"
            )
        super().__init__(prompts, max_new_tokens, count, prompt_tokens, every_n_validations, behind=depths)
        self._texts: dict[int, OwnText] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask the target for its answers, and find what is wrong before anything is trained.

        Raises:
            ValueError: there is no prompt, one does not fit the target, or no answer is long enough.
        """
        assert isinstance(pl_module, DrafterModule)
        depths = self.settings.depths
        anchors = [text.anchors(1, depths) for text in self._answered(trainer, pl_module).values()]
        usable = torch.tensor(float(sum(map(len, anchors))), device=pl_module.device)
        if not trainer.strategy.reduce(usable, reduce_op="sum"):
            raise ValueError(
                f"AttentionDrift: no answer of the target is long enough for a chain of {depths} tokens: set fewer "
                "depths, or other prompts"
            )

    def look(self, trainer: pl.Trainer, module: DrafterModule, asked: Asked) -> None:
        """Measure, and log the summary's means."""
        assert module.drafter is not None
        found = self._measured(trainer, module, module.drafter)
        one = document(*found, module.ttt_steps, self.settings.depths, told=nothing)  # means alone are logged
        every = figures(one["depths"], one["trained_depth"])
        means = {each.name: measured(each.sums(one).sum(0, keepdims=True), each.of)["mean"] for each in every}
        logged = {f"drift/{name}": mean for name, mean in means.items() if mean is not None}
        module.log_dict(logged, sync_dist=True, batch_size=1)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the drafter that is kept, and write what was found into the run directory."""
        assert isinstance(pl_module, DrafterModule)
        drafter = drafter_to_keep(trainer, pl_module)
        if drafter is None or trainer.global_step == 0 or trainer.interrupted:
            return
        found = self._measured(trainer, pl_module, drafter)
        if trainer.is_global_zero:
            _, names, sums = found
            why = f"its answer is too short for a chain of {self.settings.depths} tokens"
            short = [Skipped(name, why)._asdict() for name, each in zip(names, sums, strict=True) if not each.chains]
            one = {**document(*found, pl_module.ttt_steps, self.settings.depths), "skipped": short}
            self._write(Path(trainer.default_root_dir), one, drafter, trainer, pl_module)

    def _write(self, run: Path, one: Document, drafter: Drafter, trainer: pl.Trainer, module: DrafterModule) -> None:
        from specdec.drift.plot import plot  # matplotlib takes its time, and other runs do without it

        label = run.name or "drafter"
        plot([(label, one)], run / "drift")
        told = {"label": label, "directory": str(run / "drafter"), **drafter.config.to_json()}
        settings = {**vars(self.settings), "max_new_tokens": self.max_new_tokens, "steps": trainer.global_step}
        context = {"target": dict(module.target.identity), "settings": settings, "provenance": provenance()}
        write_json(run / "drift.json", {**one, "drafter": told, "summary": summary(one), **context})

    def _measured(
        self, trainer: pl.Trainer, module: DrafterModule, drafter: Drafter
    ) -> tuple[DrafterConfig, list[str], Sequence[Sums]]:
        """The drafter's config, the prompts' ids and their sums, on every process; all have to ask."""
        target, texts = module.target, self._answered(trainer, module)
        copy = decoding_copy(drafter, target).eval()
        own = {number: measure(target, copy, text, self.settings) for number, text in texts.items()}
        asked, empty = self.prepare(trainer, module), Sums.empty(copy, self.settings.depths)
        sums = [own.get(number, empty) for number in range(len(asked))]
        if trainer.world_size > 1:
            sums = _shared(trainer, module, sums)
        return copy.config, [name for name, _ in asked], sums

    def _answered(self, trainer: pl.Trainer, module: DrafterModule) -> dict[int, OwnText]:
        """This process's share of the prompts by their numbers, with the target's answers, made once."""
        if self._texts is None:
            asked = self.prepare(trainer, module)
            mine = range(trainer.global_rank, len(asked), trainer.world_size)
            texts = own_texts(module.target, [asked[number] for number in mine], self.max_new_tokens)
            self._texts = dict(zip(mine, texts, strict=True))
        return self._texts


def _shared(trainer: pl.Trainer, module: DrafterModule, sums: Sequence[Sums]) -> list[Sums]:
    """Every process's share; a prompt is of one process, and zero on the others."""
    flat = torch.stack([torch.cat([part.flatten() for part in one]) for one in sums]).to(module.device)
    whole = trainer.strategy.reduce(flat, reduce_op="sum").cpu()
    sizes = [part.numel() for part in sums[0]]
    return [
        Sums(*(piece.view_as(part) for piece, part in zip(row.split(sizes), sums[0], strict=True))) for row in whole
    ]
