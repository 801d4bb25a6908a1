"""The package's own names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import specdec


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, specdec; print({'torch', 'lightning', 'transformers', 'jsonargparse'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@pytest.mark.parametrize("name", specdec.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    assert getattr(specdec, name).__doc__ and name in dir(specdec)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(specdec.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        name.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == specdec._HOMES and {"__version__", *seen} == set(specdec.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Drafters' from 'specdec'"):
        from specdec import Drafters  # type: ignore[attr-defined]  # noqa: F401
