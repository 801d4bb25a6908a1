"""``specdec fit``: LightningCLI with run directories that are never overwritten."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from specdec.commands.parser import shorten_message
from specdec.data import TokenData
from specdec.evaluation.callback import AcceptanceLength, best_and_last, document_prompts
from specdec.export.ahead import missing_kernels, planned_subject, served, unserved
from specdec.training.callbacks import BEST, RunRecord, Throughput, check_run, progress_callback
from specdec.training.checkpoint import (
    AtomicCheckpointIO,
    RunCheckpoint,
    newest,
    read_training_checkpoint,
    verify,
)
from specdec.training.distributed import strategy_kind
from specdec.training.module import DEFAULTS, DrafterModule
from specdec.training.run_directory import (
    RunDirectory,
    changed_settings,
    changes_numbers,
    is_first,
    write_run_sums,
)
from specdec.utils.config import compose, hyperparameters, normalize_config
from specdec.utils.files import write_text
from specdec.utils.imports import flags
from specdec.utils.machine import provenance
from specdec.utils.numbers import (
    Count,
    FromMinusOne,
    NonNegative,
    Positive,
    Side,
    Whole,
    check_numbers,
)
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import how_many
from specdec.utils.trust import flags_for, load_yaml, parse_yaml, read_yaml_text, redacted, writing

log = logging.getLogger(__name__)
CLI = TypeVar("CLI", bound="DrafterCLI")
AUTO = "auto"  # for --ckpt_path
LOGGERS = [
    {
        "class_path": f"lightning.pytorch.loggers.{kind}",
        "init_args": {"save_dir": ".", "name": name},
    }
    for kind, name in (("CSVLogger", "csv"), ("TensorBoardLogger", "tensorboard"))
]
"""To which ``--trainer.logger+=`` adds, and which ``--trainer.logger`` replaces."""
CLOSING = ("train/loss", "val/loss", "val/acceptance_length")  # figures that a run ends with
PROMPTS = 40
PROMPT_TOKENS = 64
# settings that are no hyperparameters
OF_ONE_START = ("ckpt_path", "weights_only", "allow_changes")


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
        parser.set_defaults({**DEFAULTS, "trainer.logger": LOGGERS})

    def _parse_ckpt_path(self) -> None:
        """The present config decides, never a checkpoint's: Lightning would let the checkpoint win silently."""

    def before_instantiate_classes(self) -> None:
        """See that the strategy is one to train under; without a length a run is one epoch long."""
        trainer = self.config.fit.trainer
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
        strategy_kind(trainer.strategy)
        if trainer.max_steps == -1 and trainer.max_epochs is None and trainer.max_time is None:
            trainer.max_epochs = 1  # Lightning's own default is a thousand
        if trainer.logger in (None, True):  # as Lightning says "the default"
            trainer.logger = self._parser("fit").get_defaults().trainer.logger

    def instantiate_classes(self) -> None:
        """Choose the run directory, below which loggers write where their ``save_dir`` is relative; then build all."""
        self.out = self._choose()
        # with the directories as they were given: a saved config serves another run
        self.saved = self._dumped()
        for logger in _listed(self.config.fit.trainer.logger or None):
            if "save_dir" in logger.get("init_args", {}) and logger.init_args.save_dir is not None:
                logger.init_args.save_dir = str(self.out / logger.init_args.save_dir)
        super().instantiate_classes()
        self._warn_of_engines()

    def _warn_of_engines(self) -> None:
        """Say which engines will not serve what is to be trained, where the target's config is here to tell."""
        model = self.model
        if (config := model.early_config()) is None:
            return
        reasons = unserved(
            planned_subject(config, model.target_config, model.train_embed, model.train_head)
        )
        if served(reasons):
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
        kwargs["plugins"] = [*_listed(trainer.plugins), AtomicCheckpointIO()]
        key = torch.initial_seed() if seed is False else seed
        record = RunRecord(out, key, self.saved, provenance(seed=seed))
        callbacks = [*_listed(trainer.callbacks), record, Throughput()]
        if trainer.enable_progress_bar is not False:
            callbacks.append(progress_callback())
            kwargs["enable_progress_bar"] = isinstance(callbacks[-1], ProgressBar)
        try:
            # which puts the checkpoints last
            return super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except (TypeError, RuntimeError, ArithmeticError, ImportError, AttributeError) as error:
            raise ValueError(f"trainer: Lightning refuses it: {error}") from error

    def after_fit(self) -> None:
        """Say what the run has left, and the commands that go on with it."""
        if not self.trainer.is_global_zero:
            return
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        figures = [f"{name} {metrics[name]:.3f}" for name in CLOSING if name in metrics]
        target = self.model.target_source
        drafter = str(self.out / "drafter")
        arguments = ["--target", target.source]
        for field in dataclasses.fields(target)[1:]:
            if (value := getattr(target, field.name)) != field.default:
                arguments += [
                    f"--target.{field.name}",
                    str(value).lower() if isinstance(value, bool) else str(value),
                ]
        arguments += ["--drafter", drafter, *flags()]
        device = self.trainer.strategy.root_device.type
        on = [] if device == "cpu" else ["--device", device]
        evaluate = ["specdec", "evaluate", *arguments, "--prompts", self._prompts(), *on]
        export = [
            "specdec",
            "export",
            *arguments,
            "--out",
            str(self.out / "vllm"),
            "--format",
            "vllm",
        ]
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        best = next(callback.best for callback in callbacks if isinstance(callback, RunRecord))
        last = next(
            callback.last for callback in callbacks if isinstance(callback, AcceptanceLength)
        )
        if best is not None and last is not None:
            drafter += f"\n  best drafter   {self.out / BEST}\n  accepted       best: {best_and_last(best, last)}"
        log.info(
            "%s\n  run directory  %s\n  drafter        %s\n  evaluate it    %s\n  export it      %s",
            ", ".join([f"trained {how_many(self.trainer.global_step, 'step')}", *figures]), self.out, drafter,
            shlex.join(evaluate), shlex.join(export),
        )  # fmt: skip

    def _prompts(self) -> str:
        """A file of prompts for ``evaluate``, written now: how validation documents begin. Where they make none, a
        name that stands for the user's own."""
        path = self.out / "validation_prompts.jsonl"
        rows = list[dict[str, str]]()
        with contextlib.suppress(ValueError):  # no such documents, no tokenizer
            validation = self.datamodule.splits.validation
            tokenizer = self.model.tokenizer
            room = self.datamodule.seq_len
            prefix = self.datamodule.prefix
            for number, ids in enumerate(
                document_prompts(validation, PROMPTS, PROMPT_TOKENS, room, prefix)
            ):
                text = tokenizer.decode(ids[ids[0] == tokenizer.bos_token_id :])
                if tokenizer.encode(text) == ids:  # as evaluate will read it
                    rows.append({"prompt_id": f"document-{number}", "prompt": text})
        if not rows:
            return "PROMPTS.jsonl"
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        write_run_sums(self.out)
        return str(path)

    def _choose(self) -> Path:
        """The run directory, and the checkpoint with which it begins."""
        config = self.config.fit
        ckpt_path = config.get("ckpt_path")
        if ckpt_path == AUTO and config.out is None:
            raise ValueError("--ckpt_path auto goes on with the run in --out: give --out RUN")
        resumes = ckpt_path == AUTO
        if ckpt_path is not None and config.out is not None:
            resumes = resumes or Path(config.out).resolve() in Path(ckpt_path).resolve().parents
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
        changes = changed_settings(begin, parse_yaml(self._dumped()), config.allow_changes)
        if (
            ckpt_path == AUTO
            and (out / "DONE.json").exists()
            and not any(map(changes_numbers, changes))
        ):
            log.info("%s is done: nothing is left to train", out)
            raise SystemExit(0)
        log.info("going on from %s", begin)
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


