import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.evaluation.record import Answer
from specdec.evaluation.report import print_results, write_metrics, write_report
from specdec.evaluation.summary import summary

FOUND = [
    Answer("a", "math", 5, (3, 0), (3, 3), 1.0, 2.0, 5, True),
    Answer("a", "math", 2, (1,), (3,), 0.5, 1.0, 2, False),
    Answer("b", None, 1, (0,), (3,), 0.5, 0.5, 1, None),
]


@pytest.fixture
def result() -> dict[str, Any]:
    return summary("tree[b|$]", {"class_path": "DynamicTree", "depth": 3}, FOUND)


def test_summary_by_hand(result: dict[str, Any]) -> None:
    intervals = {
        name: result.pop(name)
        for name in ("acceptance_length", "accepted_drafts", "draft_acceptance_rate", "speedup_per_prompt")
    }
    means = {
        "acceptance_length": 2.0,
        "accepted_drafts": 1.0,
        "draft_acceptance_rate": 1 / 3,
        "speedup_per_prompt": 1.5,
    }
    assert {name: found["mean"] for name, found in intervals.items()} == pytest.approx(means)
    length, pooled = intervals["acceptance_length"], result.pop("speedup_interval")
    assert 1 <= length["low"] < length["high"] <= 7 / 3
    assert 1 <= pooled["low"] < pooled["high"] <= 2
    assert result.pop("by_category") == {
        "math": {
            "prompts": 1,
            "passes": 3,
            "acceptance_length": {"mean": 7 / 3, "low": None, "high": None},
            "speedup": 2.0,
            "speedup_interval": {"low": None, "high": None},
        }
    }
    assert result == {
        "growth": "tree[b|$]",
        "growth_config": {"class_path": "DynamicTree", "depth": 3},
        "prompts": 2,
        "answers": 3,
        "tokens": 8,
        "passes": 4,
        "accepted_per_position": {"joint": [0.5, 0.25, 0.25], "conditional": [0.5, 0.5, 1.0]},
        "histogram": [2, 1, 0, 1],
        "tokens_per_second": {"speculative": 4.0, "plain": 8 / 3.5},
        "speedup": pytest.approx(4.0 / (8 / 3.5)),
        "pass_time": {"draft_ms": None, "verify_ms": None},
        "identical_outputs": 1,
        "compared_outputs": 2,
        "by_context": {},
    }


def test_a_category_without_a_pass_does_not_stop_the_summary() -> None:
    found = [*FOUND, Answer("c", "empty", 0, (), (), 0.0, 0.0, 0, None)]
    by_category = summary("chain", {}, found)["by_category"]
    assert list(by_category) == ["empty", "math"]
    assert by_category["empty"] == {
        "prompts": 1, "passes": 0, "acceptance_length": None, "speedup": None, "speedup_interval": None,
    }  # fmt: skip


def test_without_a_pass_there_is_no_summary() -> None:
    with pytest.raises(ValueError, match="no target pass"):
        summary("chain", {}, [])


def test_times_and_contexts_have_tables_where_they_were_recorded(tmp_path: Path) -> None:
    times = {"context": (100, 200), "draft_ms": (1.0, 3.0), "verify_ms": (4.0, 4.0)}
    timed = [answer._replace(accepted=(1, 0), drafted=(3, 3), **times) for answer in FOUND]
    result = summary("chain", {}, timed)
    assert result["pass_time"]["draft_ms"]["mean"] == 2.0
    assert {tokens: part["acceptance_length"]["mean"] for tokens, part in result["by_context"].items()} == {
        "0-127": 2.0, "128-255": 1.0,
    }  # fmt: skip
    text = write_report(tmp_path, {"results": [result]}).read_text()
    assert "| chain | 2.00 ms [2.00, 2.00] | 4.00 ms [4.00, 4.00] |" in text
    assert "| chain | 0-127 | 2 | 3 | 2.00 [2.00, 2.00] |" in text


