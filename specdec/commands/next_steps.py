"""What ``specdec fit`` says at its end: what the run has left, and the commands that come next."""

import contextlib
import dataclasses
import json
import logging
import shlex
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from specdec.evaluation.callback import AcceptanceLength, best_and_last, document_prompts
from specdec.target import TargetSource
from specdec.training.callbacks import BEST, RunRecord
from specdec.training.run_directory import write_run_sums
from specdec.utils.files import write_text
from specdec.utils.imports import flags
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

CLOSING = ("train/loss", "val/loss", "val/acceptance_length")  # figures that a run ends with
PROMPTS = 40
PROMPT_TOKENS = 64


def log_next_steps(
    out: Path, trainer: Trainer, target: TargetSource, prompts: str, is_servable: bool
) -> None:
    """Log a run's last figures, where its drafter lies, and how to evaluate and export it.

    Args:
        out: the run's directory.
        prompts: the file of prompts to evaluate with.
        is_servable: whether an engine serves the drafter, so that it can be exported.
    """
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    figures = [f"{name} {metrics[name]:.3f}" for name in CLOSING if name in metrics]
    drafter = str(out / "drafter")
    arguments = [*_target_arguments(target), "--drafter", drafter, *flags()]
    evaluate = ["specdec", "evaluate", *arguments, "--prompts", prompts]
    command = ["specdec", "export", *arguments, "--out", str(out / "vllm"), "--format", "vllm"]
    export = (
        shlex.join(command) if is_servable else "no engine serves this design (docs/engines.md)"
    )
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    best = next(callback.best for callback in callbacks if isinstance(callback, RunRecord))
    last = next(callback.last for callback in callbacks if isinstance(callback, AcceptanceLength))
    if best is not None and last is not None:
        drafter += (
            f"\n  best drafter   {out / BEST}\n  accepted       best: {best_and_last(best, last)}"
        )
    log.info(
        "%s\n  run directory  %s\n  drafter        %s\n  evaluate it    %s\n  export it      %s",
        ", ".join([f"trained {how_many(trainer.global_step, 'step')}", *figures]), out, drafter,
        shlex.join(evaluate), export,
    )  # fmt: skip


def _target_arguments(target: TargetSource) -> list[str]:
    """Return the options that name a target, and its settings that are no defaults."""
    arguments = ["--target", target.source]
    for field in dataclasses.fields(target)[1:]:
        value = getattr(target, field.name)
        if value != field.default:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            arguments += [f"--target.{field.name}", text]
    return arguments


def write_prompts(out: Path, data: Any, model: Any) -> str:
    """Write how validation documents begin to a file of prompts for ``evaluate``, and return its path.

    Where they make none, a name is returned that stands for the user's own file.
    """
    path = out / "validation_prompts.jsonl"
    rows: list[dict[str, str]] = []
    with contextlib.suppress(ValueError):  # no such documents, no tokenizer
        tokenizer = model.tokenizer
        prompts = document_prompts(
            data.splits.validation, PROMPTS, PROMPT_TOKENS, data.seq_len, data.prefix
        )
        for number, ids in enumerate(prompts):
            text = tokenizer.decode(ids[ids[0] == tokenizer.bos_token_id :])
            if tokenizer.encode(text) == ids:  # as evaluate will read it
                rows.append({"prompt_id": f"document-{number}", "prompt": text})
    if not rows:
        return "PROMPTS.jsonl"
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write_run_sums(out)
    return str(path)