def run_fit(subcommand: str, args: list[str]) -> int:
    """Run ``fit``; the exit status: 0, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

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
            _tell_how_to_go_on(directory)
            return 128 + (signals or [signal.SIGTERM])[0]
        except SystemExit as error:
            if error.code == 1:  # what Lightning does after Ctrl-C
                _tell_how_to_go_on(directory)
                return 128 + signal.SIGINT
            return error.code if isinstance(error.code, int) else 0
        except OSError as error:  # a logger's names no file
            raise ValueError(
                f"{error.filename or directory.path}: {error.strerror or error}"
            ) from error
        finally:
            sys.argv = argv
    return 0


def _tell_how_to_go_on(directory: RunDirectory) -> None:
    config = None if directory.path is None else directory.path / "config.yaml"
    if config is not None and config.exists():
        permissions = flags_for(load_yaml(read_yaml_text(config), config))
        command = ["specdec", "fit", *permissions, "--config", str(config), "--ckpt_path", AUTO]
        log.info("interrupted; this goes on: %s", shlex.join(command))


def quiet_lightning() -> None:
    """Leave out Lightning's adverts, warnings that are known to be harmless here, and what is said twice."""
    for known in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known)
    for adverts in ADVERTS:
        logging.getLogger(adverts).setLevel(logging.WARNING)
    logging.getLogger("lightning").handlers.clear()  # it would print every line a second time
    for handler in logging.getLogger().handlers:
        handler.addFilter(_once)
    threading.excepthook = _in_one_line


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


def _once(record: logging.LogRecord) -> bool:
    """Of several processes the first alone says what all would: specdec's lines that are no errors. A library's
    warning may concern one process."""
    least = logging.ERROR if record.name.startswith("specdec") else logging.WARNING
    return rank_zero_only.rank == 0 or record.levelno >= least  # type: ignore[attr-defined]


def _in_one_line(failed: threading.ExceptHookArgs, otherwise: Any = threading.excepthook) -> None:
    """Of a thread that cannot write, as TensorBoard's on a full disk: its logger fails when it is next used, and ends
    the run. The line may come after that."""
    if isinstance(failed.exc_value, OSError):
        log.warning("a logger's thread cannot write: %s", failed.exc_value)
    else:
        otherwise(failed)


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
# of each one_parser, the parsers by the names of a CLI's attributes
SHARED: list[dict[str, Any]] = []
PARSER: dict[str, Any] = {
    "exit_on_error": False,
    "allow_abbrev": False,
    "parser_mode": "omegaconf+",
}
