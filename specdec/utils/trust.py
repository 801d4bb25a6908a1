"""What a file may not do, whoever wrote it: a config, a study, a card, a saved run's config.

Files are passed around; the command line is typed by the user. So three things are taken from the command line, or the
environment, alone: the modules that a value may name (:mod:`specdec.utils.imports`), the variables of the environment
that ``${oc.env:NAME}`` may read, and the keys of :data:`REACH`, by which a program is run or an address contacted.
Every text of YAML comes through :func:`load_yaml`, jsonargparse's too, and is measured before it is built.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonargparse
import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specdec.utils.reading import check_sum, explained, open_regular, regular

MOST_YAML = 2**20
MOST_NODES = 100_000
DEEPEST = 32
MOST_COPIES = 100_000
"""Bytes of a YAML file; values in it, aliases counted as what they repeat; collections in each other; and what
``${...}`` may multiply."""
REACH = {
    "trust_remote_code": "it runs code of the model's repository",
    "vllm": "it is run",
    "vllm_args": "they make vLLM run code and reach files",
    "engine_args": "they make an engine run code and reach files",
    "url": "it is contacted, with the key of the environment",
    "address": "it is contacted",
    "host": "others can connect there",
    "repo": "files are sent there",
    "push": "files are sent there",
    "more": "options of sbatch can run commands",
}
PLACES = (
    "save_dir",
    "dirpath",
    "default_root_dir",
    "log_dir",
    "tee",
)  # where loggers, callbacks and features write
REPORTING = ("WandbLogger", "CometLogger", "MLFlowLogger", "NeptuneLogger", "LitLogger")
REFUSED = r"\S+: \S+ is taken from the command line alone.* --allow_keys \w+|\S+: \S+: \S+ is a function: .* alone"
# by its last word; but bos_token is text, and so are a tokenizer's others
SECRET_NAME = re.compile(
    r"((?<!bos|eos|unk|sep|pad|cls)(?<!mask)(^|[_-])token|(api|access|auth|refresh|session|bearer|security)token"
    r"|(api|access|secret|private|session|signing|encryption|account|client|shared|auth|master|service)[_-]?key([_-]?id)?"
    r"|secret|password|passwd|passphrase|credentials?|bearer|authorization|(^|[_-])(auth|pwd|cookies?|jwt))$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(
    r"TOKEN(?!IZ)|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR(?!I))|BEARER|COOKIE|\w_PWD",
    re.IGNORECASE,
)
_SECRET_IN_ADDRESS = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
# a name and its value behind an address, where short names of secrets are usual
_IN_QUERY = re.compile(r"([?&;#])([^=?&;#\s]+)=([^&;#\s]+)")
_SECRET_IN_QUERY = re.compile(r"(^|[_-])(key|sig|signature|sas|code|token)$", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer\s+)\S+", re.IGNORECASE)
MODES = ("yaml", "omegaconf+")  # of jsonargparse's parsers
HIDDEN = "***"
SUFFIXES = (".yaml", ".yml", ".json", ".jsonl")
# libyaml's, several times as fast, where it is there
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FUNCTION = re.compile(r"(specdec|torch\.optim|lightning)\.([\w]+\.)+[a-z_]\w*")


class Allowed(NamedTuple):
    """What the user allows for one command: modules, variables of the environment, keys of files."""

    imports: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        """The arguments that allow it again."""
        permitted = ((f"--allow_{name}", names) for name, names in self._asdict().items() if names)
        return [word for flag, names in permitted for word in (flag, ",".join(names))]


permissions = [Allowed()]
"""Of the command that runs, the last of them."""


def read_yaml_text(path: Path | str) -> str:
    """A YAML file's text; ValueError if it is none, larger than one that is read, no regular file, or
    damaged."""
    size = regular(path)
    check_sum(path)
    with open_regular(path) as stream, explained(path):
        raw = stream.read(MOST_YAML + 1)  # some files of the system are longer than they say
    if max(size, len(raw)) > MOST_YAML:
        raise ValueError(
            f"{path}: {max(size, len(raw)):,} bytes or more, and no YAML of over {MOST_YAML:,} is read"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error


def load_yaml(text: str, name: Path | str, load: Callable[[str], Any] | None = None) -> Any:
    """What a YAML text says; ValueError with ``name``, and the line, if it is not YAML or would grow endlessly."""
    try:
        check_yaml_size(text)
        return load(text) if load else parse_yaml(text)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = (
            getattr(error, "problem", None) or " ".join(str(error).split()) or type(error).__name__
        )
        raise ValueError(
            f"{name}{f', line {mark.line + 1}' if mark else ''}: not valid YAML: {problem}"
        ) from error


def parse_yaml(text: str) -> Any:
    """Return what a YAML text says, as ``yaml.safe_load`` reads it."""
    return yaml.load(text, LOADER)  # noqa: S506  a safe one


def check_yaml_size(text: str) -> bool:
    """Return whether a YAML text is a mapping, or empty.

    Raises:
        ValueError: it holds more values, or deeper ones, than any config.
        yaml.YAMLError: it is no YAML.
    """
    plain = False
    if len(text) > MOST_YAML:
        raise ValueError(f"{len(text):,} letters, and no more than {MOST_YAML:,} are read")
    # of anchors; and how often ${...} may repeat anything at most
    sizes = dict[str, int]()
    copies = 1
    open_: list[list[Any]] = [[None, 0, 0]]  # collections: anchor, size, values with references
    for event in yaml.parse(text, LOADER):
        size = 0
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(str(event.anchor), 1)
            if event.anchor in [anchor for anchor, *_ in open_]:
                raise ValueError(f"*{event.anchor} stands within &{event.anchor}, without end")
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            references = event.value.count("${")
            copies *= max(references, 1)
            open_[-1][2] += bool(references)
            sizes |= {event.anchor: 1} if event.anchor else {}
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append([event.anchor, 1, 0])
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size, references = open_.pop()
            sizes |= {anchor: size} if anchor else {}
            open_[-1][2] += references
            copies *= max(references, 1) if len(open_) > 1 else 1
        plain = plain or (
            len(open_) == 1 and bool(size) and not isinstance(event, yaml.MappingEndEvent)
        )
        open_[-1][1] += size
        if open_[-1][1] > MOST_NODES:
            raise ValueError(f"more than {MOST_NODES:,} values, those that aliases repeat included")
        if len(open_) > DEEPEST:
            raise ValueError(f"more than {DEEPEST - 1} collections in each other")
        if copies > MOST_COPIES:
            raise ValueError("its ${...} could repeat each other without measure")
    return not plain


def check_reach(value: Any, name: Path | str) -> None:
    """Raise ValueError if data of a file, or its dotted keys, reach what only the command line may; ``name`` is the
    file's, for the message."""
    for place, needs, why in reaching_keys(value):
        if needs is None:
            raise ValueError(f"{name}: {place}: {why}")
        if needs not in permissions[-1].keys:
            raise ValueError(
                f"{name}: {place} is taken from the command line alone ({why}): remove it, or if you trust this file, "
                f"add --allow_keys {needs}"
            )


