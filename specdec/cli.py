"""The ``specdec`` command: a table of sub-commands, each imported when it is asked for."""

import difflib
import errno
import importlib
import inspect
import io
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.utils.signals import StopRequested, stop_on_signals
from specdec.utils.text import printable

COMMANDS = {
    "quickstart": (
        "specdec.commands.quickstart:quickstart",
        "train and evaluate an EAGLE-3.1 drafter for the bundled target",
    ),
    "fit": ("specdec.commands.fit:run_fit", "train a drafter (LightningCLI)"),
    "presets": ("specdec.commands.presets:presets", "list the configs that come with specdec"),
    "cp": ("specdec.commands.presets:cp", "copy a config that comes with specdec, to edit it"),
    "doctor": (
        "specdec.diagnostics.doctor:doctor",
        "check model, data and config before training",
    ),
    "plan": (
        "specdec.commands.plan:plan",
        "estimate memory, time and hardware for a training run",
    ),
    "cache": (
        "specdec.engines.extract:cache",
        "compute the target's hidden states once, for many runs",
    ),
    "evaluate": (
        "specdec.evaluation.run:evaluate_command",
        "measure a drafter's acceptance length and speed",
    ),
    "compare": (
        "specdec.evaluation.compare:compare",
        "test whether two evaluations differ significantly",
    ),
    "table": (
        "specdec.evaluation.table:suite_table",
        "make a table of several drafters, as papers print it",
    ),
    "robustness": (
        "specdec.diagnostics.robustness:robustness",
        "measure acceptance under other templates, prompts and noise",
    ),
    "drift": (
        "specdec.diagnostics.drift:drift",
        "find where acceptance is lost, by draft step",
    ),
    "tune": (
        "specdec.evaluation.tune:tune",
        "find the fastest draft shape for each batch size",
    ),
    "export": (
        "specdec.export.write:export",
        "write a drafter as a checkpoint for vLLM, SGLang or llama.cpp",
    ),
    "parity": (
        "specdec.diagnostics.parity:parity",
        "compare training, decoding, the export and a real vLLM or llama.cpp",
    ),
    "import": (
        "specdec.export.read:import_command",
        "read a published EAGLE checkpoint or an MTP module",
    ),
    "push": (
        "specdec.export.push:push",
        "publish a drafter with its model card on the Hugging Face Hub",
    ),
    "serve": (
        "specdec.engines.serve:serve",
        "serve a target with a drafter in vLLM or llama.cpp; --bench measures it",
    ),
    "watch": (
        "specdec.engines.watch:watch",
        "watch a running server, and tell when its drafter accepts less",
    ),
    "live": (
        "specdec.engines.live:live",
        "compare the acceptance of two running servers",
    ),
    "regenerate": (
        "specdec.engines.regenerate:regenerate",
        "let the target write the answers of a data set",
    ),
    "sweep": (
        "specdec.studies.sweep:sweep",
        "run a study: train, measure and compare every arm",
    ),
}
GROUPS = {
    "train": ("quickstart", "fit", "presets", "cp", "doctor", "plan"),
    "data": ("regenerate", "cache"),
    "evaluate": ("evaluate", "compare", "table", "tune"),
    "diagnose": ("drift", "robustness", "parity"),
    "serve": ("export", "import", "push", "serve", "watch", "live"),
    "study": ("sweep",),
}
SHARED = ("fit",)
LIGHT = ("presets", "cp")  # need neither torch nor lightning
OF_FIT = ("doctor", "plan", "cache")  # take the options of fit too


def usage() -> str:
    """The help text of ``specdec`` itself, by groups of commands."""
    groups = [
        "\n".join([f"{group}:", *(f"  {name:<12}{COMMANDS[name][1]}" for name in names)])
        for group, names in GROUPS.items()
    ]
    return (
        "usage: specdec COMMAND [ARGUMENTS]\n\n"
        "Train, ablate and trust EAGLE drafters for speculative decoding.\n\n"
        + "\n\n".join(groups)
        + "\n\nspecdec COMMAND --help says more, and specdec fit --help all says all of it.\n"
        "specdec --version prints the version.\n"
        "specdec COMMAND --allow_imports MODULE lets a config name your own components;\n"
        "--allow_env NAME lets it read that environment variable, and --allow_keys KEY set that restricted key."
    )


def known_help(name: str, is_whole: bool = True) -> str:
    """The help of a command as it was written down, which takes no import of torch; of fit an overview, or all."""
    if name == "fit" and not is_whole:
        from specdec.commands.fit_help import fit_help

        return fit_help()
    from specdec.commands.known import command_help

    return command_help(name)


def check_command_line(name: str, args: list[str]) -> None:
    """Raise ValueError for what is wrong with a command line and needs no import of torch to tell: an option, key or
    class that the command does not have, with the likeliest name; a missing option; a value that it cannot take."""
    from specdec.commands import early, lightning_spelling, spelling
    from specdec.utils import imports

    commands = _commands_with_options(name)
    allowed, args = imports.take_permissions(args)
    if "fit" in commands:
        lightning_spelling.warn_of_variables(os.environ)
        lightning_spelling.check_lightning_spelling(args)
    with imports.allowing((), allowed.env, allowed.keys):
        spelling.check_spelling(commands, args, bool(allowed.imports))
        early.check_values(commands, args, is_first=not is_further_process())


