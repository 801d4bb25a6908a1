"""What specdec imports is declared in pyproject.toml."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# by the name under which it is imported
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "markdown_it": "markdown-it-py"}


def imported(path: Path) -> Iterator[str]:
    """Yield the names at the head of a file's imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def name_of(requirement: str) -> str:
    """Return a requirement's distribution, as an index compares names."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_every_import_of_another_library_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        # dev and docs are no user's
        *(line for name in extras.keys() - {"dev", "docs"} for line in extras[name]),
    ]
    declared = {name_of(requirement) for requirement in requirements}
    names = {name for path in (ROOT / "specdec").rglob("*.py") for name in imported(path)}
    outside = names - sys.stdlib_module_names - {"specdec"}
    assert {"torch", "numpy", "yaml"} <= outside
    missing = {name for name in outside if name_of(DISTRIBUTIONS.get(name, name)) not in declared}
    assert missing == set()
