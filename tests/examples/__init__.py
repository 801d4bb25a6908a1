"""The files of ``examples/``, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load_example(file: Path) -> ModuleType:
    """Run a file that lies in no package."""
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
