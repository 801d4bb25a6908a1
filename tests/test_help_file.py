"""``specdec/help.json``, which answers misspelled options before anything is imported."""

import importlib.util
import json
from pathlib import Path

import pytest

from specdec.commands.known import HELP, installed_version

SCRIPT = Path(__file__).parents[1] / "docs/write_help.py"


def test_it_is_what_the_commands_and_classes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class or an option that it lacks would be answered with "there is no ...": run python docs/write_help.py."""
    stored = json.loads(HELP.read_text(encoding="utf-8"))
    for library, version in stored["versions"].items():
        if installed_version(library) != version:
            pytest.skip(f"it was written with {library} {version}, whose options differ")
    monkeypatch.setenv("COLUMNS", "100")
    spec = importlib.util.spec_from_file_location("write_help", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    current = json.loads(script.help_content())
    for part, content in current.items():
        different = [name for name in content if content[name] != stored[part].get(name)]
        assert different == [], f"{part}: run python docs/write_help.py"
    assert current == stored