def _commands_with_options(name: str) -> list[str]:
    """Return a command, and fit where it takes fit's options too."""
    return [name, "fit"] if name in OF_FIT else [name]


def _is_run_from_here() -> bool:
    """Whether specdec itself is found in the working folder, as in a checkout that is not installed."""
    root = Path(__file__).resolve().parents[1]
    try:
        return {Path(sys.path[0] or os.curdir).resolve(), Path.cwd()} == {root}
    except OSError:  # the working folder is gone
        return False


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status. Wrong input is one line on standard error and status 2."""
    for stream in ("stdout", "stderr"):
        _outlive_reader(stream)
    name, *args = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help", "help"):
        print(usage())  # noqa: T201  this is the command's output
        return 0 if name else 2
    if name == "--version":
        print(f"specdec {__version__}")  # noqa: T201
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of: {', '.join(COMMANDS)}"
        return _refuse("", f"unknown command {name!r}; {hint}")
    if args in (["-h"], ["--help"], ["-h", "all"], ["--help", "all"]):
        try:
            print(known_help(name, is_whole="all" in args), end="")  # noqa: T201
        except ValueError as error:
            return _refuse(name, str(error))
        return 0
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[StderrLines()])
    logging.getLogger("specdec").setLevel(logging.INFO)
    if not _is_run_from_here():
        # `python -c`, as libraries run it, imports nothing from here
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if name != "push":  # whose upload is what one waits for
        # transformers' of reading and writing a model too
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    signals: list[int] = []
    try:
        with stop_on_signals(ctrl_c=False) as signals:
            check_command_line(name, args)
            is_slow = name not in LIGHT and "torch" not in sys.modules
            if is_slow and not is_further_process():
                sys.stderr.write(f"specdec {name}: loading torch, lightning and transformers\n")
            return run_command(name, args)
    except (ValueError, OSError) as error:
        if os.environ.get("SPECDEC_TRACEBACK"):
            raise
        if isinstance(error, OSError):
            return _refuse(
                name, f"{error.filename or 'disk or network'}: {error.strerror or error}"
            )
        from specdec.commands import early

        message = " ".join(str(error).split())
        note = early.default_target_note(_commands_with_options(name), args, message)
        return _refuse(name, message + note)
    except SystemExit as error:
        if type(error).__name__ == "SIGTERMException":  # Lightning's, which carries no exit status
            return 128 + (signals or [signal.SIGTERM])[0]
        raise
    except (KeyboardInterrupt, StopRequested) as error:
        sys.stderr.write(f"specdec {name}: interrupted\n")
        return error.status if isinstance(error, StopRequested) else 128 + signal.SIGINT


class _Outliving(io.FileIO):
    """A standard stream: once its reader or its terminal is gone, what is written vanishes and nothing fails.

    So it does on standard error if the disk is full, for a log alone ends no run; results on standard output fail.
    """

    survives: tuple[int, ...] = (errno.EPIPE, errno.EIO)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self.survives:
                raise
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


def _outlive_reader(name: str) -> None:
    """Let a command do its work to the end whatever becomes of the reader of ``sys.stdout`` or ``sys.stderr``."""
    stream = getattr(sys, name)
    if stream is None:  # closed by whoever started this
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    elif stream is getattr(sys, f"__{name}__") and not isinstance(stream.buffer, _Outliving):
        stream.flush()
        raw = _Outliving(stream.fileno(), "w", closefd=False)
        if name == "stderr":
            raw.survives += (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
        names = ("encoding", "errors", "line_buffering", "write_through")
        settings = {key: getattr(stream, key) for key in names}
        setattr(sys, name, io.TextIOWrapper(buffer, **settings))


class StderrLines(logging.Handler):
    """Lines on whatever standard error is by then: above a bar, where one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        sys.stderr.write(f"{printable(self.format(record))}\n")


def is_further_process() -> bool:
    """Whether a launcher started this process as a further one of its job."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    return any(os.environ.get(name, "0") != "0" for name in ranks)


def _refuse(name: str, why: str) -> int:
    sys.stderr.write(f"specdec {name}".strip() + f": error: {printable(why)}\n")
    return 2


def run_command(name: str, args: list[str]) -> int:
    """Run one command; the exit status."""
    from specdec.commands import parser
    from specdec.utils import imports, machine

    module, _, function = COMMANDS[name][0].partition(":")
    allowed, args = imports.take_permissions(args)
    machine.command_line[:] = ["specdec", name, *allowed.flags(), *args]
    with imports.allowing(*allowed):
        command = getattr(importlib.import_module(module), function)
        if name in SHARED:
            return command(name, args)
        # takes the options of fit beside its own
        if list(inspect.signature(command).parameters) == ["argv"]:
            return command(args)
        return parser.call(command, name, args)
