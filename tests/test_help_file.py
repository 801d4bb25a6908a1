"""``specdec/help.json``, which answers misspelled options before anything is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.commands.known import HELP, installed_version

SCRIPT = Path(__file__).parents[1] / "docs/write_help.py"


def test_it_is_what_the_commands_and_classes_are() -> None:
    """A class or an option that it lacks would be answered with "there is no ...": run python docs/write_help.py."""
    stored = json.loads(HELP.read_text(encoding="utf-8"))
    for library, version in stored["versions"].items():
        if installed_version(library) != version:
            pytest.skip(f"it was written with {library} {version}, whose options differ")
    # a process of its own: other tests define parts here, which would be named too
    code = "import sys, runpy; sys.stdout.write(runpy.run_path(sys.argv[1])['help_content']())"
    result = subprocess.run(
        [sys.executable, "-c", code, str(SCRIPT)],
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    current = json.loads(result.stdout)
    for part, content in current.items():
        different = [name for name in content if content[name] != stored[part].get(name)]
        assert different == [], f"{part}: run python docs/write_help.py"
    assert current == stored
