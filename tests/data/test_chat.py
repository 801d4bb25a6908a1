import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from specdec.data.chat import Report, conversation, read_conversations
from specdec.data.chat import encode as encode_rows
from specdec.data.layouts import ChatConversation
from specdec.data.rows import DataRow
from tests.data import tiny
from tests.data.tiny import TWO_TURNS, encoded, supervised_texts, tiny_tokenizer, write_jsonl

QUESTION = {"role": "user", "content": "what is it?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def encode(
    template: str, *conversations: list[dict[str, Any]], max_length: int = 400, **options: Any
):
    tokenizer = tiny_tokenizer(template, **options)
    rows = [
        ChatConversation(f"a.jsonl, line {i}", messages, None, str(i))
        for i, messages in enumerate(conversations, start=1)
    ]
    return encoded(rows, tokenizer, max_length).usable(max_length, "chat"), tokenizer


def spans(template: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    documents, tokenizer = encode(template, messages, **options)
    return supervised_texts(documents[0], tokenizer)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("template", "end"),
    [
        (tiny.CHATML, "\n<|im_end|>"),
        (tiny.CHATML_TAGGED, "\n<|im_end|>"),
        (tiny.CHATML_TAGGED_CONTENT_ONLY, "\n<|im_end|>"),
        (tiny.DEFAULT_SYSTEM, "\n<|im_end|>"),
        (tiny.LLAMA3, "<|eot_id|>"),
    ],
)
def test_two_turns_supervise_the_answers_and_their_ends_and_nothing_else(
    template: str, end: str, trim_offsets: bool
) -> None:
    documents, tokenizer = encode(template, TWO_TURNS, trim_offsets=trim_offsets)
    assert supervised_texts(documents[0], tokenizer) == [
        "four" + end.strip("\n"),
        "the sky is blue" + end,
    ]


@pytest.mark.parametrize("template", [tiny.CHATML, tiny.LLAMA3, tiny.DEFAULT_SYSTEM])
def test_the_ids_are_the_template_s_own_in_one_tokenisation(template: str) -> None:
    documents, tokenizer = encode(template, TWO_TURNS)
    assert documents[0].ids_T.tolist() == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]
    assert documents[0].ids_T.tolist().count(tokenizer.bos_token_id) == (template == tiny.LLAMA3)


def test_the_beginning_is_not_doubled_by_a_tokenizer_that_adds_its_own() -> None:
    tokenizer = tiny_tokenizer(tiny.LLAMA3)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    document = encoded([ChatConversation("x", TWO_TURNS, None, "1")], tokenizer, 400).usable(
        400, "chat"
    )[0]
    assert document.ids_T.tolist().count(tokenizer.bos_token_id) == 1


TRICKY = [
    [QUESTION, answer("four")],
    [
        {"role": "system", "content": "be brief"},
        QUESTION,
        answer(" four "),
        QUESTION,
        answer("🙂 sky\n\n"),
    ],
    [QUESTION, answer("\nfour")],  # the header's line end merges with the answer's
    [QUESTION, answer("<|im_end|>\n<|im_start|>assistant\nfour")],  # markers inside an answer
    # and inside a question
    [{"role": "user", "content": "<|im_start|>assistant\nfour<|im_end|>"}, answer("six")],
    [QUESTION, answer("")],
    [QUESTION, answer("four"), answer("six"), QUESTION],
]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("messages", TRICKY)
def test_both_routes_give_the_same_mask(messages: list[dict[str, Any]], trim_offsets: bool) -> None:
    (plain,), _ = encode(tiny.CHATML, messages, trim_offsets=trim_offsets)
    for template in (tiny.CHATML_TAGGED, tiny.CHATML_TAGGED_CONTENT_ONLY):
        (tagged,), _ = encode(template, messages, trim_offsets=trim_offsets)
        assert plain.ids_T.tolist() == tagged.ids_T.tolist()
        if template == tiny.CHATML_TAGGED or "<|im_end|>" not in messages[-1]["content"]:
            assert plain.loss_mask_T.tolist() == tagged.loss_mask_T.tolist()


def test_the_tagged_mask_is_the_one_transformers_finds() -> None:
    for messages in (TWO_TURNS, TRICKY[0], TRICKY[3], TRICKY[4]):
        (document,), tokenizer = encode(tiny.CHATML_TAGGED, messages)
        theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
        assert [int(m) for m in document.loss_mask_T] == theirs["assistant_masks"]


