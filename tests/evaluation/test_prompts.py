import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.evaluation.prompts import Prompt, load_prompts, prompts_sha256
from specdec.evaluation.suites import rows_sha256


def rows(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def test_the_three_kinds_of_rows(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = rows(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []},
        {"messages": messages, "turns": None},
        {"id": "raw", "prompt": " def f(x):\n"},
    )
    assert load_prompts([path]) == [
        Prompt("81", "writing", ["Write.", "Again."], None, None),
        Prompt("line-2", None, None, messages, None),
        Prompt("raw", None, None, None, " def f(x):\n"),
    ]


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffOnce upon\r\n\r\n  \n  twice é \n".encode())
    assert load_prompts([path]) == [
        Prompt("line-1", None, None, None, "Once upon"),
        Prompt("line-4", None, None, None, "  twice é "),
    ]


def test_other_line_separators_stay_inside_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.JSONL"
    path.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert [prompt.text for prompt in load_prompts([str(path)])] == ["a\u2028b\x85c"]


def test_limit_counts_over_all_files(tmp_path: Path) -> None:
    first = rows(tmp_path / "a.jsonl", {"id": 1, "prompt": "x"}, {"id": 2, "prompt": "y"})
    second = rows(tmp_path / "b.jsonl", {"id": 3, "prompt": "z"})
    assert [prompt.prompt_id for prompt in load_prompts([first, second], limit=2)] == ["1", "2"]
    assert len(load_prompts([first, second], limit=9)) == 3
    with pytest.raises(ValueError, match="limit is 0"):
        load_prompts([first], limit=0)


def test_ids_used_by_several_files_get_the_stem(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    first = rows(tmp_path / "a.jsonl", {"id": 1, "prompt": "x"}, {"id": 2, "prompt": "y"})
    second = rows(tmp_path / "b.jsonl", {"id": "1", "prompt": "z"})
    same_stem = rows(tmp_path / "more" / "a.jsonl", {"id": 2, "prompt": "z"})
    assert [prompt.prompt_id for prompt in load_prompts([first, second])] == ["a:1", "2", "b:1"]
    names = [prompt.prompt_id for prompt in load_prompts([first, same_stem])]
    assert names == ["1", f"{first}:2", f"{same_stem}:2"]
    with pytest.raises(ValueError, match="is the file given twice"):
        load_prompts([first, first])


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", r"line 2: not usable JSON: Expecting property name"),
        ('{"prompt": %s}' % ("9" * 5000), "line 2: not usable JSON"),
        ("{}", r"its columns \(none\) are of no known layout \(turns: turns; "),
        (
            {"answer": "x", "category": "a"},
            r"its columns \(answer, category\) .*gsm8k: question, answer; .*highlights",
        ),
        ({"prompt": 3}, "'prompt' must be a string, got int"),
        ({"prompt": []}, "'prompt' must be a list of at least one string"),
        ('{"prompt": "a\\ud800"}', "half of a surrogate pair"),
        ({"turns": []}, "'turns' must be a list of at least one string"),
        ({"turns": ["a", 3]}, "must be a list of at least one string"),
        ({"messages": {"role": "user"}}, "'messages' must be a list"),
        (
            {"messages": [USER, {"role": "assistant", "content": "Yes"}]},
            "must end with a user turn.*not assistant",
        ),
        ({"messages": [{"role": "human", "content": "Hi"}]}, "unknown role 'human'"),
        ({"messages": [{"role": "user"}]}, "a message has no text"),
        ({"messages": [USER | {"name": "x"}]}, "and nothing else; it has content, name, role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message has a part of type 'image'",
        ),
        ({"id": 1.5, "prompt": "a"}, "id must be a string or an integer, not float"),
        ({"category": 3, "prompt": "a"}, "category must be a string"),
        ({"id": "first", "prompt": "a"}, "line 2: id first is taken already"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    line = row if isinstance(row, str) else json.dumps(row)
    path.write_text(f'{{"id": "first", "prompt": "x"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=complaint) as caught:
        load_prompts([path])
    assert str(caught.value).startswith(f"{path}, line 2")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": " \n"},
        {"turns": ["a", ""]},
        {"messages": [USER | {"content": ""}]},
        {"question": " ", "answer": "1"},
    ],
    ids=["prompt", "a turn", "a message", "gsm8k"],
)
def test_a_blank_prompt_is_one_that_cannot_be_asked(tmp_path: Path, row: Any) -> None:
    """And not a broken file: the others stay."""
    path = tmp_path / "some.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, [{"prompt": "x"}, row, {"prompt": "y"}])), encoding="utf-8"
    )
    first, blank, last = load_prompts([path])
    assert (first.text, last.text) == ("x", "y")
    assert (blank.prompt_id, blank.turns, blank.messages, blank.text) == ("line-2", None, None, "")


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompt file given"):
        load_prompts([])
    with pytest.raises(ValueError, match=r"none\.txt: no such file"):
        load_prompts([tmp_path / "none.txt"])
    with pytest.raises(ValueError, match="it is a directory"):
        load_prompts([tmp_path])
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: there is no prompt in it"):
        load_prompts([tmp_path / "empty.jsonl"])
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 text .* at byte 3"):
        load_prompts([tmp_path / "latin.txt"])


def test_ids_and_categories(tmp_path: Path) -> None:
    path = rows(
        tmp_path / "suite.jsonl",
        {"task_id": "HumanEval/0", "prompt": "x", "entry_point": "f"},
        {"question": "1 + 1?", "answer": "2"},
        {"question": "1 + 2?", "answer": "3", "id": 7, "category": "sums"},
        {"turns": ["a"], "category": ""},
        {"turns": ["a"], "category": "rag", "question_id": 9, "id": "unread"},
    )
    assert [(prompt.prompt_id, prompt.category) for prompt in load_prompts([path])] == [
        ("HumanEval/0", "humaneval"), ("line-2", "gsm8k"), ("7", "sums"), ("line-4", None), ("9", "rag"),
    ]  # fmt: skip


USER_TURN = {"role": "user", "content": "a"}
SYSTEM_TURN = {"role": "system", "content": "b"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "get", "arguments": "{}"}}


