"""The table of ``docs/export.md``, out of the one that the exporter goes by: ``python -m specdec.export.page FILE``."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.export.switches import ENGINES, SWITCHES, Switch
from specdec.files import write_text

BEGIN, END = "<!-- engine matrix -->", "<!-- end -->"


def matrix() -> str:
    """The engine matrix as Markdown."""
    rows = [[switch.name, *(_cell(switch, engine) for engine in ENGINES)] for switch in SWITCHES]
    return "\n".join(_table(["switch", *ENGINES], rows))


def _cell(switch: Switch, engine: str) -> str:
    if reason := switch.lacks(engine):
        return f"**no**: {reason}"
    return f"yes, since {switch.since(engine)}" if switch.since(engine) else "yes"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows)]


def renewed(page: str) -> str:
    """A page with the matrix between its marks."""
    return re.sub(f"(?s){BEGIN}.*{END}", lambda _: f"{BEGIN}\n{matrix()}\n{END}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write_text(path, renewed(path.read_text(encoding="utf-8")))
