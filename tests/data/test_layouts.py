"""Every layout that is known: what tells it, what its training rows hold and what its prompts ask."""

from typing import Any

import pytest

from specdec.data.layouts import BOXED, PROMPTS, TRAINING, Question, layouts_named, recognize

SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SYSTEM = {"role": "system", "content": "be brief"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
CODE = {
    "task_id": "HumanEval/0",
    "entry_point": "f",
    "canonical_solution": "    pass\n",
    "test": "def check(f):\n",
}

READ: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("messages", {"messages": SAID, "source": "web"}, SAID),
    ("messages", {"prompt": "hi", "prompt_id": "a", "messages": SAID}, SAID),
    ("messages", {"conversations": TURNS, "messages": SAID}, SAID),
    ("messages", {"messages": [{"role": "user", "content": "hi", "name": None}, SAID[1]]}, SAID),
    ("messages", {"system": "be brief", "messages": SAID}, [SYSTEM, *SAID]),
    ("messages", {"system": "be brief", "messages": [SYSTEM, *SAID]}, [SYSTEM, *SAID]),
    ("sharegpt", {"conversations": TURNS}, SAID),
    ("alpaca", {"instruction": "hi", "input": "", "output": "hello", "text": "Below"}, SAID),
    (
        "alpaca",
        {"instruction": "a", "input": "1", "output": "hello"},
        [{"role": "user", "content": "a\n\n1"}, SAID[1]],
    ),
    ("prompt_response", {"prompt": "hi", "completion": "hello", "id": 3}, SAID),
    ("prompt_response", {"question": "hi", "answer": "hello"}, SAID),
    (
        "prompt_response",
        {"system_prompt": "be brief", "question": "hi", "response": "hello"},
        [SYSTEM, *SAID],
    ),
]
ASKED: list[tuple[str, dict[str, Any], Question]] = [
    (
        "turns",
        {"question_id": 81, "category": "writing", "turns": ["One", "Two"]},
        Question(turns=["One", "Two"]),
    ),
    (
        "turns",
        {"question_id": 241, "category": "rag", "turns": ["Q"], "reference": ["R"]},
        Question(turns=["Q"]),
    ),
    (
        "prompt",
        {"prompt_id": 1, "prompt": ["One", "Two"], "reference": []},
        Question(turns=["One", "Two"]),
    ),
    ("messages", {"messages": [SYSTEM, SAID[0]]}, Question(messages=[SYSTEM, SAID[0]])),
    (
        "speed_bench",
        {
            "messages": [SAID[0], {"role": "user", "content": "and?"}],
            "category": "qa",
            "source": "s",
            "multiturn": True,
        },
        Question(turns=["hi", "and?"]),
    ),
    (
        "speed_bench",
        {"messages": [*SAID, SAID[0]], "category": "qa", "source": "s", "multiturn": True},
        Question(messages=[*SAID, SAID[0]]),
    ),
    (
        "bfcl",
        {
            "id": "simple_python_0",
            "question": [[SAID[0]]],
            "function": [
                {
                    "name": "area",
                    "parameters": {
                        "type": "dict",
                        "properties": {
                            "base": {"type": "float", "description": "type: dict"},
                            "sides": {"type": "tuple", "items": {"type": "any"}},
                        },
                    },
                }
            ],
        },
        Question(
            messages=[SAID[0]],
            tools=[
                {
                    "type": "function",
                    "function": {
                        "name": "area",
                        "parameters": {
                            "type": "object",
                            "properties": {
                                "base": {"type": "number", "description": "type: dict"},
                                "sides": {"type": "array", "items": {"type": "string"}},
                            },
                        },
                    },
                }
            ],
        ),
    ),
    (
        "bfcl",
        {"question": [[SAID[0]], [{"role": "user", "content": "and?"}]], "function": []},
        Question(turns=["hi", "and?"]),
    ),
    (
        "mbpp",
        {"task_id": 2, "prompt": "Add.", "code": "", "test_list": ["assert"]},
        Question(turns=["Add."]),
    ),
    (
        "arena_hard",
        {"uid": "a", "category": "hard_prompt", "prompt": "Why?"},
        Question(turns=["Why?"]),
    ),
    (
        "math",
        {"problem": "1 + 1?", "answer": 2, "problem_idx": 1},
        Question(turns=["1 + 1?" + BOXED]),
    ),
    ("prompt", {"prompt": " raw \n", "source": "s"}, Question(text=" raw \n")),
    (
        "humaneval",
        {"prompt": "\ndef f():\n", **CODE},
        Question(turns=["Complete the code I provided.\ndef f():\n"]),
    ),
    ("gsm8k", {"question": "How many?", "answer": "Two.\n#### 2"}, Question(turns=["How many?"])),
    (
        "alpaca",
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        Question(turns=["Add.\n\n1 and 2"]),
    ),
    (
        "alpaca",
        {"instruction": "hi", "output": "Hi", "system": "be brief"},
        Question(messages=[SYSTEM, SAID[0]]),
    ),
    (
        "cnn_dailymail",
        {"article": "Rain.\n", "highlights": "", "id": "f0"},
        Question(turns=["Summarize: Rain.\n"]),
    ),
]
CHOSEN: list[tuple[str, dict[str, Any], Question]] = [
    (
        "gsm8k_boxed",
        {"question": "How many?", "answer": "2"},
        Question(turns=["How many?" + BOXED]),
    ),
    (
        "humaneval_solution",
        {"prompt": "def f():\n", **CODE},
        Question(
            turns=[
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef f():\n\n```"
            ]
        ),
    ),
    (
        "alpaca_input",
        {"instruction": "Add.", "input": "1", "output": "3"},
        Question(turns=["Add.\n\nInput:\n1"]),
    ),
    ("prompt_turn", {"prompt": "def f():\n", **CODE}, Question(turns=["def f():\n"])),
    ("prompt_turn", {"prompt": "Hi"}, Question(turns=["Hi"])),
]


@pytest.mark.parametrize(("name", "row", "messages"), READ)
def test_a_training_row_is_told_by_its_columns(
    name: str, row: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    layout = recognize(row, "x", TRAINING)
    assert layout.name == name
    assert layout.read(row, "x") == messages


@pytest.mark.parametrize(("name", "row", "question"), ASKED + CHOSEN)
def test_a_prompt_is_told_by_its_columns_or_chosen(
    name: str, row: dict[str, Any], question: Question
) -> None:
    chosen = (name, row, question) in CHOSEN
    assert (recognize(row, "x", PROMPTS).name == name) != chosen  # those are never guessed
    layout = recognize(row, "x", PROMPTS, layouts_named([name], PROMPTS))
    assert layout.name == name
    assert layout.read(row, "x") == question
    assert not question.blank


def test_every_layout_is_tried_here() -> None:
    assert {name for name, _, _ in READ} == {layout.name for layout in TRAINING}
    assert [layout.name for layout in PROMPTS] == list(
        dict.fromkeys(layout.name for layout in PROMPTS)
    )
    assert {name for name, _, _ in ASKED + CHOSEN} | {"livecodebench"} == {
        layout.name for layout in PROMPTS
    }


@pytest.mark.parametrize(
    ("begin", "code"), [("class A:", "class A:"), ("", "# YOUR CODE HERE"), (None, "# YOUR")]
)
def test_a_program_begins_with_the_code_that_is_given(begin: str | None, code: str) -> None:
    row = {"question_content": "Sort.", "question_id": "1"} | (
        {} if begin is None else {"starter_code": begin}
    )
    layout = recognize(row, "x", PROMPTS)
    (turn,) = layout.read(row, "x").turns
    assert layout.name == "livecodebench" and "### Question:\nSort.\n\n### Format: " in turn
    assert f"```python\n{code}" in turn and ("Use the following code" in turn) == bool(begin)


@pytest.mark.parametrize("more", [{}, {"category": "qa", "source": "s"}])
def test_a_question_that_nobody_answers_is_refused_before_the_next(more: dict[str, Any]) -> None:
    row = {"messages": [*SAID, SAID[0], SAID[0]], **more}
    with pytest.raises(ValueError, match=r"^x: messages 3 and 4 are both the user's.* as `turns`"):
        recognize(row, "x", PROMPTS).read(row, "x")


def test_a_message_has_one_form_whatever_the_row_calls_its_parts() -> None:
    thought = {
        "role": "assistant",
        "content": [{"type": "text", "text": "hel"}, "lo"],
        "thinking": "so",
    }
    call = {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0}
    legacy = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    result = {"role": "function", "content": "2", "tool_call_id": "1"}
    row = {"messages": [SAID[0], call, result, legacy, result, thought]}
    assert recognize(row, "x", TRAINING).read(row, "x") == [
        SAID[0],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [CALL | {"type": "function"}],
            "weight": 0,
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL["function"]}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "hello", "reasoning_content": "so"},
    ]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"content": "a", "thinking": "b", "reasoning": "c"},
            "'reasoning' and 'thinking' are different thoughts",
        ),
        ({"content": "a", "thinking": 3}, "'thinking' must be a string, got int"),
        ({"content": "a", "weight": 0.5}, "weight, train, loss of a message must be 0 or 1"),
        ({"content": "a", "weight": 1, "train": False}, "must be 0 or 1"),
        (
            {"content": [{"type": "image_url", "image_url": {}}]},
            "a part of type 'image_url'; known: text",
        ),
        ({"content": "a", "token_ids": []}, "'token_ids' must be a list of at least one token id"),
        ({"content": "a", "token_ids": [1, -2]}, "'token_ids' must be a list"),
        (
            {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "must be an object",
        ),
    ],
)
def test_a_part_that_cannot_be_learned_is_refused(message: dict[str, Any], reason: str) -> None:
    row = {"messages": [SAID[0], {"role": "assistant"} | message]}
    with pytest.raises(ValueError, match=f"^x: .*{reason}"):
        recognize(row, "x", TRAINING).read(row, "x")