def test_prompts_may_bring_tools_and_end_with_a_result(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "a"}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "3"}
    path = rows(
        tmp_path / "agent.jsonl",
        {"turns": ["a"], "tools": [TOOL]},
        {"messages": [asked, called, result], "tools": json.dumps([TOOL])},
        {"turns": ["a"]},
    )
    first, second, bare = load_prompts([path])
    assert first.tools == second.tools == [TOOL] and bare.tools is None
    assert second.messages is not None and second.messages[-1]["role"] == "tool"
    assert prompts_sha256([first]) != prompts_sha256([first._replace(tools=None)])
    # which row has the tools decides
    assert len({rows_sha256(rows) for rows in ([first, bare], [bare, first], [bare, bare])}) == 3


def test_prompts_without_tools_have_the_hashes_that_they_had_before_there_were_tools() -> None:
    prompt = Prompt("a", None, ["b"], None, None)
    row = {"prompt_id": "a", "category": None, "turns": ["b"], "messages": None, "text": None}
    assert prompts_sha256([prompt]) == hashlib.sha256(json.dumps([row]).encode()).hexdigest()
    assert rows_sha256([prompt]) == hashlib.sha256(b'[["b"]]').hexdigest()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "tools": [TOOL]}, "raw text takes no tools"),
        ({"turns": ["a"], "tools": "none"}, "'tools' must be JSON"),
        ({"turns": ["a"], "tools": ["get"]}, "'tools' must be a list of JSON schemas"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "3"}]},
            "the row has no tools",
        ),
        ({"question": ["a"], "function": []}, "'question' must be a list of turns"),
        ({"question": [[USER_TURN], []], "function": []}, "'question' must be a list of turns"),
        ({"question": [[USER_TURN], [SYSTEM_TURN]], "function": []}, "one message of the user"),
        ({"question": [[USER_TURN, USER_TURN], [USER_TURN]], "function": []}, "one message of"),
        ({"question": [[USER_TURN, SYSTEM_TURN]], "function": []}, "end with a user's message"),
        ({"question": [[USER_TURN]], "function": {"name": "get"}}, "a list of functions"),
        ({"question": [[USER_TURN]], "function": 3}, "a list of functions"),
        ({"question": [[USER_TURN]], "function": ["get"]}, "a list of functions"),
        ({"question": [[USER_TURN]], "function": [TOOL]}, "each with a name"),
    ],
)
def test_tools_that_cannot_be_asked_are_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts([rows(tmp_path / "a.jsonl", row)])


def test_layouts_may_be_chosen(tmp_path: Path) -> None:
    code = rows(tmp_path / "code.jsonl", {"task_id": "a", "prompt": "def f", "entry_point": "f"})
    raw = rows(tmp_path / "raw.jsonl", {"prompt": "Hi"})
    (tmp_path / "text.txt").write_text("Ho")
    turns = rows(tmp_path / "turns.jsonl", {"turns": ["x"], "prompt": "y"})

    def read(*layouts: str) -> list[tuple[Any, ...]]:
        return [
            prompt[2:5]
            for prompt in load_prompts([code, raw, tmp_path / "text.txt"], layouts=layouts)
        ]

    assert read() == [
        (["Complete the code I provided.def f"], None, None),
        (None, None, "Hi"),
        (None, None, "Ho"),
    ]
    assert read("prompt") == [(None, None, "def f"), (None, None, "Hi"), (None, None, "Ho")]
    assert read("prompt_turn") == [([text], None, None) for text in ("def f", "Hi", "Ho")]
    assert load_prompts([turns], layouts=["turns"])[0].turns == ["x"]
    with pytest.raises(
        ValueError,
        match=r"there is no layout 'mmlu': choose one of turns, speed_bench, bfcl, messages, humaneval",
    ):
        read("mmlu")
    with pytest.raises(ValueError, match=r"layouts: no row is read as gsm8k \(question, answer\)"):
        read("gsm8k")
    with pytest.raises(ValueError, match="no row is read as prompt_turn"):
        read("prompt", "prompt_turn")  # the first that fits wins
    extra = rows(tmp_path / "extra.jsonl", {"question": "q", "answer": "a", "level": 3})
    with pytest.raises(
        ValueError, match=r"extra\.jsonl, line 1: level may be a part of what is said"
    ):
        load_prompts([extra])
    assert load_prompts([extra], layouts=["gsm8k"])[0].turns == ["q"]
