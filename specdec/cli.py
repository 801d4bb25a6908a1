"""The ``specdec`` command: a table of sub-commands, each imported when it is asked for."""

import contextlib
import difflib
import importlib
import inspect
import io
import json
import logging
import os
import re
import signal
import sys
from pathlib import Path

COMMANDS = {
    "quickstart": ("specdec.quickstart:quickstart", "train and evaluate an EAGLE-3.1 drafter on the embedded target"),
    "fit": ("specdec.fit:run", "train a drafter (LightningCLI)"),
    "doctor": ("specdec.diagnostics.doctor:main", "the faults of a set-up, before it is trained"),
    "plan": ("specdec.plan:main", "memory and speed of a fit on many devices, worked out in one process"),
    "validate": ("specdec.fit:run", "losses and accuracies of a checkpoint on validation data"),
    "cache": ("specdec.engines.extract:main", "store the target's features of a run's data for training"),
    "evaluate": ("specdec.evaluation.run:evaluate_command", "acceptance length and speed of a drafter"),
    "compare": ("specdec.evaluation.compare:compare", "whether two evaluations differ by more than chance"),
    "explain": (
        "specdec.diagnostics.explain:explain",
        "where acceptance is lost, bar by bar, down to what decodes",
    ),
    "robustness": (
        "specdec.diagnostics.robustness:robustness",
        "what a drafter keeps of its acceptance on unusual input",
    ),
    "drift": (
        "specdec.diagnostics.drift:drift",
        "attention, recurrent state and acceptance, draft step by draft step",
    ),
    "tune": ("specdec.evaluation.tune:tune", "the fastest draft shape on this machine, for each batch size"),
    "export": ("specdec.export.write:export", "a drafter as a checkpoint that vLLM or SGLang serves"),
    "parity": (
        "specdec.diagnostics.parity:parity",
        "whether training, decoding and the export, as vLLM reads it, agree",
    ),
    "import": ("specdec.export.read:import_command", "a published EAGLE checkpoint as a drafter"),
    "serve": ("specdec.engines.serve:serve", "a target in vLLM with a drafter, until Ctrl-C; --bench measures it"),
    "regenerate": ("specdec.engines.regenerate:regenerate", "a data set's answers, written by the target itself"),
    "sweep": ("specdec.studies.sweep:sweep", "a study: every arm trained, measured and compared, each once"),
    "inspect": ("specdec.diagnostics.inspect:main", "training data, and what of it is supervised, cut and packed"),
    "card": ("specdec.studies.card:card", "what a study found: figures, intervals, tables, one HTML page"),
    "reproduce": (
        "specdec.studies.reproduce:reproduce",
        "train an arm of a study's card again; compare every loss bit by bit",
    ),
    "pretrain": ("specdec.embedded.build:build_target", "build the embedded target"),
}
GROUPS = {
    "train": ("quickstart", "fit", "validate", "doctor", "plan", "pretrain"),
    "data": ("inspect", "regenerate", "cache"),
    "evaluate": ("evaluate", "compare", "tune"),
    "diagnose": ("explain", "drift", "robustness", "parity"),
    "serve": ("export", "import", "serve"),
    "study": ("sweep", "card", "reproduce"),
}
SHARED = ("fit", "validate")
OF_FIT = ("doctor", "plan", "cache", "inspect")  # take the options of fit too
EXAMPLES = {
    "fit": "fit --model.target.source DIR --data ChatData --data.train answers.jsonl --trainer.max_steps 2000",
    "validate": "validate --config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt",
}
HELP = Path(__file__).with_name("help.json")
"""The help of every command, so that it is shown at once; ``python -m specdec.cli`` writes it anew."""


def usage() -> str:
    """The help text of ``specdec`` itself, by groups of commands."""
    groups = [
        f"{group}:\n" + "\n".join(f"  {name:<12}{COMMANDS[name][1]}" for name in names if name in COMMANDS)
        for group, names in GROUPS.items()
    ]
    return (
        "usage: specdec COMMAND [ARGUMENTS]\n\n"
        "Train, ablate and trust EAGLE drafters for speculative decoding.\n\n"
        + "\n\n".join(groups)
        + "\n\nspecdec COMMAND --help says more; specdec --version prints the version.\n"
        "specdec COMMAND --allow_imports MODULE lets a config name parts of your own."
    )


def known_help(name: str) -> str | None:
    """The help of a command as it was written down, which takes no import; None where there is none."""
    return json.loads(HELP.read_text(encoding="utf-8")).get(name) if HELP.exists() else None


def misspelt(name: str, argv: list[str]) -> str | None:
    """What is wrong with the first option that a command does not have, with the likeliest name; None if all are known.

    An option below one that takes a part (``--model.loss.weight``) is the part's own to judge.
    """
    text = known_help(name)
    if text is None:
        return None
    if name in OF_FIT:
        text += (known_help("fit") or "") + " --target"  # for --model.target
    options = set(re.findall(r"(?<![\w-])--[\w.]+", text))
    for word in argv[: argv.index("--") if "--" in argv else None]:
        option = word.partition("=")[0].removesuffix("+")
        if not option.startswith("--") or option in options or option == "--allow_imports":
            continue
        above = option
        while "." in above and above not in options:
            above = above.rpartition(".")[0]
        takes_more = f"{above}.help" in options or f"{above} CONFIG" not in text
        if above in options and takes_more:
            continue
        close = difflib.get_close_matches(option, sorted(options), n=1)
        return f"unknown option {option}" + (f"; did you mean {close[0]}?" if close else f"; see specdec {name} --help")
    return None


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
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of: {', '.join(COMMANDS)}"
        sys.stderr.write(f"specdec: error: unknown command {argv[0]!r}; {hint}\n")
        return 2
    if argv[1:] in (["-h"], ["--help"]) and (text := known_help(argv[0])):
        print(text, end="")  # noqa: T201
        return 0
    if wrong := misspelt(argv[0], argv[1:]):
        sys.stderr.write(f"specdec {argv[0]}: error: {wrong}\n")
        return 2
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("specdec").setLevel(logging.INFO)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        status = _run(argv[0], argv[1:])
    except ValueError as error:
        if os.environ.get("SPECDEC_TRACEBACK"):
            raise
        sys.stderr.write(f"specdec {argv[0]}: error: {' '.join(str(error).split())}\n")
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
    from specdec.utils import command, imports

    module, _, function = COMMANDS[name][0].partition(":")
    modules, args = imports.take(args)
    command.current = ["specdec", name, *(["--allow_imports", ",".join(modules)] if modules else []), *args]
    with imports.allowing(modules):
        found = getattr(importlib.import_module(module), function)
        if name in SHARED:
            return found(name, args)
        if list(inspect.signature(found).parameters) == ["argv"]:  # takes the options of fit beside its own
            return found(args)
        return command.call(found, name, args)


def write_help() -> None:
    """Write down the help of every command."""
    os.environ["COLUMNS"] = "100"
    texts = {}
    for name in COMMANDS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            _run(name, ["--help"])
        usage_, blank, rest = said.getvalue().partition("\n\n")
        words = re.sub(r"\[[^][]*(\[[^][]*\][^][]*)*\]", "", " ".join(usage_.split())).split()
        needed = [word for word in words[2:] if word not in ("specdec", name)]
        example = f"Example: specdec {EXAMPLES[name]}\n\n" if name in EXAMPLES else ""
        texts[name] = f"usage: specdec {name} [OPTIONS] {' '.join(needed)}".rstrip() + blank + example + rest
    HELP.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_help()
