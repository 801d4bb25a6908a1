"""The directory of one run: claimed while the run lasts, and resumed only under the same settings."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import yaml

from specdec.target.identity import IDENTIFYING
from specdec.training.checkpoint import read_training_checkpoint
from specdec.utils.config import (
    difference_keys,
    differences,
    is_part,
    normalize_config,
    run_names,
    to_text,
)
from specdec.utils.files import remove_abandoned, write_sums
from specdec.utils.links import refuse_links
from specdec.utils.locks import claim_message, is_held, release_claim, take_claim
from specdec.utils.reading import explained

log = logging.getLogger(__name__)

LOSSES = "losses.txt"  # the loss of every batch
# its lock is held from the choice of the directory to the end of the run, however that ends
CLAIM = ".claimed"
PATIENCE = 15.0  # seconds; the other ranks of a killed run notice within some
CONFIG = "specdec_config"  # in a checkpoint: the run's resolved config
LENGTH = ("trainer.max_steps", "trainer.max_epochs", "trainer.min_steps", "trainer.min_epochs")
STEADY = ("config*.yaml", "provenance*.json", "DONE.json", "*prompts.jsonl")
"""The files of a run that do not grow."""
NUMBERLESS = (
    # what is written and measured
    "out", "ckpt_path", "weights_only", "allow_changes", "acceptance", "checkpoint",
    "model.features.directory",
    "trainer.enable_", "trainer.log", "trainer.limit_val", "trainer.limit_test", "trainer.limit_predict",
    "trainer.val_", "trainer.check_val", "trainer.num_sanity", "trainer.inference_mode", "trainer.profiler",
    "trainer.barebones", "trainer.detect_anomaly", "trainer.default_root_dir", "trainer.max_time",
)  # fmt: skip
"""How the names begin of all settings that cannot change a trained number; every other one counts as one that can."""
WATCHERS = {
    "DeviceStatsMonitor", "LearningRateMonitor", "ModelCheckpoint", "ModelSummary", "RichModelSummary",
    "RichProgressBar", "ThroughputMonitor", "TQDMProgressBar",
}  # fmt: skip
"""Lightning's callbacks that only watch a run, so that a resumed run may have others."""
# in the order in which Lightning asks
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


class RunDirectory:
    """Chooses a run's directory, holds it, and leaves nothing in it if the run fails before it trained.

    A context manager: at its end the claim is given back.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._claim: IO[Any] | None = None
        self._made = self._resumed = False  # by this process

    def choose(self, out: str | None, resumes: bool = False, first: bool = True) -> Path:
        """The run's directory, claimed.

        Args:
            out: the directory; None: a new one, named after the present time.
            resumes: the run continues what a run has left there, if anything is there.
            first: whether this process is the first of its job; the others write nothing and claim nothing.

        Raises:
            ValueError: the directory holds something, another run has it, or it cannot be written.
        """
        if out is None:
            names = run_names("fit")
            self.path = (
                next(name for name in names if self._claimed(name)) if first else next(names)
            )
            return self.path
        self.path = path = Path(out)
        self._resumed = first and resumes and path.is_dir() and _is_used(path)
        of_a_run = (path / CLAIM).exists() or all(
            any(path.glob(pattern)) for pattern in ("config*.yaml", "provenance*.json")
        )
        if self._resumed and not of_a_run:  # a killed run leaves its claim
            raise ValueError(
                f"{path} holds files, and none of a run of specdec fit: choose another --out"
            )
        if self._resumed:
            refuse_links(path)
        if first and not self._claimed(path):
            if is_held(path / CLAIM):
                raise ValueError(claim_message(path, path / CLAIM))
            raise ValueError(
                f"{path} exists already and is never overwritten: choose another --out, or resume it by "
                "typing --ckpt_path auto"
            )
        for folder in (path, path / "checkpoints") if self._resumed else ():
            remove_abandoned(folder)
        return path

    def _claimed(self, path: Path) -> bool:
        """Claim a directory for this run; False leaves it as it was."""
        # before anything is written into what is someone else's
        if not self._resumed and _is_used(path):
            return False
        self._made = not path.exists()
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
        self.path, self._claim = path, take_claim(path / CLAIM, PATIENCE if self._resumed else 0.0)
        # a run came and went meanwhile
        if self._claim is not None and not self._resumed and _is_used(path):
            release_claim(path / CLAIM, self._claim)
            self._claim = None
        return self._claim is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Give the claim back; after a failure before anything was trained, remove what came under it."""
        if self._claim is None:
            return
        assert self.path is not None
        losses = self.path / LOSSES
        failed = kind is not None and not (
            self._resumed or (losses.exists() and losses.stat().st_size > 0)
        )
        for path in self.path.iterdir() if failed and self.path.is_dir() else ():
            if path.name != CLAIM:  # all is this run's: nothing else was here when it was claimed
                _remove(path)
        release_claim(self.path / CLAIM, self._claim)
        self._claim = None
        if failed and self._made:
            with contextlib.suppress(OSError):  # another run has claimed it by now
                self.path.rmdir()


