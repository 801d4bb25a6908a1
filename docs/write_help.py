"""Writes specdec/help.json: the help of every command, and what arguments the classes take that options name."""

import contextlib
import importlib
import io
import json
import os
import re
from collections.abc import Mapping

from jsonargparse import ArgumentParser

from specdec.cli import COMMANDS, run_command
from specdec.commands.known import HELP, OPTION, KnownPart, installed_version, known_options

EXAMPLES = {
    "fit": "fit --model.target.source DIR --data ChatData --data.train answers.jsonl --trainer.max_steps 2000",
}
# they pass arguments on to packages that need not be here
PASS_ON = ("WandbLogger", "CometLogger")

SUBCLASSES = re.compile(r"\(type: (.*?)(?:, default: .*?)?, known subclasses: ([^()]*)\)$")


def help_content() -> str:
    """Return the text of ``help.json``, of the commands and classes as they are."""
    texts = {}
    for name in COMMANDS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            run_command(name, ["--help"])
        # jsonargparse puts a backspace into it, which sites draw as a box
        text = printed.getvalue().replace("\b", "")
        line, _, rest = text.partition("\n\n")
        line = re.sub(r"\[[^][]*(\[[^][]*\][^][]*)*\]", "", line)  # without what may be left out
        needed = " ".join(word for word in line.split()[2:] if word not in ("specdec", name))
        example = f"Example: specdec {EXAMPLES[name]}\n\n" if name in EXAMPLES else ""
        texts[name] = f"usage: specdec {name} [OPTIONS] {needed}".rstrip() + f"\n\n{example}{rest}"
    return index_of(texts)


def known_parts(text: str) -> dict[str, KnownPart]:
    """Return the options of a help text that take a class, by their names without the dashes."""
    parts = {}
    for option in filter(lambda entry: entry.startswith("--"), OPTION.findall(text)):
        line = " ".join(option.split())
        if about := SUBCLASSES.search(line):
            types, classes = about.groups()
            words = re.findall(r"'([^']*)'", "".join(re.findall(r"Literal\[.*?\]", types)))
            words += ["true", "false"] * ("bool" in types)
            free = re.search(r"\b(str|Any|Path)\b", types) is not None
            name = line.split()[0].removeprefix("--")
            parts[name] = KnownPart(classes.split(", "), words, free)
    return parts


def index_of(commands: Mapping[str, str]) -> str:
    """Return the text of ``help.json``, of every command's help text."""
    parts = {name: known_parts(text) for name, text in commands.items()}
    classes = {
        path: class_arguments(path)
        for options in parts.values()
        for part in options.values()
        for path in part.classes
    }
    content = {
        "versions": {library: installed_version(library) for library in ("lightning", "torch")},
        "classes": dict(sorted(classes.items())),
        "commands": commands,
        "parts": {
            name: {option: part._asdict() for option, part in options.items()}
            for name, options in parts.items()
        },
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def class_arguments(path: str) -> dict[str, str] | None:
    """Return the arguments that a class takes in a config with their types; None if that is not known."""
    module, _, name = path.rpartition(".")
    if name in PASS_ON:
        return None
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(
            getattr(importlib.import_module(module), name), fail_untyped=False
        )
    except ValueError:  # of a type that no config can give
        return None
    described = known_options(parser.format_help())
    types = {name: option.type for name, option in described.items()}
    names = {key.partition(".")[0] for key in vars(parser.get_defaults())}
    return {name: types.get(name, "") for name in sorted(names)}


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"  # before anything reads it
    HELP.write_text(help_content(), encoding="utf-8")
