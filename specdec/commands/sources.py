"""What a module holds, from its source, which is read and not run."""

import ast
import importlib.util
import os
from importlib.machinery import PathFinder
from pathlib import Path

# a module that uses one of these may bind names that its source does not show
DYNAMIC = {
    "exec", "eval", "globals", "locals", "vars", "setattr", "__dict__", "__getattr__", "modules",
}  # fmt: skip


def source_of(path: str) -> tuple[Path | None, str]:
    """Return the file of the innermost module of an import path, and the name in it that comes next; import nothing.

    The file is None if it is not to be found, or is no Python source.
    """
    first, *names = path.split(".")
    try:
        spec = importlib.util.find_spec(first) or PathFinder.find_spec(first, [os.getcwd()])
    except (ImportError, ValueError):
        return None, ""
    while spec is not None and names:
        places = spec.submodule_search_locations or []
        inner = PathFinder.find_spec(f"{spec.name}.{names[0]}", places)
        if inner is None:
            break
        spec = inner
        del names[0]
    if spec is None or not (spec.origin or "").endswith(".py"):
        return None, ""
    return Path(str(spec.origin)), names[0] if names else ""


def names_in(file: Path) -> set[str] | None:
    """Return all names that a module's source binds; None if its source cannot tell."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.split(".")[0] for alias in aliases}
    return None if names & (DYNAMIC | {"*"}) else names
