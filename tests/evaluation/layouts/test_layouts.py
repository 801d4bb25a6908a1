"""Every layout that is known: what tells it, and what its rows ask."""

from typing import Any

import pytest

from specdec.evaluation.layouts import LAYOUTS, Asked, named, recognise

SPEED = {"sub_category": "x", "source": "s", "src_id": "1", "difficulty": "easy", "multiturn": False, "category": "qa"}
CODE = {"task_id": "HumanEval/0", "entry_point": "f", "canonical_solution": "    pass\n", "test": "def check(f):\n"}

# by what are the published rows told, and what comes of them
ROWS: list[tuple[str, dict[str, Any], Asked]] = [
    ("turns", {"question_id": 81, "category": "writing", "turns": ["One", "Two"]}, Asked(turns=["One", "Two"])),
    ("turns", {"question_id": 241, "category": "rag", "turns": ["Q"], "reference": ["R"]}, Asked(turns=["Q"])),
    ("prompt_turns", {"prompt_id": 1, "prompt": ["One", "Two"], "reference": []}, Asked(turns=["One", "Two"])),
    ("speed_bench", {"question_id": "a1", "turns": ["One", "Two"], **SPEED}, Asked(turns=["One", "Two"])),
    (
        "messages",
        {"messages": [{"role": "user", "content": "Hi"}]},
        Asked(messages=[{"role": "user", "content": "Hi"}]),
    ),
    ("prompt", {"prompt": " raw \n", "source": "s"}, Asked(text=" raw \n")),
    (
        "humaneval",
        {"prompt": "\ndef f():\n    '''Pass.'''\n", **CODE},
        Asked(turns=["Complete the code I provided.\ndef f():\n    '''Pass.'''\n"]),
    ),
    ("gsm8k", {"question": "How many?", "answer": "Two.\n#### 2"}, Asked(turns=["How many?"])),
    ("alpaca", {"instruction": "Add.", "input": "1 and 2", "output": "3"}, Asked(turns=["Add.\n\n1 and 2"])),
    ("alpaca", {"instruction": "Greet.", "input": "", "output": "Hi", "text": "..."}, Asked(turns=["Greet."])),
    ("alpaca", {"instruction": "Greet.", "output": "Hi"}, Asked(turns=["Greet."])),
    (
        "cnn_dailymail",
        {"article": "(CNN) Rain.\nMore rain.", "highlights": "Rain.", "id": "f0"},
        Asked(turns=["Summarize: (CNN) Rain.\nMore rain."]),
    ),
]
CHOSEN: list[tuple[str, dict[str, Any], Asked]] = [
    ("humaneval_verbatim", {"prompt": "def f():\n", **CODE}, Asked(turns=["def f():\n"])),
    ("humaneval_raw", {"prompt": "def f():\n", **CODE}, Asked(text="def f():\n")),
    ("prompt_turn", {"prompt": "Hi"}, Asked(turns=["Hi"])),
]


@pytest.mark.parametrize(("name", "row", "asked"), ROWS)
def test_a_row_is_told_by_its_columns(name: str, row: dict[str, Any], asked: Asked) -> None:
    layout = recognise(row, "here")
    assert layout.name == name
    assert layout.ask(row, "here") == asked


@pytest.mark.parametrize(("name", "row", "asked"), CHOSEN)
def test_a_layout_by_name_is_never_guessed(name: str, row: dict[str, Any], asked: Asked) -> None:
    assert recognise(row, "here").name != name
    layout = recognise(row, "here", named([name]))
    assert layout.name == name
    assert layout.ask(row, "here") == asked


def test_every_layout_is_tried_here() -> None:
    assert {name for name, _, _ in ROWS + CHOSEN} == {layout.name for layout in LAYOUTS}
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
    suites = {"humaneval", "gsm8k", "alpaca", "cnn_dailymail"}
    assert {layout.category for layout in LAYOUTS} == {None, *suites}


@pytest.mark.parametrize("name", [layout.name for layout in LAYOUTS])
def test_a_malformed_row_is_named(name: str) -> None:
    (layout,) = named([name])
    for bad in (7, "", [], [""], "\ud800"):
        with pytest.raises(ValueError, match=r"^file, line 3: ") as caught:
            layout.ask(dict.fromkeys(layout.columns, bad), "file, line 3")
        assert "\n" not in str(caught.value)


def test_an_input_that_is_no_text_is_refused() -> None:
    (alpaca,) = named(["alpaca"])
    for bad in (3, " "):
        with pytest.raises(ValueError, match="here: input"):
            alpaca.ask({"instruction": "Add.", "input": bad, "output": "3"}, "here")


def test_a_placeholder_of_speed_bench_is_refused() -> None:
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    row = {"turns": ["Hi", text], **SPEED}
    with pytest.raises(ValueError, match="here: the published file leaves this prompt out"):
        recognise(row, "here").ask(row, "here")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": 1, "choices": ["a"]},  # of another suite
        {"question": "q"},
        {"instruction": "i", "output": "o", "context": "c"},
        {"article": "a", "summary": "s"},
    ],
)
def test_columns_of_no_layout_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"here: its columns .* are of no known layout .*cnn_dailymail: article") as e:
        recognise(row, "here")
    assert ", ".join(sorted(row)) in str(e.value)
