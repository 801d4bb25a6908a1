"""What a row says in ways that a template garbles: each such turn is refused with its reason, and none is trained."""

import copy
from typing import Any

import pytest

from benchmarks.chat_oracle.tokenizers import sources, tokenizer_of
from specdec.data.chat import PLACE, Report, conversation, encode
from specdec.data.rows import DataRow
from tests.data.tiny import CHATML, NO_GENERATION_PROMPT, tiny_tokenizer

ASKED = {"role": "user", "content": "what is it?"}
FOUR = {"role": "assistant", "content": "four"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("ping", "pong")
]


WITHOUT = "{%- set messages = messages | rejectattr('role', 'equalto', 'ROLE') | list -%}"


def call(name: str = "ping", identity: str | None = None, **arguments: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made | ({} if identity is None else {"id": identity})


def calls(*made: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(made)}


def learned(
    tokenizer: Any, row: dict[str, Any], **options: Any
) -> tuple[list[str], dict[str, int]]:
    """The supervised texts, and the reasons of turns that are not."""
    report = Report()
    left_out: list[str] = []
    messages = conversation(DataRow("a.jsonl, line 1", "line-1", row))
    try:
        documents = list(
            encode([messages], tokenizer, 4096, left_out=left_out, report=report, **options)
        )
    except ValueError:
        documents = []
    reasons = report.reasons | {PLACE.sub("", text): 1 for text in left_out}
    return [
        tokenizer.decode(document.ids_T[document.loss_mask_T]) for document in documents
    ], reasons


def refused(
    name: str, messages: list[dict[str, Any]], tools: Any = None, template: str | None = None
) -> str:
    """The one reason why nothing is learned of a row."""
    tokenizer = tokenizer_of(name) if template is None else tiny_tokenizer(template)
    texts, reasons = learned(tokenizer, {"messages": messages, "tools": tools})
    assert texts == []
    return next(iter(reasons))


@pytest.mark.parametrize("second", [call(), call(a=1)])
def test_a_second_call_that_the_template_drops_is_missed_though_the_first_says_the_same(
    second: Any,
) -> None:
    assert "one tool call of a message alone" in refused(
        "gptoss", [ASKED, calls(call(a=1), second)], TOOLS
    )
    texts, reasons = learned(
        tokenizer_of("qwen3"), {"messages": [ASKED, calls(call(a=1), second)], "tools": TOOLS}
    )
    assert texts[0].count("ping") == 2 and not reasons


@pytest.mark.parametrize("name", ["gptoss", "qwen3", "glm4moe"])
def test_a_tag_inside_a_sentence_is_no_end_of_a_thought(name: str) -> None:
    said = {"role": "assistant", "content": "Close it with </think> and go on."}
    texts, reasons = learned(tokenizer_of(name), {"messages": [ASKED, said]})
    assert (not texts and reasons) or said["content"] in texts[0]


def test_tools_results_and_system_messages_that_a_template_does_not_write_are_refused() -> None:
    source = sources()["qwen3"]
    for cut, message in (
        ("{%- set tools = [] -%}", "does not write the row's tools"),
        (
            "{%- set messages = messages | rejectattr('role', 'equalto', 'tool') | list -%}",
            "does not write results",
        ),
        (
            "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list -%}",
            "not write system messages",
        ),
    ):
        broken = with_template("qwen3", cut + source)
        row = {
            "messages": [
                {"role": "system", "content": "four"}, ASKED, calls(call(identity="1", a=4)),
                {"role": "tool", "content": "4", "tool_call_id": "1"}, {"role": "assistant", "content": "four 4"},
            ],
            "tools": TOOLS,
        }  # fmt: skip
        _, reasons = learned(broken, row)
        assert any(message in reason for reason in reasons), (message, reasons)


def with_template(name: str, template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of(name))
    tokenizer.chat_template = template
    return tokenizer


def test_results_stand_in_the_order_of_their_calls() -> None:
    messages = [
        ASKED, calls(call("ping", "1"), call("pong", "2")),
        {"role": "tool", "content": "second", "tool_call_id": "2"},
        {"role": "tool", "content": "first", "tool_call_id": "1"},
        FOUR,
    ]  # fmt: skip
    row = conversation(DataRow("a.jsonl, line 1", "line-1", {"messages": messages, "tools": TOOLS}))
    assert [message["content"] for message in row.messages[2:4]] == ["first", "second"]
    for wrong, reason in (
        ("9", "'9' has no such call before it"),
        ("2", "two results are of the same tool call"),
    ):
        changed = [*messages[:3], messages[3] | {"tool_call_id": wrong}, FOUR]
        with pytest.raises(ValueError, match=f"line 1: .*{reason}"):
            conversation(
                DataRow("a.jsonl, line 1", "line-1", {"messages": changed, "tools": TOOLS})
            )


def test_an_end_in_the_text_and_a_cut_off_answer_are_refused() -> None:
    said = {"role": "assistant", "content": "four<|im_end|>"}
    assert "ends with a special token" in refused("qwen3", [ASKED, said])
    cut = FOUR | {"finish_reason": "length"}
    assert "cut off" in refused("qwen3", [ASKED, cut])


def test_a_weight_of_nothing_is_context_alone() -> None:
    row = {
        "messages": [
            ASKED,
            FOUR | {"weight": 0.0},
            ASKED,
            FOUR | {"content": "five", "train": True},
        ]
    }
    texts, reasons = learned(tiny_tokenizer(CHATML), row)
    assert texts == ["five<|im_end|>"] and not reasons


@pytest.mark.parametrize("turns", ["auto", "each", "whole"])
def test_the_rows_of_a_conversation(turns: Any) -> None:
    said = [
        ASKED,
        FOUR | {"reasoning_content": "two"},
        ASKED | {"content": "and now?"},
        FOUR | {"content": "five"},
    ]
    texts, reasons = learned(tokenizer_of("qwen3"), {"messages": said}, turns=turns)
    first = "<think>\ntwo\n</think>\n\nfour<|im_end|>"
    assert texts == (["five<|im_end|>"] if turns == "whole" else [first, "five<|im_end|>"])
    assert [reason.partition(":")[0] for reason in reasons] == (
        ["the chat template writes it otherwise once the conversation continues"]
        if turns == "whole"
        else []
    )
    plain, _ = learned(
        tiny_tokenizer(CHATML), {"messages": [ASKED, FOUR, ASKED, FOUR]}, turns=turns
    )
    assert len(plain) == (2 if turns == "each" else 1)


def ids_row(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    prompt = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True)["input_ids"]
    ids = tokenizer.encode("four<|im_end|>", add_special_tokens=False)
    return {"messages": [ASKED, FOUR | {"prompt_token_ids": prompt, "token_ids": ids} | changes]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"content": "five"}, "token_ids do not say what the message says"),
        ({"content": "fo"}, "token_ids do not say what the message says"),
        ({"content": "", "reasoning_content": "f"}, "token_ids do not say what the message says"),
        ({"prompt_token_ids": [1, 2, 3]}, "prompt_token_ids do not hold what was asked"),
    ],
)
def test_ids_that_say_something_else_are_refused(changes: dict[str, Any], reason: str) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    assert learned(tokenizer, ids_row(tokenizer)) == (["four<|im_end|>"], {})
    texts, reasons = learned(tokenizer, ids_row(tokenizer, **changes))
    assert texts == [] and any(reason in text for text in reasons), reasons


