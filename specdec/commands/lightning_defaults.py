"""What specdec checks of Lightning's settings, and what it silences."""

import logging
import os
import re
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from specdec.utils.extras import is_installed, require
from specdec.utils.numbers import (
    Count,
    FromMinusOne,
    NonNegative,
    Positive,
    Side,
    Whole,
    check_numbers,
)

log = logging.getLogger(__name__)

KNOWN_WARNINGS = (
    ".*_pytree.*",  # torch 2.13 under lightning 2.6.6
    ".*LeafSpec.*",
    "LightningCLI's args parameter is intended",  # sys.argv is for the processes that it starts
    "It is recommended to use .*sync_dist=True",  # the metrics are torchmetrics, reduced already
)
ADVERTS = (  # loggers of Lightning's that tell of products, and hints for the notebook
    "lightning.fabric",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)


TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"


def default_loggers() -> list[dict[str, Any]]:
    """Return the loggers to which ``--trainer.logger+=`` adds, and which ``--trainer.logger`` replaces.

    TensorBoard's is among them where its package is installed.
    """
    kinds = {"csv": "lightning.pytorch.loggers.CSVLogger"}
    if is_installed("tensorboard"):
        kinds["tensorboard"] = TENSORBOARD
    return [
        {"class_path": kind, "init_args": {"save_dir": ".", "name": name}}
        for name, kind in kinds.items()
    ]


def check_loggers(loggers: Sequence[Any]) -> None:
    """Raise ValueError for a logger, as a config has it, whose package is missing; say so of a default one."""
    names = [getattr(logger, "class_path", "") for logger in loggers]
    if TENSORBOARD in names:
        require("tensorboard", "tensorboard", "trainer.logger: TensorBoardLogger")
    elif names == [logger["class_path"] for logger in default_loggers()]:
        log.info(
            "logging to csv/; for tensorboard/ too: pip install 'specdec-lightning[tensorboard]'"
        )


class TrainerNumbers:
    """The ranges of Lightning's numbers, which it takes as they come: a negative accumulation trains backwards."""

    accumulate_grad_batches: Count
    gradient_clip_val: NonNegative | None
    num_nodes: Side
    max_steps: FromMinusOne
    max_epochs: FromMinusOne | None
    min_steps: Whole | None
    min_epochs: Whole | None
    num_sanity_val_steps: FromMinusOne | None
    log_every_n_steps: Whole | None
    check_val_every_n_epoch: Count | None
    val_check_interval: Positive | str | timedelta | dict | None
    limit_train_batches: NonNegative | None
    limit_val_batches: NonNegative | None
    overfit_batches: NonNegative


def check_trainer_numbers(trainer: Namespace) -> None:
    """Raise ValueError for a number of the trainer's, as a config has it, with which no run makes sense, or for an
    accelerator that Lightning does not know, also where a command builds no trainer."""
    known = {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}
    if isinstance(name := trainer.accelerator, str) and name not in known:
        raise ValueError(
            f"trainer.accelerator is {name!r:.60}: choose from {', '.join(sorted(known))}"
        )
    check_numbers(TrainerNumbers, vars(trainer), "trainer.")
    if isinstance(every := trainer.val_check_interval, str) and not re.fullmatch(
        r"\d+:\d\d:\d\d:\d\d", every
    ):
        raise ValueError(
            f"trainer.val_check_interval must be a number or DD:HH:MM:SS, not {every!r:.60}"
        )
    if str(trainer.devices).isdecimal() and int(trainer.devices) > (
        most := max(8, 2 * (os.cpu_count() or 1))
    ):
        raise ValueError(
            f"trainer.devices is {trainer.devices}: on one machine like this at most {most}"
        )


def quiet_lightning() -> None:
    """Leave out Lightning's adverts, warnings that are known to be harmless here, and what is said twice."""
    for pattern in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for adverts in ADVERTS:
        logging.getLogger(adverts).setLevel(logging.WARNING)
    logging.getLogger("lightning").handlers.clear()  # it would print every line a second time
    for handler in logging.getLogger().handlers:
        handler.addFilter(_once)
    threading.excepthook = _in_one_line


def _once(record: logging.LogRecord) -> bool:
    """Return whether a line of the log is to be printed.

    Of several processes only the first prints specdec's lines that are no errors, which all would print. A library's
    warning may concern one process.
    """
    least = logging.ERROR if record.name.startswith("specdec") else logging.WARNING
    return rank_zero_only.rank == 0 or record.levelno >= least  # type: ignore[attr-defined]


def _in_one_line(failed: threading.ExceptHookArgs, otherwise: Any = threading.excepthook) -> None:
    """Log that a thread cannot write, as TensorBoard's on a full disk, in place of its traceback.

    Its logger fails when it is next used, and ends the run. The line may come after that.
    """
    if isinstance(failed.exc_value, OSError):
        log.warning("a logger's thread cannot write: %s", failed.exc_value)
    else:
        otherwise(failed)
