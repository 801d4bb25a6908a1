"""Which modules a config may name classes of.

A ``class_path`` imports a module and calls what it finds there, and configs are passed around. So jsonargparse is told
to import nothing that a value names, except from what trains a drafter here and from modules that the user vouches
for on the command line or in the environment, never in a config. It looks at every name before it imports it, and
afterwards at where the thing was defined, so that ``specdec.utils.files.os.system`` is refused like ``os.system``.
"""

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence

from jsonargparse import set_parsing_settings

# parts, data; optimizers; callbacks, loggers, plugins, strategies. All of torch would bring its loaders of pickles
DEFAULT = ("specdec", "torch.optim", "lightning.pytorch", "lightning.fabric")
FLAG, VARIABLE = "--allow_imports", "SPECDEC_ALLOW_IMPORTS"

_vouched: list[str] = []


def guard() -> None:
    """Make jsonargparse refuse every import that is not allowed; call it before any value is parsed."""
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*DEFAULT, *_vouched],
        omegaconf_absolute_to_relative_paths=True,  # below a sub-command too
        instantiate_subclass_spec_in_any=False,  # else any class could be built where a parameter is not annotated
    )


@contextlib.contextmanager
def allowing(modules: Sequence[str]) -> Iterator[None]:
    """For the length of a block, let values name what lies in these modules, and import them, so that a saved drafter
    finds its parts.

    The working folder becomes importable, behind whatever is installed: nothing in it can stand in for a library.
    ValueError if one is no module, or cannot be imported.
    """
    vouched, path = list(_vouched), list(sys.path)
    try:
        if modules and not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
        importlib.invalidate_caches()
        for module in modules:
            _import(module)
            _vouched.append(module)
        guard()
        yield
    finally:
        if added := set(_vouched) - set(vouched):
            set_parsing_settings(import_path_denylist=sorted(added))
            _vouched[:] = vouched
        sys.path[:] = path


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except (ImportError, SyntaxError) as error:
        raise ValueError(
            f"{FLAG} {module}: it cannot be imported: {error}; give modules, not classes, that are installed or lie in "
            f"{os.getcwd()}"
        ) from error


def ensure(class_path: str) -> None:
    """Import the module of a saved part, if the user has vouched for it or for a package around it; else do nothing."""
    module = class_path.rpartition(".")[0]
    if any(f"{module}.".startswith(f"{name}.") for name in _vouched):
        _import(module)


def take(args: list[str]) -> tuple[list[str], list[str]]:
    """The modules that ``--allow_imports`` and ``$SPECDEC_ALLOW_IMPORTS`` name, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(FLAG, action="append", default=[os.environ.get(VARIABLE, "")])
    try:
        found, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ValueError(f"{FLAG} needs a module's name: {FLAG} my_package") from error
    return list(dict.fromkeys(re.findall(r"[^\s,]+", ",".join(found.allow_imports)))), rest


def flags() -> list[str]:
    """The arguments that allow again what is allowed now, for the record of a command."""
    return [FLAG, ",".join(_vouched)] if _vouched else []


def refusal(message: str) -> str | None:
    """A line that says what was refused, if that is what a parser's message is about; it begins with the name."""
    found = re.search(r"Importing '([^']+)' is not allowed", message)
    if found is None:
        return None
    path, key = found[1], re.search(r"(?:Parser key|argument) [\"'-]*([\w.]+)", message)
    module, _, last = path.rpartition(".")
    where = f"{path} ({key[1]})" if key else path
    if last in ("yaml", "yml", "json"):
        return f"{where}: no such file"
    if module.split(".")[0] in sys.stdlib_module_names:
        return f"{where} was not imported: Python's own modules hold no part, and some run commands: remove it"
    names = ", ".join((*DEFAULT, *_vouched))
    return f"{where} was not imported: only {names} may be named; if you trust {module}, add {FLAG} {module}"
