"""The site's navigation has every page and every package; the gate builds it with warnings as errors."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


class Loader(yaml.SafeLoader):
    """With the tag that the builder knows beside YAML's own."""


Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))


def pages(nav: Any) -> list[str]:
    """The pages that a navigation names, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for one in (nav.values() if isinstance(nav, dict) else nav) for page in pages(one)]


NAV = pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])  # noqa: S506  a SafeLoader


def test_every_page_is_in_the_navigation() -> None:
    docs = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert docs | {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= set(NAV)
    assert len(NAV) == len(set(NAV))


def test_every_package_has_its_page_of_the_reference() -> None:
    packages = {path.parent.name for path in (ROOT / "specdec").glob("*/__init__.py")}
    reference = {Path(page).stem for page in NAV if page.startswith("reference/")}
    assert reference == packages | {"index", "command_line"}
