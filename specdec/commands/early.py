"""Wrong values of a command line and its config files, found before anything slow is imported.

``help.json`` says what type every option has. Only what the command would surely refuse is refused; whatever is in
doubt is left to it.
"""

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specdec.commands.known import (
    KnownOption,
    KnownPart,
    command_help,
    index,
    known_options,
    required_names,
)
from specdec.utils.config import PRESETS, packaged_path, preset_file, read_yaml
from specdec.utils.numbers import Range
from specdec.utils.shape_text import check_shape_text
from specdec.utils.text import nearest_name
from specdec.utils.trust import parse_yaml

log = logging.getLogger(__name__)

CONFIGS = ("config", "c")
ALIASES = {"target": "target.source"}
OUTPUTS = ("out", "to", "log_file", "prometheus")
DEEPEST = 200  # folders of a path to write
SEVERAL = ("suite", "temperatures")  # each has a folder in --out, and those that are there stay
# how a help text says that a command takes a new directory or file alone
NEW = re.compile(r"\ba new (one|file)\b|not there yet|must not exist yet|must be new, or resumed")
ROWS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".yaml", ".yml")
DRAFTER_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(@.+)?")  # on the Hub
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# a type as a help text prints it; nothing that can be written in a config is a Tensor
ARM = re.compile(
    r"Annotated\[(?P<kind>int|float), (?P<range>[^\]]*)\]|Literal\[(?P<words>[^\]]*)\]|"
    r"\b(?P<plain>int|float|bool|null|Tensor)\b"
)
TARGETS = ("target.source", "model.target.source")
MODELS = ("target", "model.target")  # a file of one, or its name
BUNDLED = "embedded"
ABOUT_TARGET = re.compile(r"\b(target|tokenizer|chat template)\b")
NUMBER_KINDS: dict[str, type[float]] = {"int": int, "float": float}


class Setting(NamedTuple):
    """A value of an option, or of a positional argument, which has no dashes.

    ``where`` names the config file that it stands in, and is empty for the command line. Values that are given together
    have the same ``source``.
    """

    option: str
    value: Any
    where: str = ""
    dashes: str = "--"
    source: int = -1

    @property
    def name(self) -> str:
        """The option as the user wrote it."""
        return f"{self.option} in {self.where}" if self.where else self.dashes + self.option


def check_values(commands: Sequence[str], argv: Sequence[str], is_first: bool) -> None:
    """Raise ValueError for a required option that is missing, or a value that a command cannot take.

    Args:
        commands: its name, and that of another whose options it takes too.
        argv: its arguments.
        is_first: whether this process is the first of its job, which alone finds its directory new.
    """
    words = list(itertools.takewhile(lambda word: word != "--", argv))
    if any(
        word in ("-h", "--help") or ".help" in word or "--print_config" in word for word in words
    ):
        return
    texts = [command_help(name) for name in reversed(commands)]
    options = {name: option for text in texts for name, option in known_options(text).items()}
    positional = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    typed = list(_command_line(words))
    unread: list[str] = []
    files = list(_config_files(typed, unread))
    _check_presets_first(typed, files)
    values = _effective(typed, files)
    if not unread:  # else the parser says why, and what it needs may stand there
        _check_required(commands[0], words, {setting.option for setting in values}, options)
    settled = [setting for setting in values if not _has_reference(setting.value)]
    for setting in settled:
        _check_value(setting, options, commands)
    names = [name for name in required_names(commands[0]) if not name.startswith("--")]
    for name, value in zip(names, positional, strict=False):
        _check_path(Setting(name, value, dashes=""), options[name])
    for setting in settled:
        option = options.get(setting.option)
        if isinstance(setting.value, str) and (option or setting.option.startswith("data.")):
            _check_path(setting, option or KnownOption("str", ""))
    if is_first:
        _check_new(values, known_options(texts[-1]))


def _has_reference(value: Any) -> bool:
    """Whether a value holds ``${...}``, which the parser alone replaces."""
    return isinstance(value, str) and "${" in value


def _effective(typed: Sequence[Setting], files: Sequence[Setting]) -> list[Setting]:
    """Return the values of a command line and its config files without those that others take the place of."""
    last: dict[str, list[Setting]] = {}
    for setting in (*files, *typed):
        option = setting.option.replace(".init_args.", ".")
        if not setting.where:  # a part of a command line is another part than the file's
            for name in [name for name in last if name.startswith(f"{option}.")]:
                last[name] = [value for value in last[name] if not value.where]
        last[option] = [value for value in last.get(option, []) if value.source == setting.source]
        last[option].append(setting)
    return [setting for values in last.values() for setting in values]


