"""The ``specdec`` command: a table of sub-commands, each imported when it is asked for."""

import importlib
import logging
import os
import signal
import sys

COMMANDS = {
    "quickstart": ("specdec.quickstart:main", "train and evaluate an EAGLE-3.1 drafter on the embedded target"),
    "fit": ("specdec.fit:run", "train a drafter (LightningCLI)"),
    "doctor": ("specdec.doctor.command:main", "the faults of a set-up, before it is trained"),
    "plan": ("specdec.plan:main", "memory and speed of a fit on many devices, worked out in one process"),
    "validate": ("specdec.fit:run", "losses and accuracies of a checkpoint on validation data"),
    "test": ("specdec.fit:run", "the same on test data"),
    "cache": ("specdec.extraction.command:main", "store the target's features of a run's data for training"),
    "evaluate": ("specdec.evaluation.command:main", "acceptance length and speed of a saved drafter, by decoding"),
    "compare": ("specdec.evaluation.compare_command:main", "whether two evaluations differ by more than chance"),
    "explain": ("specdec.explain.command:main", "where acceptance is lost, bar by bar, down to what decodes"),
    "robustness": ("specdec.robustness.command:main", "what a drafter keeps of its acceptance on unusual input"),
    "probe": ("specdec.evaluation.probe_command:main", "which switches of a saved drafter change what it proposes"),
    "drift": ("specdec.drift.command:main", "attention, recurrent state and acceptance, draft step by draft step"),
    "tune": ("specdec.evaluation.tuning.command:main", "the fastest draft shape on this machine, for each batch size"),
    "export": ("specdec.export.export_command:main", "a drafter as a checkpoint that vLLM or SGLang serves"),
    "parity": ("specdec.parity.command:main", "whether training, decoding and the export, as vLLM reads it, agree"),
    "import": ("specdec.export.import_command:main", "a published EAGLE checkpoint as a drafter"),
    "serve": ("specdec.serving.command:main", "a target in vLLM with a drafter, until Ctrl-C"),
    "bench": ("specdec.serving.bench.command:main", "what a served model's users get, with and without its drafter"),
    "regenerate": ("specdec.regeneration.command:main", "a data set's answers, written by the target itself"),
    "sweep": ("specdec.sweep.command:main", "a study: every arm trained, measured and compared, each once"),
    "data": ("specdec.inspection.command:main", "inspect: look at training data, and at what of it is supervised"),
    "card": ("specdec.card.command:main", "what a study found: figures, intervals, tables, one HTML page"),
    "reproduce": ("specdec.card.reproduce:main", "train an arm of a study's card again; compare every loss bit by bit"),
    "diff": ("specdec.difference:main", "how two configs, drafters or runs differ"),
    "pretrain": ("specdec.embedded.command:main", "build the embedded target"),
}
SHARED = ("fit", "validate", "test")


def usage() -> str:
    """The help text."""
    rows = "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: specdec COMMAND [ARGUMENTS]\n\n"
        "Train, ablate and trust EAGLE drafters for speculative decoding.\n\n"
        f"commands:\n{rows}\n\n"
        "specdec COMMAND --help says more; specdec --version prints the version.\n"
        "specdec COMMAND --allow_imports MODULE lets a config name parts of your own."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status. Wrong input is one line on standard error and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())  # noqa: T201  this is the command's output
        return 0 if argv else 2
    if argv[0] == "--version":
        from specdec import __version__

        print(f"specdec {__version__}")  # noqa: T201
        return 0
    if argv[0] not in COMMANDS:
        sys.stderr.write(f"specdec: error: unknown command {argv[0]!r}; one of: {', '.join(COMMANDS)}\n")
        return 2
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("specdec").setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        status = _run(argv[0], argv[1:])
    except ValueError as error:
        if os.environ.get("SPECDEC_TRACEBACK"):
            raise
        sys.stderr.write(f"specdec {argv[0]}: error: {_told(error, argv[1:])}\n")
        return 2
    except OSError as error:
        if os.environ.get("SPECDEC_TRACEBACK"):
            raise
        sys.stderr.write(
            f"specdec {argv[0]}: error: {error.filename or 'disk or network'}: {error.strerror or error}\n"
        )
        return 2
    except SystemExit as error:
        if type(error).__name__ == "SIGTERMException":  # Lightning's, which carries no exit status
            return 128 + signal.SIGTERM
        raise
    except KeyboardInterrupt:
        sys.stderr.write(f"specdec {argv[0]}: interrupted\n")
        return 128 + signal.SIGINT
    return int(status)


def _run(name: str, args: list[str]) -> int:
    from specdec import imports

    module, _, function = COMMANDS[name][0].partition(":")
    modules, args = imports.take(args)
    with imports.allowing(modules):
        command = getattr(importlib.import_module(module), function)
        return command(name, args) if name in SHARED else command(args)


def _told(error: ValueError, args: list[str]) -> str:
    """One line; what was refused is told with its file."""
    from specdec.compose import place
    from specdec.imports import NOT_IMPORTED

    text = " ".join(str(error).split())
    head, refused, reason = text.partition(NOT_IMPORTED)
    if refused and (where := place(args, head.split()[0])):
        return f"{head.split()[0]} ({where}){refused}{reason}"
    return text


if __name__ == "__main__":
    sys.exit(main())
