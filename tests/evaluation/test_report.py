"""The table and the Markdown report of what ``metrics.json`` holds."""

from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import pytest
from rich.console import Console

from specdec.evaluation.metrics import Answer
from specdec.evaluation.results_figure import plot
from specdec.evaluation.results_page import evaluation_notes, evaluation_tables
from specdec.evaluation.run import print_results
from specdec.evaluation.summary import shape_summary
from specdec.report.plots import COLORS, GREY
from specdec.report.tables import write_report

FOUND = [
    Answer("a", "math", 5, (3, 0), (3, 3), 1.0, 2.0, 5, True),
    Answer("a", "math", 2, (1,), (3,), 0.5, 1.0, 2, False),
    Answer("b", None, 1, (0,), (3,), 0.5, 0.5, 1, None),
]


def reported(folder: Path, metrics: dict[str, Any]) -> str:
    context = {name: metrics[name] for name in ("target", "provenance") if name in metrics}
    write_report(
        folder / "report.md",
        "Evaluation",
        evaluation_notes(metrics),
        [],
        evaluation_tables(metrics),
        context,
    )
    return (folder / "report.md").read_text()


@pytest.fixture
def result() -> dict[str, Any]:
    return shape_summary("tree[b|$]", {"class_path": "DynamicTree", "depth": 3}, FOUND)


def test_summary_by_hand(result: dict[str, Any]) -> None:
    length, rate, drafts, pooled, without = (
        result.pop(key)
        for key in (
            "acceptance_length", "draft_acceptance_rate", "drafts_per_pass", "speedup_interval",
            "acceptance_length_without_looping",
        )
    )  # fmt: skip
    assert without == length
    assert length["mean"] == 2 and 1 <= length["low"] < 2 < length["high"]
    assert drafts["mean"] == 3
    assert rate["mean"] == pytest.approx(1 / 3) and 0 <= pooled["low"] < pooled["high"]
    positions = result.pop("accepted_per_position_interval")
    # two prompts, of which one alone reaches position 2
    assert positions["joint"][0] == {"low": 0.0, "high": 1.0}
    assert positions["conditional"][1:] == [{"low": None, "high": None}] * 2
    rates = result.pop("tokens_per_second_interval")
    assert 0 <= rates["speculative"]["low"] < 4 < rates["speculative"]["high"]
    assert rates["plain"]["low"] < 8 / 3.5 < rates["plain"]["high"]
    assert result == {
        "shape": "tree[b|$]",
        "shape_config": {"class_path": "DynamicTree", "depth": 3},
        "prompts": 2,
        "answers": 3,
        "tokens": 8,
        "passes": 4,
        "accepted_per_position": {"joint": [0.5, 0.25, 0.25], "conditional": [0.5, 0.5, 1.0]},
        "histogram": [2, 1, 0, 1],
        "tokens_per_second": {"speculative": 4.0, "plain": 8 / 3.5},
        "speedup": pytest.approx(4.0 / (8 / 3.5)),
        "pass_time": {"draft_ms": None, "verify_ms": None},
        "looping_answers": 0,
        "looping_share": 0.0,
        "acceptance_length_looping": None,
        "identical_outputs": 1,
        "compared_outputs": 2,
        "by_region": {},
        "by_category": {
            "math": {
                "prompts": 1,
                "passes": 3,
                "acceptance_length": {"mean": 7 / 3, "low": None, "high": None},
                "speedup": 2.0,
                "speedup_interval": {"low": None, "high": None},
            }
        },
    }
    with pytest.raises(ValueError, match="no target pass"):
        shape_summary("chain", {}, [])


def test_the_report_says_it_all(tmp_path: Path, result: dict[str, Any]) -> None:
    facts = {
        "command": "specdec evaluate --x y",
        "git_commit": "abc123",
        "versions": {"torch": "2"},
    }
    metrics = {"results": [result], "target": "tiny", "provenance": facts}
    metrics["skipped"] = [{"prompt_id": "a|b", "reason": "too long"}]
    text = reported(tmp_path, metrics)
    low, high = result["acceptance_length"]["low"], result["acceptance_length"]["high"]
    fast = "1.75x [{low:.2f}, {high:.2f}]".format(**result["speedup_interval"])
    for part in (
        f"| tree[b\\|$] | 2 | 2.00 [{low:.2f}, {high:.2f}] | 4.0 | 2.3 | {fast} | 1 of 2 |",
        "| tree[b\\|$] | 3 | 0.250 | 1.000 |",
        "| tree[b\\|$] | math | 1 | 2.33 | 2.00x |", "Intervals from 2 prompts are wide",
        "| target | tiny |", "specdec evaluate --x y",
        "## Prompts left out\n\n| Prompt | Reason |\n| --- | --- |\n| a\\|b | too long |\n",
    ):  # fmt: skip
        assert part in text, part


def test_the_report_of_little(tmp_path: Path) -> None:
    bare = shape_summary("chain", {}, [Answer("a", None, 1, (0,), (2,), 1.0, 0.0, 0, None)])
    text = reported(tmp_path, {"results": [bare]})
    assert "| chain | 1 | 1.00 | 1.0 | - | - | not compared |" in text
    assert "No interval: that over prompts takes at least 2, and there was 1." in text
    assert not any(heading in text for heading in ("By category", "left out"))


def test_the_table_on_the_terminal(result: dict[str, Any]) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        print_results({"results": [result]}, console)
    shown = capture.get()
    assert "tree[b|$]" in shown  # not swallowed as markup
    assert all(part in shown for part in ("2.00 [", "1.75x", "1 of 2", "take at least 10"))


def test_the_picture_of_an_evaluation_has_every_color(
    tmp_path: Path, result: dict[str, Any]
) -> None:
    bare = shape_summary("chain", {}, [Answer("a", None, 1, (0,), (2,), 1.0, 0.0, 0, None)])
    plot({"results": [result, bare]}, tmp_path / "report.png")
    pixels = matplotlib.image.imread(tmp_path / "report.png")
    for color in (COLORS[0], COLORS[1], GREY):  # both shapes and plain decoding
        assert (abs(pixels[..., :3] - matplotlib.colors.to_rgb(color)).max(-1) < 0.05).any()


def test_answers_that_repeat_themselves_are_warned_of(tmp_path: Path) -> None:
    """At 2 of 40 answers, with the acceptance length of the other 38."""
    one, loop = (
        Answer("a", None, 2, (1,), (3,), 1.0, 2.0, 2, True, loops=loops) for loops in (False, True)
    )
    most = [one._replace(prompt_id=str(n)) for n in range(38)]
    two = [loop._replace(prompt_id=f"loop-{n}", accepted=(3,)) for n in range(2)]
    found = shape_summary("chain", {}, [*most, *two])
    assert (found["looping_answers"], found["looping_share"]) == (2, 0.05)
    assert (
        found["acceptance_length_looping"]["mean"] == 4
        and found["acceptance_length_without_looping"]["mean"] == 2
    )
    assert "Warning: chain: 5% of the answers repeat themselves" in reported(
        tmp_path, {"results": [found]}
    )
    assert "acceptance length 2.10, without them 2.00" in reported(tmp_path, {"results": [found]})
    fewer = shape_summary("chain", {}, [*most, most[0]._replace(prompt_id="x"), *two[:1]])
    assert "Warning" not in reported(tmp_path, {"results": [fewer]})
    alone = shape_summary("chain", {}, two)
    assert alone["acceptance_length_without_looping"] is None
    assert "without them of no answer" in reported(tmp_path, {"results": [alone]})