def _check_presets_first(typed: Sequence[Setting], files: Sequence[Setting]) -> None:
    """Raise ValueError for a preset of the command line behind options that it takes the place of; warn of a file's."""
    for position, setting in enumerate(typed):
        if setting.option not in PRESETS or not isinstance(setting.value, str):
            continue
        start = f"{setting.option}."
        preset = f"--{setting.option} {setting.value}"
        for earlier in typed[:position]:
            if earlier.option.startswith(start):
                raise ValueError(
                    f"{preset} takes the place of --{earlier.option} before it: give the preset first"
                )
        lost = [other.option for other in files if other.option.startswith(start)]
        if lost:
            log.warning(
                "%s takes the place of what the config files say: %s",
                preset,
                ", ".join(dict.fromkeys(lost)),
            )


def _command_line(words: Sequence[str]) -> Iterator[Setting]:
    """Yield the options of a command line with each of their values; a flag without one yields None."""
    option = ""
    source = 0
    pairs = itertools.zip_longest(words, words[1:], fillvalue="--")
    for place, (word, following) in enumerate(pairs):
        if word.startswith("--") or word.split("=")[0] == "-c":
            option, equals, value = word.lstrip("-").partition("=")
            source = 0 if option.endswith("+") else place + 1
            option = ALIASES.get(option.removesuffix("+"), option.removesuffix("+"))
            if equals:
                yield from (Setting(option, child, source=source) for child in _listed(value))
            elif following.startswith("--"):
                yield Setting(option, None, source=source)
        elif option:
            yield from (Setting(option, child, source=source) for child in _listed(word))


def _listed(text: str) -> list[Any]:
    """Return the values of a list as it stands on a command line, or the only value."""
    if text.startswith("["):
        with contextlib.suppress(yaml.YAMLError):
            value = parse_yaml(text)
            if isinstance(value, list):
                return value
    return [text]


def _config_files(typed: Sequence[Setting], unread: list[str]) -> Iterator[Setting]:
    """Yield the values of the config files of a command line, the last file's last; ``unread`` gets the others."""
    for number, setting in enumerate(typed):
        if setting.option in CONFIGS and setting.value is not None:
            path = packaged_path(str(setting.value))
            try:
                leaves = list(_leaves(read_yaml(path), path))
            except (ValueError, OSError):
                unread.append(path)
                continue
            yield from (leaf._replace(source=-2 - number) for leaf in leaves)


