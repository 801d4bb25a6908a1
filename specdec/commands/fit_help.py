"""``specdec fit --help``: specdec's options first, in groups, a line or two for each; Lightning's behind them."""

import re
import textwrap

from specdec.commands.known import KnownOption, command_help, known_options

START = """\
usage: specdec fit [OPTIONS]

Train a drafter. specdec fit is a LightningCLI: a YAML file given with --config may hold any of these
options, and those on the command line take their place.

Examples:
  specdec fit --model.target.source DIR --data ChatData --data.train answers.jsonl --trainer.max_steps 2000
  specdec fit --config run.yaml --model.drafter eagle3 --model.optimizer.lr 1e-4 --out runs/mine
  specdec fit --config runs/mine/config.yaml --ckpt_path auto
"""
END = """\
A class has options too: --data.help ChatData and --model.optimizer.help AdamW print them.
specdec fit --help all prints every option with its type, its classes and its whole description.
"""
GROUPS = {
    "Run": ("config", "out", "ckpt_path", "allow_changes", "seed_everything", "print_config"),
    "Target": ("model.target.",),
    "Data": ("data",),
    "Model": ("model.drafter", "model.start"),
    "Features": ("model.features", "model.noise"),
    "Training": ("model.",),
    "Checkpoints": ("checkpoint.",),
    "Acceptance length during training": ("acceptance.",),
    "Logging, by Lightning": ("trainer.logger", "trainer.log_every", "trainer.enable_", "trainer.profiler"),
    "Trainer, by Lightning": ("",),
}  # fmt: skip
"""How the names of a group's options begin; an option belongs to the first group that has it."""
MORE = {
    "config": "a YAML file with any of these options; several are merged, the last one wins",
    "print_config": "print the whole config and train nothing",
    "ckpt_path": "the checkpoint to resume from; auto: the newest one of --out",
    "seed_everything": "the seed of everything random",
    "data": (
        "the data set by its class, ChatData or TextData for example; --data.help ChatData prints its "
        "options, such as --data.train and --data.seq_len"
    ),
    "model.drafter": "the whole design: a preset's name, such as eagle3, or its file; give it before the options below",
    "model.drafter.norms.aux": "of the target's hidden states: none, each or concat",
}
COLUMNS = 100
INDENT = 36


def fit_help() -> str:
    """Return the help text."""
    sections = []
    for title, options in grouped_options().items():
        lines = [f"{title}:"]
        for name, option in options.items():
            lines += _lines(name, option, title.endswith("Lightning"))
        sections.append("\n".join(lines) + "\n")
    return "\n".join([START, *sections, END])


def grouped_options() -> dict[str, dict[str, KnownOption]]:
    """Return the options of ``specdec fit`` by their groups, without those that hold others and take a file of them."""
    groups: dict[str, dict[str, KnownOption]] = {title: {} for title in GROUPS}
    for name, option in known_options(command_help("fit")).items():
        name = "config" if name == "-c" else name
        is_holder = option.about == "Path to a configuration file" and name not in MORE
        if name.endswith(".help") or name in ("-h", "weights_only") or is_holder:
            continue
        title = next(title for title, starts in GROUPS.items() if name.startswith(starts))
        groups[title][name] = option._replace(about=MORE.get(name, option.about))
    return groups


def _lines(name: str, option: KnownOption, is_short: bool) -> list[str]:
    """Return an option and what it is, with its default; in one line if ``is_short``."""
    about = re.sub(r"``|:\w+:|`", "", re.split(r"\. | Default: ", option.about)[0])
    if option.default not in ("", "null", "[]") and len(option.default) < 20:
        about = f"{about} [{option.default}]".strip()
    room = COLUMNS - INDENT
    about = textwrap.shorten(about, room if is_short else 2 * room - 5, placeholder=" ...")
    start = f"  --{name}"
    parts = textwrap.wrap(about, room, break_on_hyphens=False)
    first = f"{start:<{INDENT - 2}}  {parts[0]}".rstrip()
    if len(start) > INDENT - 2:
        first = f"{start}\n{'':<{INDENT}}{parts[0]}".rstrip()
    return [first, *(f"{'':<{INDENT}}{part}" for part in parts[1:])]