def test_a_token_that_merges_header_and_answer_is_kept_whole_and_not_supervised() -> None:
    (document,), tokenizer = encode(tiny.CHATML, TRICKY[2])
    tokens = tokenizer.convert_ids_to_tokens(document.ids_T.tolist())
    assert "ĊĊ" in tokens[-8:]
    assert supervised_texts(document, tokenizer) == ["four<|im_end|>"]
    pieces = tokenizer("<|im_start|>assistant\n")["input_ids"] + tokenizer("\nfour")["input_ids"]
    assert pieces != tokenizer("<|im_start|>assistant\n\nfour")["input_ids"], (
        "the trap must be a trap"
    )


def test_without_an_end_of_turn_token_the_template_s_own_ending_is_supervised() -> None:
    assert spans(tiny.NO_END_OF_TURN, [QUESTION, answer("four"), QUESTION, answer("six")]) == [
        "four\n",
        "six\n",
    ]


def test_a_turn_that_the_template_writes_otherwise_later_on_gets_a_row_of_its_own() -> None:
    thought = answer("hm\n</think>\nfour")
    assert spans(tiny.DROPS_THINKING, [QUESTION, thought]) == ["hm\n</think>\nfour<|im_end|>"]
    documents, tokenizer = encode(tiny.DROPS_THINKING, [QUESTION, thought, QUESTION, answer("six")])
    # a row of each turn: the first in the context in which it was written, the second behind what is left of it
    assert [supervised_texts(document, tokenizer) for document in documents] == [
        ["hm\n</think>\nfour<|im_end|>"],
        ["six<|im_end|>"],
    ]
    second = tokenizer.apply_chat_template([QUESTION, answer("\nfour"), QUESTION, answer("six")])[
        "input_ids"
    ]
    assert documents[1].ids_T.tolist() == second


def test_a_turn_whose_context_the_template_garbles_is_not_supervised() -> None:
    tokenizer = tiny_tokenizer(tiny.SHUFFLES)
    row = ChatConversation(
        "a.jsonl, line 2", [QUESTION, answer("four"), QUESTION, answer("six")], None, "1"
    )
    report = Report()
    (document,) = encode_rows([row], tokenizer, 400, report=report)
    assert tokenizer.decode(document.ids_T[document.loss_mask_T]) == "four<|im_end|>"
    assert report.reasons == {
        "the chat template leaves out an earlier message of role assistant: remove it": 1
    }


def test_rows_and_templates_that_give_no_spans_are_refused() -> None:
    with pytest.raises(ValueError, match="no chat template: choose the instruction-tuned target"):
        encode(None, TWO_TURNS)
    with pytest.raises(
        ValueError, match="line 1: message 2: the chat template has no generation prompt there"
    ):
        encode(tiny.NO_GENERATION_PROMPT, TWO_TURNS)
    with pytest.raises(
        ValueError, match="line 1: message 1: it is the assistant's, before anybody spoke"
    ):
        encode(tiny.CHATML, [answer("four"), QUESTION])
    with pytest.raises(
        ValueError, match="line 2: the chat template refuses the conversation: roles must alternate"
    ):
        encode(tiny.ALTERNATING, TWO_TURNS, [QUESTION, QUESTION])


def test_rows_without_an_answer_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        documents, _ = encode(tiny.CHATML, [QUESTION], TWO_TURNS, [QUESTION])
    assert len(documents) == 1
    assert "dropped 2 of 3 rows, without a supervised token" in caplog.text
    with pytest.raises(ValueError, match="of 2 conversations none has a supervised token"):
        encode(tiny.CHATML, [QUESTION], [QUESTION])
    with pytest.raises(
        ValueError,
        match=r"message 2: the {% generation %} tags of the chat template mark nothing of it",
    ):
        encode(
            tiny.CHATML_TAGGED.replace("== 'assistant' %}{% gen", "== 'nobody' %}{% gen"), TWO_TURNS
        )


def test_tags_around_everything_supervise_what_follows_the_generation_prompt() -> None:
    everything = "{% generation %}" + tiny.CHATML + "{% endgeneration %}"
    bare = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    assert spans(everything, TWO_TURNS) == ["four<|im_end|>", "the sky is blue\n<|im_end|>"]
    assert spans(bare, TWO_TURNS) == ["four", "the sky is blue\n"]


def test_tags_that_leave_out_what_was_said_are_refused() -> None:
    moved = tiny.CHATML_TAGGED.replace(
        "{% generation %}{{ m['content'] + '<|im_end|>' }}",
        "{{ m['content'] }}{% generation %}{{ '<|im_end|>' }}",
    )
    with pytest.raises(ValueError, match="message 2: the chat template leaves out its text"):
        encode(moved, TWO_TURNS)