def _leaves(value: Any, where: str, option: str = "") -> Iterator[Setting]:
    """Yield the values of a config by their dotted options."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            name = str(key).removesuffix("+")
            yield from _leaves(child, where, f"{option}.{name}" if option else name)
    elif isinstance(value, list):
        for child in value:
            yield from _leaves(child, where, option)
    else:
        yield Setting(option, value, where)


def _check_required(
    command: str, words: Sequence[str], present: set[str], options: Mapping[str, KnownOption]
) -> None:
    free = [word for word in words if not word.startswith("-")]
    positional = 0
    for name in required_names(command):
        if name.startswith("--"):
            is_missing = name.removeprefix("--") not in present
        else:
            positional += 1
            is_missing = len(free) < positional and name not in present
        if is_missing:
            about = options[name.removeprefix("--")].about
            raise ValueError(f"needs {name}: {about}; see specdec {command} --help")


def _check_value(
    setting: Setting, options: Mapping[str, KnownOption], commands: Sequence[str]
) -> None:
    if setting.value is None:
        return
    option = options.get(setting.option)
    types = [option.type] if option else _argument_types(setting.option, commands)
    faults = [type_fault(kind, setting.value) for kind in types]
    if faults and all(faults):
        raise ValueError(f"{setting.name} {faults[0]}, not {_plain(setting.value)!r:.60}")
    last = setting.option.rpartition(".")[2]
    if last == "shape" and option and isinstance(setting.value, str):
        try:
            check_shape_text(setting.value)
        except ValueError as error:
            raise ValueError(f"{setting.name}: {error}") from error


def _argument_types(option: str, commands: Sequence[str]) -> list[str]:
    """Return the types that an argument of a part has, in every class that the part could be and that takes it."""
    option = option.replace(".init_args.", ".")
    holder, _, name = option.rpartition(".")
    parts = (index()["parts"][command].get(holder) for command in commands)
    part = next((KnownPart(**about) for about in parts if about), None)
    if part is None:
        return []
    arguments = [index()["classes"].get(path) for path in part.classes]
    if None in arguments:  # any argument may be taken
        return []
    return [known[name] for known in arguments if name in known]


def default_target_note(commands: Sequence[str], argv: Sequence[str], message: str) -> str:
    """Return a remark for an error about the target that names it, where it is the bundled one by default."""
    if not ABOUT_TARGET.search(message) or BUNDLED in message:
        return ""
    words = list(itertools.takewhile(lambda word: word != "--", argv))
    options = known_options(command_help(commands[-1]))
    source = next((name for name in TARGETS if name in options), None)
    typed = list(_command_line(words))
    settings = itertools.chain(typed, _config_files(typed, []))
    is_given = any(
        setting.option in (*TARGETS, *MODELS)
        # a server brings its target
        or (setting.option == "engine" and setting.value != "transformers")
        for setting in settings
    )
    if source is None or is_given:
        return ""
    return (
        f' (the target is "{BUNDLED}", specdec\'s bundled model, because no --{source} was given)'
    )


def type_fault(type_text: str, value: Any) -> str | None:
    """Return what a value must be by a type as a help text prints it; None if it may be of that type, or in doubt."""
    if element := re.fullmatch(r"list\[(.*)\]", type_text):
        return type_fault(element[1], value)
    text = re.sub(r"^(?:Optional|Union)\[(.*)\]$", r"\1", type_text)
    arms = list(ARM.finditer(text))
    if not arms or re.search(r"\w", ARM.sub("", text)):  # a class, or any text
        return None
    plain = _plain(value)
    if plain is None:  # the parser knows which options may be null
        return None
    wanted: list[str] = []
    for arm in arms:
        expectation = _arm_fault(arm, value, plain)
        if expectation is None:
            return None
        wanted += expectation
    *first, last = dict.fromkeys(wanted) or [""]
    choices = f"{', '.join(first)} or {last}" if first else last
    return f"must be {choices}" if last else None


def _plain(value: Any) -> Any:
    """Return a text of a command line as YAML reads it; 1e-3 is a number too."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(yaml.YAMLError, ValueError):
        value = parse_yaml(value)
    with contextlib.suppress(TypeError, ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def _arm_fault(arm: re.Match[str], value: Any, plain: Any) -> list[str] | None:
    """Return what one kind of a type takes, in words, or None if it takes the value."""
    if arm["words"] is not None:
        words = [word.strip("' ") for word in arm["words"].split(",")]
        return None if str(value) in words else sorted(words)
    name = arm["kind"] or arm["plain"]
    if name == "bool":
        return None if isinstance(plain, bool) else ["true", "false"]
    if name in ("null", "Tensor"):
        return []
    kind = NUMBER_KINDS[name]
    whole = isinstance(plain, float) and plain.is_integer()
    number = int(plain) if kind is int and whole else plain
    expectation = _range(arm["range"] or "").wanted(number, kind)
    return None if expectation is None else [expectation]


def _range(text: str) -> Range:
    """Return the range of ``>= 1, <= 64``; of any number for an empty text."""
    least = re.search(r">(=?) ([\d.e+-]+)", text)
    most = re.search(r"<= ([\d.e+-]+)", text)
    lowest = float(least[2]) if least else float("-inf")
    highest = float(most[1]) if most else float("inf")
    return Range(_whole(lowest), _whole(highest), above=least is not None and not least[1])


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else number


def _check_path(setting: Setting, option: KnownOption) -> None:
    """Refuse a file or a directory to read that does not exist."""
    value = str(preset_file(setting.option, setting.value))
    is_path = "Path" in option.type and "str" not in option.type
    if setting.option in OUTPUTS:
        if len(Path(value).parts) > DEEPEST:
            raise ValueError(
                f"{setting.name}: more than {DEEPEST} folders in each other: choose another"
            )
        return
    if os.path.exists(packaged_path(value)):
        return
    what = "file or directory"
    if setting.option == "drafter":
        what = "drafter directory"
        missing = not DRAFTER_NAME.fullmatch(value) or Path(value).parent.exists()
    elif "Hub id" in option.about:
        what = "directory"
        missing = not HUB_ID.fullmatch(value)
    elif is_path:
        missing = value != "-"
    else:
        missing = value.endswith(ROWS) and re.fullmatch(r"[^\s:=*?\[\]{}]+", value) is not None
    if missing:
        raise ValueError(f"{setting.name}: {value}: no such {what}; {_near_path(Path(value))}")


def _near_path(path: Path) -> str:
    """Return the likeliest file or directory of a folder, or where relative paths begin."""
    folder = path.parent
    names = os.listdir(folder) if folder.is_dir() else []
    start = "" if folder == Path() else f"{folder}/"
    return nearest_name(path.name, names, start) or f"a relative path begins in {os.getcwd()}"


def _check_new(values: Sequence[Setting], options: Mapping[str, KnownOption]) -> None:
    """Refuse a directory or file to write that exists, of a command that takes a new one alone."""
    resumes = any(setting.option == "ckpt_path" and setting.value for setting in values)
    if any(setting.option in SEVERAL for setting in values):
        return
    for setting in values:
        option = options.get(setting.option)
        if setting.option not in OUTPUTS or option is None or not NEW.search(option.about):
            continue
        path = Path(str(setting.value))
        can_resume = "ckpt_path" in options
        if setting.value is None or not path.exists() or (can_resume and resumes):
            continue
        # a process may have claimed it and left nothing
        if path.is_dir() and set(os.listdir(path)) <= {".claimed"}:
            continue
        remedy = "choose another, or remove it first"
        if can_resume:
            remedy = "choose another --out, or resume it with --ckpt_path auto"
        raise ValueError(
            f"{setting.name}: {path} exists already and is never overwritten: {remedy}"
        )
