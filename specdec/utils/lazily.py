"""Names of a package that are imported when they are first asked for: a heavy library costs only those who use it."""

import importlib
import sys
from collections.abc import Callable, Mapping


def imported_when_asked_for(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module's ``__getattr__`` for names by the module that each lies in."""

    def attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return attribute
