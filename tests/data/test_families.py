"""What is supervised under the templates of real families, to the letter."""

from typing import Any

import pytest

from specdec.data.chat import conversation
from specdec.data.rows import DataRow
from tests.data.families import FAMILIES, family_tokenizer
from tests.data.tiny import encoded, supervised_texts

SYSTEM = {"role": "system", "content": "be brief"}
ASKED = {"role": "user", "content": "what is two plus two?"}
AGAIN = {"role": "user", "content": "and the sky, is it green?"}
FOUR = {"role": "assistant", "content": "four"}
BLUE = {"role": "assistant", "content": "the sky is blue"}
TWO_TURNS = [ASKED, FOUR, AGAIN, BLUE]

CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 2}}}
CALLS = {"role": "assistant", "tool_calls": [CALL], "content": ""}
RESULT = {"role": "tool", "content": "4"}
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]

END = {
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "mistral_v3": "</s>",
    "mistral_v7": "</s>",
    "phi3": "<|end|>",
    "phi4": "<|im_end|>",
}
BEGIN = {"mistral_v3": " "}  # the model's own
NO_SYSTEM = ("gemma2",)


def spans(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[str]:
    """The supervised texts of all rows, the same whether a tokenizer trims its offsets or not."""
    texts = []
    for trim_offsets in (False, True):
        tokenizer = family_tokenizer(name, trim_offsets=trim_offsets)
        row = conversation(DataRow("a.jsonl, line 1", "1", {"messages": messages, "tools": tools}))
        documents = encoded([row], tokenizer, 2000).usable(2000, "chat")
        texts.append(
            [text for document in documents for text in supervised_texts(document, tokenizer)]
        )
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("name", END)
def test_two_turns_supervise_the_words_and_the_end_of_turn(name: str, system: bool) -> None:
    messages = [SYSTEM, *TWO_TURNS] if system else TWO_TURNS
    if system and name in NO_SYSTEM:
        with pytest.raises(
            ValueError, match="line 1: message 3: the chat template does not write system messages"
        ):
            spans(name, messages)
        return
    begin, end = BEGIN.get(name, ""), END[name]
    assert spans(name, messages) == [f"{begin}four{end}", f"{begin}the sky is blue{end}"]


@pytest.mark.parametrize("name", END)
def test_an_open_question_at_the_end_changes_nothing(name: str) -> None:
    begin, end = BEGIN.get(name, ""), END[name]
    assert spans(name, [ASKED, FOUR, AGAIN]) == [f"{begin}four{end}"]
    assert spans(name, [ASKED, FOUR]) == [f"{begin}four{end}"]


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_gpt_oss_writes_its_channels_itself(system: list[dict[str, Any]]) -> None:
    final = "<|channel|>final<|message|>"
    # each turn ends as the model ends it, not as the template writes it once the conversation continues
    assert spans("gpt_oss", [*system, *TWO_TURNS]) == [
        f"{final}four<|return|>",
        f"{final}the sky is blue<|return|>",
    ]
    assert spans("gpt_oss", [*system, ASKED, FOUR, AGAIN]) == [f"{final}four<|return|>"]
    thought = [ASKED, FOUR | {"thinking": "add"}, AGAIN, BLUE | {"thinking": "look up"}]
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    assert spans("gpt_oss", [*system, *thought]) == [
        f"{analysis.format('add')}{final}four<|return|>",
        f"{analysis.format('look up')}{final}the sky is blue<|return|>",
    ]


def test_gpt_oss_calls_tools_with_and_without_its_thoughts() -> None:
    call = ' to=functions.sum<|channel|>commentary json<|message|>{"a": 2}<|call|>'
    thought = "<|channel|>analysis<|message|>add<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>four<|return|>"
    for calls in (CALLS | {"thinking": "add"}, CALLS | {"content": "add"}):
        assert spans("gpt_oss", [ASKED, calls, RESULT], TOOLS) == [thought + call]
        assert spans("gpt_oss", [ASKED, calls, RESULT, FOUR], TOOLS) == [thought + call, final]


@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("inline", [False, True])
def test_qwen3_and_qwq_learn_every_thought(system: list[dict[str, Any]], inline: bool) -> None:
    def think(message: dict[str, Any], thought: str) -> dict[str, Any]:
        if inline:
            return message | {"content": f"<think>\n{thought}\n</think>\n\n{message['content']}"}
        return message | {"reasoning_content": thought}

    messages = [*system, ASKED, think(FOUR, "add"), AGAIN, think(BLUE, "look up")]
    said = [
        "<think>\nadd\n</think>\n\nfour<|im_end|>",
        "<think>\nlook up\n</think>\n\nthe sky is blue<|im_end|>",
    ]
    assert spans("qwen3", messages) == said
    # the generation prompt of QwQ opens the thought
    assert spans("qwq", messages) == [text.removeprefix("<think>\n") for text in said]
    assert spans("qwen3", [*messages[:-1], BLUE]) == [said[0], "the sky is blue<|im_end|>"]
    with pytest.raises(
        ValueError, match="message 2: the generation prompt opens a thought and the turn has none"
    ):
        spans("qwq", [ASKED, FOUR])


def test_qwen_calls_tools() -> None:
    call = '<tool_call>\n{"name": "sum", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    for name in ("qwen2_5", "qwen3"):
        for words in ("", "let me see"):
            said = f"{words}\n{call}" if words else call
            messages = [SYSTEM, ASKED, CALLS | {"content": words}, RESULT, FOUR, AGAIN, BLUE]
            assert spans(name, messages, TOOLS) == [
                said,
                "four<|im_end|>",
                "the sky is blue<|im_end|>",
            ]
    thought = CALLS | {"reasoning_content": "add"}
    messages = [ASKED, thought, RESULT, FOUR]
    assert spans("qwen3", messages, TOOLS) == [
        f"<think>\nadd\n</think>\n\n{call}",
        "four<|im_end|>",
    ]
    assert spans("qwen3", [*messages, AGAIN, BLUE], TOOLS) == [
        f"<think>\nadd\n</think>\n\n{call}", "four<|im_end|>", "the sky is blue<|im_end|>",
    ]  # fmt: skip


def test_llama_and_mistral_call_tools() -> None:
    messages = [ASKED, CALLS, RESULT, FOUR]
    call = '{"name": "sum", "parameters": {"a": 2}}<|eot_id|>'
    assert spans("llama3_1", messages, TOOLS) == [call, "four<|eot_id|>"]
    call = '[TOOL_CALLS] [{"name": "sum", "arguments": {"a": 2}}]</s>'
    assert spans("mistral_v3", messages, TOOLS) == [call, " four</s>"]


EMPTY = {"role": "assistant", "content": ""}
TRICKY = [
    [
        ASKED,
        {"role": "assistant", "content": "0123"},
        AGAIN,
        {"role": "assistant", "content": "abcd"},
    ],
    [ASKED, FOUR, ASKED, FOUR, ASKED, FOUR],  # the same words again and again
    [FOUR | {"role": "user"}, FOUR, FOUR | {"role": "user"}, FOUR],  # and in the questions
]


@pytest.mark.parametrize("name", [*END, "gpt_oss"])
@pytest.mark.parametrize("messages", TRICKY)
def test_words_that_occur_elsewhere_are_not_taken_for_others(
    name: str, messages: list[dict[str, Any]]
) -> None:
    said = [one["content"] for one in messages if one["role"] == "assistant"]
    found = spans(name, messages)
    assert len(found) == len(said)
    for text, words in zip(found, said, strict=True):
        assert text.replace("<|channel|>final<|message|>", "").strip() in (
            words + END.get(name, "<|return|>"),
        )


@pytest.mark.parametrize("name", [*END, "gpt_oss"])
def test_an_empty_answer_is_its_end_of_turn(name: str) -> None:
    found = spans(name, [ASKED, EMPTY, AGAIN, BLUE])
    assert found[0].replace("<|channel|>final<|message|>", "").strip() == END.get(
        name, "<|return|>"
    )


def test_every_family_is_tried() -> None:
    assert set(END) | {"gpt_oss", "qwq"} == set(FAMILIES)
