"""Text of data in reports: shown as it is, whatever it holds."""

import random
import re
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from specdec.report.tables import ReportTable, markdown_text, print_report, write_report
from specdec.utils.text import printable

HOSTILE = (
    "<img src=x onerror=alert(1)>", "</td></table><script>alert(1)</script>", "[click](javascript:alert(1))",
    "![p](http://evil/p.png)", "[a]: http://evil/", "[a][b]", "<http://evil/>", "<javascript:alert(1)>", "&lt;b&gt;",
    "**bold**", "`code`", "__bold__", "\\[x](y)", "\\", "|", "a|b", "\x1b[31mred", "\x9b2J", "\x1b]8;;http://evil/\x07x",
    "\u202etxt", "\r", "\n\n# Title\n\n", "\n- item", "\n```\n", "[[x]](y)", "![[a](b)](c)", "]",
    "(", "2.53 [2.28, 2.79]",
    "[red]rich[/red]", "[link=http://evil/]x[/link]", "*", "2.0*",
    "_em_", "_", "a_b_", "(_em_)", "___", "~~gone~~", "~gone~", "~~~", "# h", "####", "- item", "-", "---", "- - -",
    "+ item", "* item", "> quote", ">", "1. item", "12)", "===",
)  # fmt: skip
TAGS = {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td"}


PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def hostile(draw: random.Random) -> str:
    return draw.choice(["", " "]).join(draw.choices(HOSTILE, k=draw.randint(1, 4)))


def plain(text: str) -> str:
    """What of a text can be shown on one line."""
    return " ".join(printable(text).split())


@pytest.mark.parametrize("seed", range(60))
def test_a_report_shows_hostile_text_and_obeys_none(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    texts = [hostile(draw) for _ in range(6)]
    table = ReportTable("By category", ["Category", "Prompts"], [[text, "1"] for text in texts])
    path = tmp_path / "report.md"
    write_report(path, "Evaluation", [f"Warning: {texts[0]}"], [], [table], {"prompts": texts[1]})
    markdown = path.read_text()
    assert printable(markdown) == markdown
    html = PARSER.render(markdown)
    assert set(re.findall(r"<(\w+)", html)) <= TAGS and html.count("<h2>") == 2
    assert "href" not in html and "src" not in re.sub(r"&lt;img src", "", html)
    cells = [unescape(text) for text in re.findall(r"<td>(.*?)</td>", html)]
    assert [plain(text) for text in texts] == cells[: len(texts)]


@pytest.mark.parametrize("text", [*HOSTILE, *map(hostile, map(random.Random, range(300)))])
def test_a_paragraph_is_its_text_alone(text: str) -> None:
    html = PARSER.render(markdown_text(text))
    assert "<" not in html.removeprefix("<p>").removesuffix("</p>\n")
    assert unescape(html.removeprefix("<p>").removesuffix("</p>\n")) == plain(text)


def test_what_is_no_syntax_stays_readable() -> None:
    for text in (
        "2.53 [2.28, 2.79]",
        "eagle3_1",
        "chain:depth=3",
        "1.20x",
        "2.00*",
        "a/b.jsonl",
        "p > 0.05",
        "-0.5",
        "#1",
    ):
        assert markdown_text(text) == text
    assert markdown_text("a | b\nc") == "a \\| b c"


def test_a_terminal_shows_titles_and_headings_as_they_are() -> None:
    stream = StringIO()
    console = Console(file=stream, width=120, force_terminal=True)
    table = ReportTable(
        "[red]T[/red]", ["[link=http://evil/]x[/link]", "\x1b]8;;y\x07"], [["[b]1", "2"]]
    )
    print_report([table], ["[red]note"], console)
    text = stream.getvalue()
    assert "\x1b]8" not in text
    for part in ("[red]T[/red]", "[link=http://evil/]x[/link]", "[b]1", "[red]note"):
        assert part in text
