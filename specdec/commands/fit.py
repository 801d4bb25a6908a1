"""``specdec fit``: LightningCLI with run directories that are never overwritten."""

import contextlib
import logging
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from specdec.commands.lightning_defaults import (
    check_loggers,
    check_trainer_numbers,
    default_loggers,
    quiet_lightning,
)
from specdec.commands.next_steps import log_next_steps, write_prompts
from specdec.commands.parser import shorten_message
from specdec.data import ChatData, TextData, TokenData, TokenizedData
from specdec.embedded import EmbeddedData
from specdec.evaluation.callback import AcceptanceLength
from specdec.export.planned import missing_kernels, planned_subject, served, unserved
from specdec.training.callbacks import RunRecord, Throughput, check_run
from specdec.training.checkpoint import (
    AtomicCheckpointIO,
    RunCheckpoint,
    newest,
    read_training_checkpoint,
    verify,
)
from specdec.training.distributed import strategy_kind
from specdec.training.module import DEFAULTS, DrafterModule
from specdec.training.progress import progress_callback
from specdec.training.run_directory import (
    RunDirectory,
    changed_settings,
    changes_numbers,
    is_first,
)
from specdec.utils.config import compose, hyperparameters, normalize_config
from specdec.utils.imports import flags
from specdec.utils.machine import provenance
from specdec.utils.places import (
    checkpoint_folders,
    flags_for,
    make_typed_places_absolute,
    move_places_inside,
    typed_values,
)
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.trust import load_yaml, parse_yaml, read_yaml_text, redacted, writing

log = logging.getLogger(__name__)
CLI = TypeVar("CLI", bound="DrafterCLI")
AUTO = "auto"  # for --ckpt_path
LAST = "last"  # Lightning's word for the same
DATA = (ChatData, EmbeddedData, TextData, TokenizedData)
"""What ``--data`` may name without a module: jsonargparse knows the classes that are imported."""
# settings that are no hyperparameters
OF_ONE_START = ("ckpt_path", "weights_only", "allow_changes")


@contextlib.contextmanager
def one_parser() -> Iterator[None]:
    """Inside, command lines of ``fit`` are read by one parser, of which making another takes a second."""
    SHARED.append({})
    try:
        yield
    finally:
        SHARED.pop()


