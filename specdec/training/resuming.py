"""Going on with a run: its newest whole checkpoint, and what may differ from what it was."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.training.seals import contents, step_of, verify
from specdec.values import canonical, keys, pairs, words

log = logging.getLogger(__name__)

AUTO = "auto"
CONFIG = "specdec_config"  # in a checkpoint: the run's resolved config
LENGTH = ("trainer.max_steps", "trainer.max_epochs", "trainer.min_steps", "trainer.min_epochs")
FREE = (  # what is trained does not depend on it
    "acceptance", "allow_changes", "checkpoint", "ckpt_path", "data.cache", "data.num_workers",
    "model.features.directory", "model.features.verify", "out", "trainer.barebones",
    "trainer.check_val_every_n_epoch", "trainer.default_root_dir", "trainer.detect_anomaly",
    "trainer.enable_checkpointing", "trainer.enable_model_summary", "trainer.enable_progress_bar",
    "trainer.inference_mode", "trainer.limit_predict_batches", "trainer.limit_test_batches",
    "trainer.limit_val_batches", "trainer.log_every_n_steps", "trainer.logger", "trainer.max_time",
    "trainer.num_sanity_val_steps", "trainer.profiler", "trainer.val_check_interval", "weights_only",
)  # fmt: skip


class Change(NamedTuple):
    """A setting that is not what it was."""

    key: str
    before: Any
    now: Any

    def among(self, keys: Sequence[str]) -> bool:
        """Whether it is one of the keys, or lies below one."""
        return any(self.key == key or self.key.startswith(f"{key}.") for key in keys)

    def __str__(self) -> str:
        return f"{self.key} was {words(self.before)}, is {words(self.now)}"


def newest(directory: Path) -> Path | None:
    """The checkpoint of the latest step that verifies, or None where there is none yet.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
    """
    found, refused = [], []
    for path in sorted(directory.glob("*.ckpt")):
        try:
            found.append((step_of(path), path.name != "last.ckpt", path))  # of two of one step, step-N
        except ValueError as error:
            refused.append(str(error))
    for line in refused:
        log.warning("refused: %s", line)
    for _, _, path in sorted(found, reverse=True):
        try:
            verify(path)
        except ValueError as error:
            refused.append(str(error))
            log.warning("refused: %s", error)
            continue
        return path
    if refused:
        raise ValueError(f"{directory}: none of its {len(refused)} checkpoints is whole: train anew with another --out")
    return None


def compare(checkpoint: Path, now: dict[str, Any], allowed: Sequence[str]) -> list[Change]:
    """What differs between the config that a verified checkpoint was trained under and the present one.

    Raises:
        ValueError: something that changes what is trained, and is not ``allowed``; each is logged on a line. Or what
            is allowed is no setting.
    """
    before = contents(checkpoint).get(CONFIG)
    if not isinstance(before, dict):
        raise ValueError(f"{checkpoint}: it holds no config: it was not written by specdec fit")
    one, two = canonical(before), canonical(now)
    known = {*keys(one), *keys(two)}
    if unknown := [key for key in allowed if key not in known]:
        raise ValueError(f"--allow_changes {unknown[0]!r}: no setting has that name")
    changes = [Change(*found) for found in pairs(one, two)]
    refused = [change for change in changes if not change.among([*FREE, *LENGTH, *allowed])]
    for change in changes:
        if change in refused:
            log.error("  %s", change)
        elif change.among(LENGTH):
            log.warning(
                "resuming: %s; the learning rate's schedule depends on the run's length, so from here on it is that "
                "of a run of the new length", change,
            )  # fmt: skip
        elif change.among(allowed):
            log.warning("resuming, allowed: %s", change)
        elif not change.among(("out", "ckpt_path", "allow_changes", "trainer.default_root_dir")):
            log.info("resuming: %s; what is trained does not depend on it", change)
    if refused:
        names = ",".join(change.key for change in refused)
        raise ValueError(
            f"{checkpoint} was trained under other settings, listed above ({names}): go on with those, or allow the "
            f"change with --allow_changes '[{names}]'"
        )
    return changes