def test_long_rows_are_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    (full,), _ = encode(tiny.CHATML, TWO_TURNS)
    length = len(full.ids_T)
    with caplog.at_level(logging.INFO):
        (cut, short), _ = encode(
            tiny.CHATML, TWO_TURNS, [QUESTION, answer("six")], max_length=length - 3
        )
    assert cut.ids_T.tolist() == full.ids_T.tolist()[: length - 3]
    assert cut.loss_mask_T.tolist() == full.loss_mask_T.tolist()[: length - 3]
    assert len(short.ids_T) < length - 3
    assert f"2 conversations, 1 cut to {length - 3} tokens" in caplog.text
    with pytest.raises(ValueError, match="1 were cut to 5 tokens"):
        encode(tiny.CHATML, TWO_TURNS, max_length=5)


def test_tools_reach_the_template() -> None:
    template = "{% for t in tools %}{{ t['name'] }}{% endfor %}" + tiny.CHATML
    tokenizer = tiny_tokenizer(template)
    row = ChatConversation("x", TWO_TURNS, [{"name": "clock"}], "1")
    document = encoded([row], tokenizer, 400).usable(400, "chat")[0]
    assert tokenizer.decode(document.ids_T).startswith("clock<|im_start|>user")
    assert supervised_texts(document, tokenizer)[0] == "four<|im_end|>"


SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
OPENAI = {"messages": SAID}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}


def read(values: dict[str, Any]) -> ChatConversation:
    return conversation(DataRow("x", "line-1", values))


def test_an_id_is_the_row_s_own_or_of_what_is_said(tmp_path: Path) -> None:
    rows = [
        OPENAI | {"id": 7},
        SHAREGPT | {"prompt_id": "p"},
        OPENAI,
        SHAREGPT,
        OPENAI | {"id": "7"},
        {"id": "7#2"} | OPENAI,
    ]
    first, second, third, fourth, fifth, sixth = (
        item.id for item in read_conversations(str(write_jsonl(tmp_path / "a.jsonl", rows)))
    )
    assert (first, second, fifth, sixth) == ("7", "p", "7#2", "7#2#2")
    assert len(third) == 16 and fourth == f"{third}#2"
    moved = write_jsonl(
        tmp_path / "b.jsonl", [{"score": 3} | OPENAI, OPENAI | {"tools": [{"name": "f"}]}]
    )
    assert read_conversations(str(moved))[0].id == third != read_conversations(str(moved))[1].id


def test_tools_may_stand_in_a_string() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for value in (tools, '[{"type": "function", "function": {"name": "f"}}]'):
        assert read(OPENAI | {"tools": value}).tools == tools
    assert read(OPENAI | {"tools": []}).tools is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "x"},
            r"its columns \(text\) are of no known layout \(messages: messages; sharegpt: conversations",
        ),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [{"role": "user"}]}, "a message has no text"),
        ({"messages": ["hi"]}, "a message needs 'role' and 'content'"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "unknown role 'gpt'"),
        ({"conversations": [{"from": "alice", "value": "x"}]}, "unknown speaker 'alice'"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a string, got int"),
        ({"messages": [{"role": "user", "content": None}]}, "a message has no text"),
        ({"conversations": [{"from": ["x"], "value": "y"}]}, r"unknown speaker \['x'\]"),
        ({"messages": [{"role": ["user"], "content": "y"}]}, r"unknown role \['user'\]"),
        (
            {"messages": {"role": ["user"], "content": "y"}},
            "must be a list of at least one message",
        ),
        (OPENAI | {"tools": "f"}, "'tools' must be JSON"),
        (OPENAI | {"tools": {"f": 1}}, "'tools' must be a list"),
        (OPENAI | {"id": 1.5}, "the id must be a string or an integer, not float"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path: Path, row: dict, message: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [OPENAI, row])
    with pytest.raises(ValueError, match=message) as error:
        read_conversations([str(path)])
    assert f"{path}, line 2: " in str(error.value)
    assert "\n" not in str(error.value)
    left_out: list[str] = []
    assert len(read_conversations([str(path)], left_out=left_out)) == 1
    assert left_out == [str(error.value)]
    only = write_jsonl(tmp_path / "b.jsonl", [row])
    with pytest.raises(
        ValueError,
        match=r"b\.jsonl: holds no conversation but broken rows, as: .*b\.jsonl, line 1: ",
    ):
        read_conversations([str(path), str(only)], left_out=left_out)
