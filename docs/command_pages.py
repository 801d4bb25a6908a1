"""The site's page of all commands: what each does, an example, and its options in tables, from ``help.json``."""

import re
from collections.abc import Iterator, Sequence

from specdec.commands.fit_help import END, START, grouped_options
from specdec.commands.known import KnownOption, index, known_options, required_names

INTRODUCTION = """\
# Commands

`specdec COMMAND --help` prints the same in a terminal. Every command takes `--config FILE`, a YAML file with any of
its options, and `--print_config`, which prints all options with their values. Options in **bold** are required.

"""
EVERYWHERE = ("-h", "-c", "config", "print_config")
HEADING = re.compile(r"(?m)^(?! )([^\n]+):\n(?=  )")


def commands_page() -> str:
    """Return the page as Markdown."""
    sections = [
        section_of_fit() if name == "fit" else section(name, text)
        for name, text in index()["commands"].items()
    ]
    return INTRODUCTION + "\n".join(sections)


def section(command: str, text: str) -> str:
    """Return the section of a command, from its help text."""
    usage, _, rest = text.partition("\n\n")
    about, *groups = HEADING.split(rest)
    required = required_names(command)
    parts = [f"## specdec {command}\n", *_description(usage, about)]
    for title, entries in zip(groups[::2], groups[1::2], strict=True):
        dashes = "" if title == "positional arguments" else "--"
        if table := _table(known_options(entries), required, dashes):
            parts.append(f"**{_title(title)}**\n\n{table}\n")
    return "\n".join(parts)


def section_of_fit() -> str:
    """Return the section of ``specdec fit``, in the groups of its ``--help``."""
    about, _, examples = START.partition("\n\n")[2].partition("\n\nExamples:\n")
    examples = re.sub(r"(?m)^  ", "", examples)
    tables = []
    for title, options in grouped_options().items():
        if title.endswith("Lightning"):
            options = {name: _first_sentence(option) for name, option in options.items()}
        tables.append(f"**{title}**\n\n{_table(options)}\n")
    start = f"## specdec fit\n\n{about}\n\n```bash\n{examples}```\n\n{_prose(END)}\n"
    return "\n".join([start, *tables])


def _first_sentence(option: KnownOption) -> KnownOption:
    """Return an option with the beginning of its description."""
    return option._replace(about=re.split(r"\. | Default: ", option.about)[0])


def _description(usage: str, about: str) -> Iterator[str]:
    """Yield the sentences of a command, then its usage and its example as code."""
    about, _, example = " ".join(about.split()).partition(" Example: ")
    yield f"{_prose(about)}\n"
    lines = [usage.removeprefix("usage: ").replace("[OPTIONS] ", ""), *example.split(" Example: ")]
    code = "\n".join(line for line in lines[1:] or lines if line)
    yield f"```bash\n{code or lines[0]}\n```\n"


def _title(title: str) -> str:
    """Return the heading of a group of options."""
    plain = {"options": "Options", "positional arguments": "Arguments"}
    return plain.get(title, _prose(title[0].upper() + title[1:]))


def _table(
    options: dict[str, KnownOption], required: Sequence[str] = (), dashes: str = "--"
) -> str:
    """Return options as a Markdown table, empty if there are none to show."""
    rows = []
    for name, option in options.items():
        if name in EVERYWHERE or option.about == "Path to a configuration file":
            continue
        written = f"`{dashes}{name}`"
        if dashes + name in required:
            written = f"**{written}**"
        default = "" if option.default in ("", "null", "[]") else f"`{option.default}`"
        about = _prose(option.about).replace("|", "\\|")
        rows.append(f"| {written} | {about} | {default} |")
    if not rows:
        return ""
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


def _prose(text: str) -> str:
    """Return a help text's sentences as Markdown."""
    return re.sub(r"``([^`]*)``", r"`\1`", text.strip())
