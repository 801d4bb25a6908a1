"""Pages, messages and docstrings are in plain American English: idioms, long sentences and hidden actors fail."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A card of a study or model is written by a command, and chat_templates.md by its benchmark.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "studies" / "README.md",
]  # fmt: skip
CODE = sorted((ROOT / "specdec").rglob("*.py"))

MAX_WORDS = 35  # of a sentence
MAX_PASSIVES = 22  # in 1,000 words, of those that do not say who acts

IDIOMS = {
    r"(?<!in place )\bof (its|their|your|his|one's|our) own"
    r"(?=\W*$|[.,;:)]|\s+(and|or|in|with|for|is|that|to|as|on|by|at|if|takes|makes)\b)": "its own X, a separate X",
    r"\bof (yours|ours|theirs)\b": "your X, our X",
    r"\banew\b": "again",
    r"\b(goes|go|gone|going|went) on\b": "resumes, continues",
    r"\btold apart\b": "significantly different",
    r"\b(refused|named|known) by name\b": "fails with an error that names it",
    r"\bbeside\b": "next to, in addition to, compared with",
    r"\bwants?\b(?! to\b)": "needs",
    r"\bbut for\b": "except for",
    r"\bheld against\b": "compared with",
    r"\bcomes? of\b": "results from, is the result of",
    r"\b(is|are|was|were) told\b": "gets, receives, knows",
    r"\bso many\b": "this many, N",
    r"\bpart of (your|one's|a user's) own\b": "custom component",
    r"\bnobody (?!else\b)": "no one, nothing, or name who",
    r"\b(thereof|thereby|wherein|hence)\b": "rewrite",
    r"\bhardly\b": "barely, almost no",
    r"\bforgotten\b": "missing, discarded",
    r"\b(\w+)s?, (which|that) is none\b": "that is not a ...",
    r"\bworked out\b": "computed",
    r"\b\w*(normalis|minimis|maximis|optimis|recognis|quantis|initialis|summaris|generalis|tokenis|serialis|organis|"
    r"materialis|parallelis|finalis)(e|es|ed|ing|ation|er)\b": "American spelling: -ize",
    r"\b(colour|behaviour|favour|centre|neighbour|honour|licence|catalogue|grey|artefact|learnt|whilst)\w*\b":
        "American spelling",
}  # fmt: skip
PASSIVE = re.compile(
    r"\b(is|are|was|were|been|being|be) (?:\w+ly )?\w+(?:ed|wn|ten|ken|ade|ept|ught|ound)\b(?! by\b)",
    re.I,
)


def prose(text: str) -> str:
    """Return a page's running text: no code, tables, front matter, headings or link targets."""
    text = re.sub(r"^(```+|~~~+).*?^\1\s*$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(\||#|    ).*$", "\n", text, flags=re.MULTILINE)
    return re.sub(r"https?://\S+", "LINK", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of running text; a list's item ends one, as a colon before a list does."""
    for block in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text):
        line = " ".join(block.split())
        line = re.sub(r"\b(e\.g|i\.e|etc|vs|Fig|Eq|cf)\.", r"\1", line)
        yield from filter(None, re.split(r"(?<=[.!?;:])[\"')*]*\s+", line))


def word_count(sentence: str) -> int:
    return len(re.findall(r"[A-Za-z][\w'-]*", sentence))


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_page_has_no_idiom_of_its_own(page: Path) -> None:
    text = prose(page.read_text())
    idioms = [
        f"{match[0]!r}: say {better}"
        for pattern, better in IDIOMS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert not idioms, f"{page_name(page)}:\n" + "\n".join(idioms)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_sentence_of_a_page_is_long(page: Path) -> None:
    long = [s for s in sentences(prose(page.read_text())) if word_count(s) > MAX_WORDS]
    assert not long, f"{page_name(page)}:\n" + "\n".join(
        f"{word_count(s)} words: {s}" for s in long
    )


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_page_says_who_acts(page: Path) -> None:
    text = prose(page.read_text())
    hidden = [match[0] for match in PASSIVE.finditer(text)]
    rate = 1000 * len(hidden) / max(1, word_count(text))
    assert rate <= MAX_PASSIVES, f"{page_name(page)}: {rate:.0f} in 1,000 words: {hidden}"


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and messages of a file, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def test_no_docstring_or_message_has_an_idiom() -> None:
    idioms = [
        f"{page_name(path)}:{line}: {match[0]!r}: say {better}"
        for path in CODE
        for line, text in texts_of(path)
        for pattern, better in IDIOMS.items()
        for match in re.finditer(pattern, re.sub(r"``?[^`]+``?", "CODE", text), re.IGNORECASE)
    ]
    assert not idioms, f"{len(idioms)}:\n" + "\n".join(idioms)


@pytest.mark.parametrize(
    "idiom",
    [
        "It runs in a process of its own.", "A loss of yours is a class.", "It is built anew.", "The run goes on.",
        "They are not told apart.", "Others are refused by name.", "It stands beside the file.", "It wants a number.",
        "Equal but for rounding.", "It is held against the model.", "All come of one call.", "The engine is told.",
        "It takes so many rows.", "Nobody reads it.", "It hardly matters.", "It is worked out once.",
        "The normalised state.", "The colour of a line.",
    ],
)  # fmt: skip
def test_planted_idioms_are_found(idiom: str) -> None:
    assert any(re.search(pattern, idiom, re.IGNORECASE) for pattern in IDIOMS)


def test_planted_sentences_are_found() -> None:
    page = "A short one. " + "word " * 36 + "ends.\n\n| a table of " + "cell " * 40 + "|\n"
    assert [word_count(s) for s in sentences(prose(page)) if word_count(s) > MAX_WORDS] == [37]
    assert PASSIVE.search("The file is written.") and not PASSIVE.search(
        "The file is written by fit."
    )