def test_metrics_hold_the_results_and_their_context(tmp_path: Path, result: dict[str, Any]) -> None:
    path = write_metrics(tmp_path / "new", [result], target="tiny", provenance={"seed": 1})
    assert path == tmp_path / "new" / "metrics.json"
    assert json.loads(path.read_text()) == {"results": [result], "target": "tiny", "provenance": {"seed": 1}}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_never_reaches_the_file(tmp_path: Path, result: dict[str, Any], bad: float) -> None:
    write_metrics(tmp_path, [result])
    before = (tmp_path / "metrics.json").read_text()
    with pytest.raises(ValueError, match=r"metrics\.results\[0\]\.speedup is (nan|inf)"):
        write_metrics(tmp_path, [result | {"speedup": bad}])
    with pytest.raises(ValueError, match=r"metrics\.notes\[1\]\.x is"):
        write_metrics(tmp_path, [], notes=(1, {"x": bad}))
    assert (tmp_path / "metrics.json").read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.json"]


def test_the_report_says_it_all(tmp_path: Path, result: dict[str, Any]) -> None:
    facts = {"command": "specdec evaluate --x y", "git_commit": "abc123", "versions": {"torch": "2"}}
    metrics = {"results": [result], "target": "tiny", "provenance": facts}
    path = write_report(tmp_path, metrics, figure="acceptance.png")
    assert path == tmp_path / "report.md"
    text = path.read_text()
    length = result["acceptance_length"]
    low, high = length["low"], length["high"]
    fast = "1.75x [{low:.2f}, {high:.2f}]".format(**result["speedup_interval"])
    assert f"| tree[b\\|$] | 2 | 2.00 [{low:.2f}, {high:.2f}] | 4.0 | 2.3 | {fast} |" in text
    assert "Accepted drafts per pass 1.00 [" in text and "draft acceptance rate 0.33 [" in text
    assert "BCa bootstrap over prompts, all turns of a prompt together, 10,000 resamples, seed 0" in text
    assert "| 1 of 2 |" in text
    assert "| 3 | 0.250 | 1.000 | 1 |" in text
    assert "| tree[b\\|$] | math | 1 | 2.33 | 2.00x |" in text
    assert "bonus) token included" in text
    assert "Intervals from 2 prompts are too narrow" in text
    assert "![Acceptance and speed](acceptance.png)" in text
    assert "| target | tiny |" in text
    assert "| command | specdec evaluate --x y |" in text
    assert "| git_commit | abc123 |" in text
    assert '| growth tree[b\\|$] | {"class_path": "DynamicTree", "depth": 3} |' in text
    assert "provenance" not in text
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|") and "tree[b" in line]
    assert [row.count("|") for row in rows] == [9, 6, 3]  # the bar in the name makes no cell
    assert metrics["provenance"] is facts  # not taken out of the caller's dictionary


def test_the_report_of_little(tmp_path: Path) -> None:
    bare = summary("chain", {}, [Answer("a", None, 1, (0,), (2,), 1.0, 0.0, 0, None)])
    text = write_report(tmp_path, {"results": [bare]}).read_text()
    assert "| chain | 1 | 1.00 | 1.0 | - | - | - | not compared |" in text
    assert "No interval: resampling prompts takes at least 2, and there was 1." in text
    assert "| 2 | 0.000 | - | 0 |" in text
    assert "![" not in text
    assert not any(heading in text for heading in ("By category", "By context", "Time per pass"))


def test_no_word_of_narrow_intervals_with_enough_prompts(tmp_path: Path) -> None:
    found = [Answer(str(index), None, 1, (index % 3,), (2,), 1.0, 1.0, 1, True) for index in range(10)]
    text = write_report(tmp_path, {"results": [summary("chain", {}, found)]}).read_text()
    assert "too narrow" not in text
    assert "No interval" not in text


def test_the_table_on_the_terminal(result: dict[str, Any]) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        print_results({"results": [result]}, console)
    shown = capture.get()
    assert "tree[b|$]" in shown  # not swallowed as markup
    assert "2.00 [" in shown
    assert "1.75x" in shown
    assert "1 of 2" in shown
    assert "too narrow" in shown


def test_prompts_left_out_are_listed(tmp_path: Path, result: dict[str, Any]) -> None:
    skipped = [{"prompt_id": "a|b", "reason": "too long"}]
    text = write_report(tmp_path, {"results": [result], "skipped": skipped}).read_text()
    assert "## Prompts left out\n\n| Prompt | Reason |\n| --- | --- |\n| a\\|b | too long |\n" in text
    assert text.count("too long") == 1
    assert "left out" not in write_report(tmp_path, {"results": [result], "skipped": []}).read_text()