def flags_of_keys(keys: Collection[str]) -> list[str]:
    """The arguments that allow again what is allowed now, and these keys."""
    return permissions[-1]._replace(keys=tuple(sorted({*permissions[-1].keys, *keys}))).flags()


def reaching_keys(value: Any, key: str = "") -> Iterator[tuple[str, str | None, str]]:
    """The dotted keys that reach out, what has to be allowed for each (None: nothing helps), and why."""
    last = key.rpartition(".")[2].removesuffix("+")
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from reaching_keys(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for child in value:
            yield from reaching_keys(child, key)
    elif last in REACH and value not in (False, None, "", "127.0.0.1"):
        yield key, last, REACH[last]
    elif last in PLACES and isinstance(value, str) and _leads_out(value):
        yield key, last, "it lies outside the run's directory"
    elif not isinstance(value, str):
        return
    elif value.rpartition(".")[2] in REPORTING:
        yield key, "logger", "it reports to a service, with the key of the environment"
    elif "://" in value:
        yield key, last, "it is an address, which may be contacted"
    elif _FUNCTION.fullmatch(value) and not value.endswith(SUFFIXES):
        yield key, None, f"{value} is a function: a file may name classes alone"


def _leads_out(text: str) -> bool:
    """Whether a path, whose variables and ``~`` some loggers resolve, is absolute or goes up."""
    path = Path(os.path.expanduser(os.path.expandvars(text)))
    return path.is_absolute() or ".." in path.parts


def redacted(value: Any, name: str = "") -> Any:
    """The same without what is a secret by the last word of its dotted name, or in an address by its place before the
    host or the name of its parameter.

    Of a list of words, as of a command line, the word behind such an option and what stands in ``{...}`` too.
    """
    if isinstance(value, Mapping):
        return {key: redacted(child, str(key)) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(child, name) for child in value]
    if not isinstance(value, str) or not value:
        return value
    if SECRET_NAME.search(name.rpartition(".")[2]):
        return HIDDEN
    value = _BEARER.sub(rf"\g<1>{HIDDEN}", value)
    if "://" not in value:
        return value
    return _IN_QUERY.sub(_without_secret, _SECRET_IN_ADDRESS.sub(HIDDEN, value))


def _without_secret(match: re.Match[str]) -> str:
    """Return a name and its value of an address, a secret's value as stars."""
    mark, name, _ = match.groups()
    is_secret = SECRET_NAME.search(name) or _SECRET_IN_QUERY.search(name)
    return f"{mark}{name}={HIDDEN}" if is_secret else match[0]


def redacted_words(words: Sequence[str]) -> list[str]:
    """A command line without secrets: see :func:`redacted`; values in ``{...}`` are looked into."""
    out = list[str]()
    behind = ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("-") else (behind, "", word)
        if equals or not word.startswith("-"):
            plain = None
            if value.lstrip().startswith(("{", "[")):
                with contextlib.suppress(ValueError):
                    plain = load_yaml(value, option)
            hidden = redacted(plain, option)
            value = redacted(value, option) if plain == hidden else json.dumps(hidden)
            word = f"{option}={value}" if equals else value
        out.append(word)
        behind = "" if equals else word.lstrip("-") if word.startswith("-") else behind
    return out


def _environment(name: str, *default: Any) -> Any:
    """``${oc.env:NAME}`` and ``${oc.env:NAME,default}``, whose name may itself be made of references."""
    if _SECRET_VARIABLE.search(name):
        raise ValueError(
            f"${{oc.env:{name}}} would write a secret of the environment into the saved config: remove it"
        )
    if name not in permissions[-1].env:
        raise ValueError(
            f"${{oc.env:{name}}} is not read: if you trust this config, add --allow_env {name}"
        )
    if (value := os.environ.get(name, *default)) is None and not default:  # null is a default too
        raise ValueError(f"${{oc.env:{name}}}: the environment has no {name}")
    return value


def _made(*given: Any) -> Any:
    raise ValueError(
        "${oc.create:...} and ${oc.decode:...} make values of unchecked text: remove it"
    )


def guard_yaml() -> None:
    """Let jsonargparse read its files through :func:`read_yaml_text` and its values through :func:`load_yaml`, refuse
    in them what only the command line may say, and resolve ``${...}`` as a file may; a value of an option's own is no
    mapping, and free."""
    # jsonargparse has no other place where a file is seen before all of it is in memory
    jsonargparse.Path.read_text = lambda self: _read_part(self.absolute)  # type: ignore[method-assign]
    for mode in MODES:
        set_loader(mode, _checked(_loader(mode)), (yaml.YAMLError,))
    for name, resolver in {"oc.env": _environment, "oc.create": _made, "oc.decode": _made}.items():
        OmegaConf.register_resolver(name, resolver, replace=True)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """For the length of a block, in which what has been read is written: jsonargparse loads the arguments of parts once
    more then, those of the command line too, which may say what no file may."""
    for mode in MODES:
        set_loader(mode, _loader(mode), (yaml.YAMLError,))
    try:
        yield
    finally:
        guard_yaml()


def _holds_mapping(value: Any) -> bool:
    """Whether it says something of options or parts: a mapping, or a list with one."""
    values = value if isinstance(value, list) else [value]
    return any(isinstance(child, Mapping) for child in values)


def _read_part(path: str) -> str:
    """Return the text of a file that jsonargparse takes for a part's.

    It tries every file that stands where a part may, those of training texts too. YAMLError if the file holds no
    options: then jsonargparse leaves the path as it is.
    """
    text = read_yaml_text(path)
    check_yaml_size(text)
    if not _holds_mapping(parse_yaml(text)):
        raise yaml.YAMLError(f"{path}: it holds no mapping of keys")
    return text


def _checked(load: Callable[[str], Any]) -> Callable[[str], Any]:
    def loader(text: str) -> Any:
        check_yaml_size(text)
        value = load(text)
        if _holds_mapping(value):
            check_reach(value, "config")
        return value

    return loader


@functools.cache
def _loader(mode: str) -> Callable[[str], Any]:
    """jsonargparse's own; omegaconf's is made when something is first parsed."""
    parser = ArgumentParser(parser_mode=mode)
    parser.add_argument("--any", type=dict)
    parser.parse_args(["--any={}"])
    return get_loader(mode)