def test_a_call_keeps_its_arguments_as_the_row_has_them() -> None:
    written = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for call, arguments in (
        (written, '{"a": 1}'),
        (CALL, {"a": 1}),
        (written["function"], '{"a": 1}'),
    ):
        row = {"messages": [SAID[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
        message = recognize(row, "x", TRAINING).read(row, "x")[1]
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize("question", [Question(text=" \n"), Question(turns=["a", ""]), Question(messages=[SYSTEM, SAID[0] | {"content": ""}])])  # fmt: skip # noqa: E501
def test_nothing_is_asked_where_a_part_is_blank(question: Question) -> None:
    assert question.blank


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {},
            r"its columns \(none\) are of no known layout \(messages: messages; .*: prompt or question, response or",
        ),
        (
            {"question": "a", "answer": "b", "context": "c"},
            "context may be a part of what is said, and prompt_r",
        ),
    ],
)
def test_a_training_row_of_no_layout_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^place: .*{message}"):
        recognize(row, "place", TRAINING)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "q", "answer": 1, "choices": ["a"]},
            "choices may be a part of what is said, and gsm8k",
        ),
        (
            {"question": "q"},
            r"its columns \(question\) are of no known layout .*cnn_dailymail: article, highlights",
        ),
    ],
)
def test_a_prompt_of_no_layout_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^place: .*{message}"):
        recognize(row, "place", PROMPTS)


CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("alpaca", {"instruction": 3, "output": "b"}, "'instruction' must be a string, got int"),
        (
            "alpaca",
            {"instruction": "a", "input": ["b"], "output": "b"},
            "'input' must be a string, got list",
        ),
        (
            "prompt_response",
            {"prompt": "a", "question": "b", "answer": "c"},
            "'prompt' and 'question' may each be",
        ),
        (
            "messages",
            {"system": "be long", "messages": [SYSTEM, *SAID]},
            "two different system prompts",
        ),
        ("messages", {"system": 3, "messages": SAID}, "'system' must be a string"),
        ("messages", {"messages": [SAID[0] | {"tool_calls": "f"}]}, "'tool_calls' must be a list"),
        (
            "messages",
            {"messages": [SAID[0] | {"tool_calls": [{"function": "f"}]}]},
            "needs a function with its name",
        ),
        ("messages", {"messages": [CALLING]}, "the arguments of tool call f must be JSON"),
        (
            "sharegpt",
            {"conversations": {"from": ["human"], "value": []}},
            "must be a list of at least one message",
        ),
    ],
)
def test_a_malformed_training_row_is_named(name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^place: .*{message}"):
        layouts_named([name], TRAINING)[0].read(row, "place")


@pytest.mark.parametrize("name", [layout.name for layout in PROMPTS])
def test_a_malformed_prompt_is_named(name: str) -> None:
    (layout,) = layouts_named([name], PROMPTS)
    for bad in (7, []):
        with pytest.raises(ValueError, match=r"^file, line 3: ") as caught:
            layout.read(dict.fromkeys(layout.columns, bad), "file, line 3")
        assert "\n" not in str(caught.value)