class DrafterCLI(LightningCLI):
    """LightningCLI for :class:`DrafterModule`, with ``--out`` and the run directory's habits."""

    def __init__(self, *args: Any, directory: RunDirectory, **kwargs: Any) -> None:
        self.directory = directory
        super().__init__(*args, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """``fit`` alone: validation runs within it."""
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}

    def setup_parser(self, *args: Any) -> None:
        """As Lightning does, or once for all that is composed inside :func:`one_parser`."""
        shared = SHARED[-1] if SHARED else {}
        if shared:
            vars(self).update(shared)
            return
        known_names = set(vars(self))
        super().setup_parser(*args)
        shared.update(
            {name: value for name, value in vars(self).items() if name not in known_names}
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what a run has beyond model, data and trainer."""
        parser.add_argument(
            "--out",
            type=str | None,
            default=None,
            help="the run's directory; must be new, or resumed",
        )
        parser.add_argument(
            "--allow_changes",
            type=list[str],
            default=[],
            help="settings that a resumed run may change",
        )
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_lightning_class_args(AcceptanceLength, "acceptance")
        parser.set_defaults({**DEFAULTS, "trainer.logger": default_loggers()})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Remember what was typed: it may lead out of the run's directory."""
        self.typed = typed_values(args)
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """The present config decides, never a checkpoint's: Lightning would let the checkpoint win silently."""

    def before_instantiate_classes(self) -> None:
        """See that the strategy is one to train under; without a length a run is one epoch long."""
        trainer = self.config.fit.trainer
        check_trainer_numbers(trainer)
        strategy_kind(trainer.strategy)
        if trainer.max_steps == -1 and trainer.max_epochs is None and trainer.max_time is None:
            trainer.max_epochs = 1  # Lightning's own default is a thousand
        if trainer.logger in (None, True):  # as Lightning says "the default"
            trainer.logger = self._parser("fit").get_defaults().trainer.logger
        check_loggers(_listed(trainer.logger))

    def instantiate_classes(self) -> None:
        """Choose the run directory, in which the parts write that a config names; then build all."""
        _check_accelerator(self.config.fit.trainer.accelerator)
        self.typed = make_typed_places_absolute(self.config.fit, self.typed)
        self.out = self._choose()
        # with the directories as they were given: a saved config serves another run
        self.saved = self._dumped()
        move_places_inside(self.config.fit, self.out, self.typed)
        super().instantiate_classes()
        self._warn_of_engines()

    def _warn_of_engines(self) -> None:
        """Say which engines will not serve what is to be trained, where the target's config is here to tell."""
        model = self.model
        self.is_servable = True
        if (config := model.early_config()) is None:
            return
        reasons = unserved(
            planned_subject(config, model.target_config, model.train_embed, model.train_head)
        )
        self.is_servable = bool(served(reasons))
        if self.is_servable:
            for engine, text in reasons.items():
                log.info("%s will not serve this drafter: %s", engine, text)
        else:
            by_engine = "; ".join(f"{engine}: {text}" for engine, text in reasons.items())
            log.warning(
                "no engine will serve this drafter, and export will refuse it: %s", by_engine
            )
        if kernels := missing_kernels(config):
            log.warning("%s", kernels)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A trainer whose checkpoints are atomic and whose files all lie in the run directory; the loggers get the
        config as it is saved."""
        trainer = self.config_init.fit.trainer
        seed = self.config.fit.seed_everything
        out = self.out
        trainer.default_root_dir = str(out)
        config = {
            key: value for key, value in parse_yaml(self.saved).items() if key not in OF_ONE_START
        }
        del config["trainer"]["logger"]  # names the logger's own run, which may go on
        self.model.save_hyperparameters(hyperparameters(config))
        of_config = _listed(trainer.callbacks)
        files = AtomicCheckpointIO(lambda: checkpoint_folders(out, of_config, self.typed))
        kwargs["plugins"] = [*_listed(trainer.plugins), files]
        key = torch.initial_seed() if seed is False else seed
        record = RunRecord(out, key, self.saved, provenance(seed=seed))
        callbacks = [*of_config, record, Throughput()]
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if trainer.enable_progress_bar is not False and not has_bar:
            callbacks.append(progress_callback())
            kwargs["enable_progress_bar"] = False  # Lightning's own
        try:
            # which puts the checkpoints last
            return super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except (TypeError, RuntimeError, ArithmeticError, ImportError, AttributeError) as error:
            raise ValueError(f"trainer: Lightning refuses it: {error}") from error

    def after_fit(self) -> None:
        """Say what the run has left, and the commands that come next."""
        if self.trainer.is_global_zero:
            prompts = write_prompts(self.out, self.datamodule, self.model)
            log_next_steps(
                self.out, self.trainer, self.model.target_source, prompts, self.is_servable
            )

    def _choose(self) -> Path:
        """The run directory, and the checkpoint with which it begins."""
        config = self.config.fit
        ckpt_path = config.get("ckpt_path")
        if ckpt_path == LAST:
            ckpt_path = AUTO
        if ckpt_path == AUTO and config.out is None:
            raise ValueError("--ckpt_path auto (or last) resumes the run in --out: give --out RUN")
        resumes = ckpt_path == AUTO
        if ckpt_path is not None and config.out is not None:
            resumes = resumes or Path(config.out).resolve() in Path(ckpt_path).resolve().parents
        # a config file may start a new run from a checkpoint, but it never resumes a run
        resumes = resumes and any(key == "ckpt_path" for key, _ in self.typed)
        out = self.directory.choose(
            config.out, resumes, is_first(config.trainer.devices, config.trainer.num_nodes)
        )
        config.out = str(out)
        if ckpt_path is None:
            return out
        if resumes:
            check_run(out)
        last = newest(out / "checkpoints")
        begin = last if ckpt_path == AUTO else Path(ckpt_path)
        config.ckpt_path = None if begin is None else str(begin)
        if begin is None:
            log.info("%s: no checkpoint yet: training from the start", out)
            return out
        if ckpt_path != AUTO:
            verify(begin)
            if (
                last is not None
                and read_training_checkpoint(last)["global_step"]
                > read_training_checkpoint(begin)["global_step"]
            ):
                raise ValueError(
                    f"{out} has later checkpoints than {begin}: go back to it with another --out"
                )
        # a file allows none, nor does a run's saved config again
        typed = " ".join(text for key, text in self.typed if key == "allow_changes")
        words = re.findall(r"[\w.]+", typed)
        allowed = [name for name in config.allow_changes if name in words]
        changes = changed_settings(begin, parse_yaml(self._dumped()), allowed)
        if (
            ckpt_path == AUTO
            and (out / "DONE.json").exists()
            and not any(map(changes_numbers, changes))
        ):
            log.info("%s is done: nothing is left to train", out)
            raise SystemExit(0)
        log.info("resuming from %s", begin)
        return out

    def _saved(self) -> dict[str, Any]:
        """The config as it is saved: specdec's parts of the model by their names alone, so that files can move."""
        config_with_parts = self.config.fit.clone()
        config_with_parts.pop("config", None)
        with writing():
            config = parse_yaml(self._parser("fit").dump(config_with_parts, skip_none=False))
        optimizer = config["model"].pop("optimizer", None)  # AdamW is torch's name too
        config["model"] = normalize_config(config["model"]) | (
            {} if optimizer is None else {"optimizer": optimizer}
        )
        saved: dict[str, Any] = redacted(config)
        return saved

    def _dumped(self) -> str:
        return str(yaml.safe_dump(self._saved(), sort_keys=False, allow_unicode=True))


def _check_accelerator(name: Any) -> None:
    """Raise ValueError for a GPU where torch sees none."""
    is_gpu = name in ("gpu", "cuda") and not CUDAAccelerator.is_available()
    if is_gpu and not (name == "gpu" and MPSAccelerator.is_available()):
        raise ValueError(
            f"trainer.accelerator is {name}, but torch {torch.__version__} sees no GPU on this machine: set "
            "--trainer.accelerator cpu or auto, or install the driver and a build of torch for your GPU"
        )


def _listed(given: Any) -> list[Any]:
    """One, several or none, as a list."""
    return given if isinstance(given, list) else [] if given is None else [given]


class Configured(DrafterCLI):
    """The parts of a run, built from the same arguments as ``specdec fit``'s, and no trainer."""

    def instantiate_classes(self) -> None:
        """Model and data alone."""
        config = self.config.clone()
        config.fit.trainer.logger = False  # some make files as they are built
        self.config_init = self.parser.instantiate_classes(config)
        self.datamodule, self.model = (
            self._get(self.config_init, "data"),
            self._get(self.config_init, "model"),
        )

    def _run_subcommand(self, subcommand: str) -> None:
        """There is nothing to run."""

    def full(self) -> dict[str, Any]:
        """The config with everything that was left to a default."""
        return self._saved()


def run_fit(subcommand: str, args: list[str], resume: Sequence[str] = ()) -> int:
    """Run ``fit``; the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

    Args:
        resume: the command to print if training is interrupted; by default ``specdec fit`` with the run's config.

    Raises:
        ValueError: the configuration or the data is wrong; the message says where.
    """
    # Lightning starts its further processes with the command line that it finds here
    argv = sys.argv
    sys.argv = [sys.argv[0], subcommand, *flags(), *args]
    directory = RunDirectory()
    log.info("reading the configuration")
    # and Ctrl-C works again, which Lightning leaves ignored
    with stop_on_signals(ctrl_c=False) as signals:
        try:
            with directory:
                configured(DrafterCLI, subcommand, args, directory)
        except (SIGTERMException, StopRequested):
            _log_how_to_resume(directory, resume)
            return 128 + (signals or [signal.SIGTERM])[0]
        except SystemExit as error:
            if error.code == 1:  # what Lightning does after Ctrl-C
                _log_how_to_resume(directory, resume)
                return 128 + signal.SIGINT
            return error.code if isinstance(error.code, int) else 0
        except OSError as error:  # a logger's names no file
            raise ValueError(
                f"{error.filename or directory.path}: {error.strerror or error}"
            ) from error
        finally:
            sys.argv = argv
    return 0


def _log_how_to_resume(directory: RunDirectory, command: Sequence[str]) -> None:
    config = None if directory.path is None else directory.path / "config.yaml"
    if config is not None and config.exists():
        permissions = flags_for(load_yaml(read_yaml_text(config), config), config.parent)
        default = ["specdec", "fit", *permissions, "--config", str(config), "--ckpt_path", AUTO]
        log.info("Interrupted. To resume: %s", shlex.join(command or default))


def configured(kind: type[CLI], subcommand: str, args: list[str], directory: RunDirectory) -> CLI:
    """Compose and parse the arguments, and let ``kind`` make of them what it does.

    Raises:
        ValueError: they are wrong; the message says where.
    """
    quiet_lightning()
    config, rest = compose(args)
    composed = ["--config", yaml.safe_dump(config, sort_keys=False)] if config else []
    try:
        return kind(
            DrafterModule,
            TokenData,
            subclass_mode_data=True,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            trainer_defaults={
                "use_distributed_sampler": False,
                "gradient_clip_val": 0.5,
                "devices": 1,
            },
            parser_kwargs=PARSER | {"fit": PARSER},
            args=[subcommand, *composed, *rest],
            directory=directory,
        )
    except (ArgumentError, FileNotFoundError, MisconfigurationException, ValueError) as error:
        raise ValueError(shorten_message(str(error))) from error


# of each one_parser, the parsers by the names of a CLI's attributes
SHARED: list[dict[str, Any]] = []
PARSER: dict[str, Any] = {
    "exit_on_error": False,
    "allow_abbrev": False,
    "parser_mode": "omegaconf+",
}