def _is_used(path: Path) -> bool:
    """Whether there is anything but a claim, whose lock says whether a run has it."""
    return path.exists() and (
        not path.is_dir() or any(entry.name != CLAIM for entry in path.iterdir())
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def record_to_write(directory: Path) -> tuple[Path, Path]:
    """The next config and provenance of a run, which are one record: if a kill left one of the two, both are written
    again."""
    marks = itertools.chain([""], (f".{number}" for number in itertools.count(1)))
    records = (
        (directory / f"config{mark}.yaml", directory / f"provenance{mark}.json") for mark in marks
    )
    return next(record for record in records if not all(path.exists() for path in record))


def write_run_sums(directory: Path) -> None:
    """List the files of a run that do not grow, with their hashes."""
    write_sums(directory, *STEADY)


def is_first(devices: object, num_nodes: int) -> bool:
    """Whether this process is the only one of its job or rank 0, as launchers say in the environment: torchrun,
    Lightning's own, SLURM's and JSM's. A run on one device is one process, whatever launched it."""
    if str(devices) == "1" and num_nodes == 1:
        return True
    local = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    return int(local) == int(os.environ.get("NODE_RANK", 0)) == 0


def changes_numbers(key: str) -> bool:
    """Whether a setting, such as ``model.optimizer.lr``, has a say in what is trained."""
    return not key.startswith(NUMBERLESS)


def decisive_settings(value: Any, key: str = "") -> Any:
    """Return a config, or the value in it of a dotted key, without the settings that change no number.

    ``init_args`` does not count in their names.
    """
    if not isinstance(value, dict):
        return value
    decisive = {}
    for name, child in value.items():
        inner = key
        if name != "init_args":
            inner = f"{key}.{name}" if key else name
            if not changes_numbers(inner):
                continue
        decisive[name] = decisive_settings(child, inner)
    return decisive


def run_key(config: str, data: Sequence[str], target: Mapping[str, Any]) -> str:
    """Return which run it is, 16 hexadecimal digits, which its drafters and its record share.

    Args:
        config: the resolved config with which it began, as YAML; settings that change no number do not count.
        data: hashes of the rows to train and to validate on.
        target: the target's identity.
    """
    settings = decisive_settings(without_watchers(normalize_config(yaml.safe_load(config) or {})))
    identity = {name: target.get(name) for name in IDENTIFYING}
    decisive = json.dumps([settings, list(data), identity], sort_keys=True, default=str)
    return hashlib.sha256(decisive.encode()).hexdigest()[:16]


def without_watchers(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the callbacks that only watch the run; None and no callbacks are the same."""
    trainer = config.get("trainer")
    if not isinstance(trainer, dict):
        return config
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    others = [
        part for part in callbacks if not (is_part(part) and only_watches(part["class_path"]))
    ]
    return config | {"trainer": trainer | {"callbacks": others or None}}


def only_watches(class_path: object) -> bool:
    """Return whether a class, by its import path, is one of Lightning's callbacks that only watch a run."""
    package, _, name = str(class_path).rpartition(".")
    return package.startswith(("lightning.", "pytorch_lightning.")) and name in WATCHERS


def changed_settings(checkpoint: Path, now: dict[str, Any], allowed: Sequence[str]) -> list[str]:
    """The settings that differ between the config that a checkpoint was trained under and the present one.

    ValueError for what changes what is trained, each logged on a line, and is not below a key that is ``allowed``.
    """
    trained_under = read_training_checkpoint(checkpoint).get(CONFIG)
    if not isinstance(trained_under, dict):
        raise ValueError(f"{checkpoint}: it holds no config: it was not written by specdec fit")
    saved_config = without_watchers(normalize_config(trained_under))
    present_config = without_watchers(normalize_config(now))
    known = {*difference_keys(saved_config), *difference_keys(present_config)}
    if unknown := [key for key in allowed if key not in known]:
        raise ValueError(f"--allow_changes {unknown[0]!r}: no setting has that name")
    changed = []
    refused = []
    for key, old, new in differences(saved_config, present_config):
        changed.append(key)
        difference = f"{key} was {to_text(old)}, is {to_text(new)}"
        if key in LENGTH:
            log.warning(
                "resuming: %s; the learning rate's schedule depends on the run's length, so from here on it is that "
                "of a run of the new length", difference,
            )  # fmt: skip
        elif any(f"{key}.".startswith(f"{name}.") for name in allowed):
            log.warning("resuming, allowed: %s", difference)
        elif changes_numbers(key):
            refused.append(key)
            log.error("  %s", difference)
    if refused:
        names = ",".join(refused)
        raise ValueError(
            f"{checkpoint} was trained under other settings, listed above ({names}): resume with those, or allow the "
            f"change with --allow_changes '[{names}]'"
        )
    return changed
