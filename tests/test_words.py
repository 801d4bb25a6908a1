"""The package speaks the field's words, and no class name stands for two things."""

import ast
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "specdec"
FILES = sorted(PACKAGE.rglob("*.py"))

# what each would be called by whoever knows Hugging Face and EAGLE
BANNED = {
    r"\blaws?\b": "probs, distribution",
    r"\bsights?\b": "visibility, mask",
    r"\bkeeper\b": "supervise",
    r"\blesson\b": "training step",
    r"\banatomy\b": "model parts",
    r"\badopt(ed|s|ion)?\b": "import_checkpoint",
    r"\bwell_read\b": "token table",
    r"\bremade\b": "recompute",
    r"\bRoom\b": "DecodeSession",
    r"\bChance\b": "Sampling",
    r"\bWarp\b": "LogitsProcessor",
    r"\bteach(es|er_law)?\b": "training step",
}


def test_no_word_of_a_dialect() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {match[0]!r}: say {better}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for pattern, better in BANNED.items()
        if (match := re.search(pattern, line))
    ]
    assert not found, "\n".join(found)


def test_no_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, twice


def test_nothing_private_of_torch_and_no_mock() -> None:
    private = re.compile(r"unittest\.mock|torch\._(inductor|dynamo|functorch|C)\b|torch\.optim\._")
    found = [str(path.relative_to(PACKAGE)) for path in FILES if private.search(path.read_text())]
    assert not found, found
