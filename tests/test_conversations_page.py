"""The page of conversations quotes messages as the package has them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "conversations.md"
FILES = [*(ROOT / "specdec" / "data").glob("*.py"), ROOT / "specdec" / "utils" / "reading.py"]


def strings() -> str:
    """Every string of the files, one a line; of an f-string its parts, with ``...`` for what is filled in."""
    out = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "..." for part in node.values
                ]
                out.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                out.append(node.value)
    return "\n".join(out)


def quoted() -> list[str]:
    """The messages in the first column of the tables."""
    section = PAGE.read_text().partition("\n## Messages and what to do\n")[2]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def test_every_quoted_message_is_one_of_the_package() -> None:
    known = strings()
    assert len(quoted()) > 25
    filled_in = {"weight, train, loss", "NoneType", "'tools'"}  # words that the package puts in
    missing = []
    for message in quoted():
        for word in filled_in:
            message = message.replace(word, "...")
        fragments = [fragment.strip(" ()") for fragment in message.split("...")]
        missing += [
            fragment for fragment in fragments if len(fragment) > 3 and fragment not in known
        ]
    assert not missing, missing
