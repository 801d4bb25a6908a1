"""The hash of the code that decides a job's numbers.

A result may be used again only if the present code would give it again. So a key has the code of the packages that
compute, not specdec's version, which changes neither with every change nor only with changes that matter. Docstrings,
comments and layout are left out: the hash is of the syntax tree. Parts of the user's own count as a whole, module or
package, and so do the libraries' versions.
"""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

from specdec import imports

FOUNDATION = ("nn", "drafter", "target", "data", "features", "embedded", "optimizers.py")
DECODING = (*FOUNDATION, "decoding", "evaluation")
PACKAGES = {
    "cache": ("nn", "target", "data", "features", "embedded", "extraction"),
    "fit": (*FOUNDATION, "training", "fit.py"),
    "evaluate": DECODING,
    "drift": (*DECODING, "drift"),
    "robustness": (*DECODING, "robustness"),
}
LIBRARIES = ("torch", "lightning", "transformers", "tokenizers")


@functools.cache
def code_of(kind: str, vouched: tuple[str, ...] = ()) -> dict[str, Any]:
    """Hash and versions, for the key of a job of this kind.

    Args:
        vouched: modules of the user's that configs may name.
    """
    return {
        "code": _hash([_code(Path(__file__).parents[1] / name) for name in PACKAGES[kind]]),
        "own": {name: _hash(_code(_place(name))) for name in sorted(vouched)},
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def vouched() -> tuple[str, ...]:
    """The user's modules that this process allows configs to name."""
    found = imports.flags()
    return tuple(found[1].split(",")) if found else ()


def essence(text: str) -> str:
    """A module's syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return ast.dump(tree)


def _code(place: Path) -> list[list[str]]:
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    named = ((file.relative_to(place.parent).as_posix(), file) for file in files)
    return [[name, _hash(essence(file.read_text(encoding="utf-8")))] for name, file in named]


def _place(module: str) -> Path:
    """Of a module its file, of a package its folder."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, f"{module} has been imported"
    file = Path(found.origin)
    return file.parent if file.name == "__init__.py" else file


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
