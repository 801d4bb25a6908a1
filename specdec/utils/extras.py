"""Packages that few need, which are installed with an extra of specdec's."""

import importlib.util


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; it is not imported."""
    return importlib.util.find_spec(package) is not None


def require(package: str, extra: str, purpose: str) -> None:
    """Raise ValueError, with the line that installs it, if a package is not installed.

    Args:
        package: the name under which it is imported.
        extra: of specdec's, that brings it.
        purpose: what needs it, the message's beginning.
    """
    if not is_installed(package):
        raise ValueError(
            f"{purpose} needs the package {package}: pip install 'specdec-lightning[{extra}]'"
        )
