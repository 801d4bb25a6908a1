"""Which modules a config may name classes of.

A ``class_path`` imports a module and calls what it finds there, and configs are passed around. So jsonargparse must
import nothing that a value names, except from what trains a drafter here and from modules that the user vouches for
on the command line or in the environment, never in a config. It looks at every name before it imports it, and
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

from specdec.utils import trust
from specdec.utils.trust import Allowed

# parts, data; optimizers; callbacks, loggers, ... All of torch or lightning would bring their loaders of pickles
DEFAULT = (
    "specdec", "torch.optim", "lightning.pytorch.cli.ReduceLROnPlateau",
    *(f"lightning.pytorch.{name}" for name in
      ("accelerators", "callbacks", "loggers", "plugins", "profilers", "strategies")),
    *(f"lightning.fabric.{name}" for name in ("accelerators", "loggers", "plugins", "strategies")),
)  # fmt: skip
SHORT = ("specdec", "torch.optim", "parts of lightning.pytorch", "lightning.fabric")
FLAG = "--allow_imports"
VARIABLE = "SPECDEC_ALLOW_IMPORTS"
WANTED = {"imports": "a module's name: --allow_imports my_package", "env": "a variable's name: --allow_env DATA",
          "keys": f"a key: --allow_keys {next(iter(trust.REACH))}"}  # fmt: skip


def guard_parsers() -> None:
    """Make jsonargparse refuse every import that is not allowed; call it before any value is parsed."""
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*DEFAULT, *trust.permissions[-1].imports],
        omegaconf_absolute_to_relative_paths=True,  # below a sub-command too
        # else any class could be built where a parameter is not annotated
        instantiate_subclass_spec_in_any=False,
    )
    trust.guard_yaml()


@contextlib.contextmanager
def allowing(
    modules: Sequence[str], env: Sequence[str] = (), keys: Sequence[str] = ()
) -> Iterator[None]:
    """For the length of a block, let values name what lies in these modules, and import them, so that a saved drafter
    finds its parts; let configs read these variables of the environment, and give these keys.

    The working folder becomes importable, behind whatever is installed: nothing in it can stand in for a library.
    ValueError if one is no module, or cannot be imported.
    """
    path = list(sys.path)
    outer = trust.permissions[-1]
    depth = len(trust.permissions)
    try:
        if modules and not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
        importlib.invalidate_caches()
        for module in modules:
            _import(module)
        both = zip(outer, (modules, env, keys), strict=True)
        joined = [tuple(dict.fromkeys((*earlier, *added))) for earlier, added in both]
        trust.permissions.append(Allowed(*joined))
        guard_parsers()
        yield
    finally:
        if len(trust.permissions) > depth:  # else it failed before
            set_parsing_settings(
                import_path_denylist=sorted(
                    set(trust.permissions.pop().imports) - set(outer.imports)
                )
            )
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
    if any(f"{module}.".startswith(f"{name}.") for name in trust.permissions[-1].imports):
        _import(module)


def take_permissions(args: list[str]) -> tuple[Allowed, list[str]]:
    """What ``--allow_imports``, ``--allow_env`` and ``--allow_keys``, and the same in the environment as
    ``$SPECDEC_ALLOW_IMPORTS``, name, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in Allowed._fields:
        variable = VARIABLE.replace("IMPORTS", name.upper())
        parser.add_argument(
            f"--allow_{name}", action="append", default=[os.environ.get(variable, "")]
        )
    try:
        arguments, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        wanted = WANTED[str(error.argument_name).removeprefix("--allow_")]
        raise ValueError(f"{error.argument_name} needs {wanted}") from error
    lists = (
        dict.fromkeys(re.findall(r"[^\s,]+", ",".join(getattr(arguments, f"allow_{name}"))))
        for name in Allowed._fields
    )
    return Allowed(*map(tuple, lists)), rest


def flags() -> list[str]:
    """The arguments that allow again what is allowed now, for the record of a command."""
    return trust.permissions[-1].flags()


def refusal(message: str) -> str | None:
    """A line that says what was refused, if that is what a parser's message is about; it begins with the name."""
    if refused := re.search(trust.REFUSED, message):
        return refused[0]
    match = re.search(r"Importing '([^']+)' is not allowed", message)
    if match is None:
        return None
    path = match[1]
    key = re.search(r"(?:Parser key|argument) [\"'-]*([\w.]+)", message)
    module, _, last = path.rpartition(".")
    where = f"{path} ({key[1]})" if key else path
    if last in ("yaml", "yml", "json"):
        return f"{where}: no such file"
    if module.split(".")[0] in sys.stdlib_module_names:
        return f"{where} was not imported: Python's own modules hold no part, and some run commands: remove it"
    names = ", ".join((*SHORT, *trust.permissions[-1].imports))
    return f"{where} was not imported: only {names} may be named; if you trust {module}, add {FLAG} {module}"