def test_half_of_the_ids_is_refused() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    row = ids_row(tokenizer)
    del row["messages"][1]["prompt_token_ids"]
    assert "without the other" in next(iter(learned(tokenizer, row)[1]))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [ASKED, FOUR], "response": "five"},
            "column 'response' may be a part of what is said",
        ),
        (
            {"messages": [ASKED, FOUR], "chat_template_kwargs": {"a": 1}},
            "column 'chat_template_kwargs'",
        ),
        ({"instruction": "a", "output": "b", "history": [["q", "a"]]}, "column 'history'"),
        ({"messages": [ASKED, FOUR | {"prefix": True}]}, "'prefix', which specdec does not read"),
        (
            {"messages": [ASKED, calls({"name": "f", "arguments": '{"k": 1, "k": 2}'})]},
            "a key comes twice",
        ),
        ({"messages": [ASKED, calls({"name": "f", "arguments": '{"k": NaN}'})]}, "NaN is not JSON"),
    ],
)
def test_what_changes_what_is_said_and_is_not_read_is_refused(
    row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"line 1: .*{reason}"):
        conversation(DataRow("a.jsonl, line 1", "line-1", row))


def test_thoughts_in_parts_and_functions_of_the_older_kind_are_read() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "add"}]},
        {"type": "text", "text": "four"},
    ]
    row = conversation(
        DataRow(
            "x", "1", {"messages": [ASKED, FOUR | {"content": parts}], "functions": [{"name": "f"}]}
        )
    )
    assert row.messages[1] == FOUR | {"reasoning_content": "add"}
    assert row.tools == [{"type": "function", "function": {"name": "f"}}]


# --- what mutations of template.py survived


def test_a_template_without_generation_prompt_is_refused_with_tools_too() -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + NO_GENERATION_PROMPT
    for tools in (None, TOOLS):
        assert "has no generation prompt there" in refused("", [ASKED, FOUR], tools, template)


def test_a_thought_needs_a_place_in_the_template() -> None:
    thoughtful = FOUR | {"reasoning_content": "two and two"}
    assert "no place for its thought" in refused("", [ASKED, thoughtful], None, CHATML)


def test_a_turn_is_cut_out_only_where_all_before_it_is_the_same() -> None:
    """The number at the beginning is that of the last message's characters."""
    counted = "{{ messages[-1]['content'] | length }}" + CHATML
    texts, _ = learned(tiny_tokenizer(CHATML), {"messages": [ASKED, FOUR]})
    assert texts == ["four<|im_end|>"]
    assert "does not begin it with its own generation prompt" in refused(
        "", [ASKED, FOUR], None, counted
    )
