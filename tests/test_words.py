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


# names that say nothing of what they hold
EMPTY = {"one", "found", "kept", "given", "told", "theirs", "own", "made", "each", "before"}


def test_no_public_function_name_stands_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, twice


def test_no_variable_has_an_empty_name() -> None:
    empty = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.id}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY
    ]
    assert not empty, "\n".join(empty)


def test_functions_and_files_are_short() -> None:
    """Sixty lines for a function, four hundred for a file."""
    long = []
    for path in FILES:
        text = path.read_text()
        if text.count("\n") > 400:
            long.append(f"{path.relative_to(PACKAGE)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                long.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    assert not long, "\n".join(long)


def test_only_the_drafter_asks_how_it_drafts() -> None:
    """Elsewhere a :class:`specdec.drafting.DraftingMode` answers, whatever the way."""
    question = re.compile(
        r"recurrence\.(masks|parallel)\b|entry\.context\b|isinstance\([^)]*\b(BlockDrafting|Parallel|Chained)\b"
    )
    asked = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in FILES
        if path.relative_to(PACKAGE).parts[0] not in ("drafter", "drafting")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if question.search(line)
    ]
    assert not asked, asked


def test_nothing_private_of_torch_and_no_mock() -> None:
    private = re.compile(r"unittest\.mock|torch\._(inductor|dynamo|functorch|C)\b|torch\.optim\._")
    found = [str(path.relative_to(PACKAGE)) for path in FILES if private.search(path.read_text())]
    assert not found, found
