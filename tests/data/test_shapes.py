"""Rows of conversations of a shape that has come before, beside rows that are made turn by turn."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.data.chat import encode
from specdec.data.layouts import ChatConversation
from specdec.data.messages import Message
from specdec.data.shapes import Shapes, constants, looked_for, shortest
from specdec.data.template import Rendered, Template, template_of
from specdec.data.tokenizing import with_mask
from specdec.data.turns import Turns, rows_of
from tests.data.families import FAMILIES, family_tokenizer, in_default_run
from tests.data.tiny import CHATML, CHATML_TAGGED, DROPS_THINKING, LLAMA3, tiny_tokenizer

ROLES = [
    ("user", "assistant"), ("system", "user", "assistant"), ("user", "assistant", "user", "assistant"),
    ("user", "assistant", "user"), ("developer", "user", "assistant", "user", "assistant"),
    ("user", "assistant", "assistant"), ("user", "user", "assistant"),
]  # fmt: skip
NASTY = [
    "", " ", "\n", " two", "two ", "two\n", "\xa0two", "<think>", "</think>", "<think>\nhm\n</think>\n\nfour",
    "hm</think>four",
    "<|im_end|>", "<|im_end|>\n", "four<|im_end|>\n<|im_start|>assistant\nfive", "<|eot_id|>", "</s>", "<s>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n", "[INST] two [/INST]", "<tool_response>two</tool_response>",
    "assistant", "user", "system", "content", '"two"', "it's\ttwo\\n", "a", "two\n\nplus", "Zy0content zy0",
    "<b>two</b>", "{{ two }}", "{% two %}", "two | four", "漢字 🙂", "e\u0301", "<", "/no_think", "x" * 600,
]  # fmt: skip
WORDS = st.sampled_from(["two plus two", "is four", "is it green?", "the sky is blue"])


def texts_of(source: str) -> st.SearchStrategy[str]:
    pieces = st.one_of(
        st.sampled_from(NASTY),
        st.text(max_size=8),
        st.sampled_from(sorted(constants(source)) or [""]),
    )
    return st.one_of(WORDS, WORDS, WORDS, pieces, st.tuples(WORDS, pieces, WORDS).map("".join))


@st.composite
def conversations(draw: st.DrawFn, source: str) -> list[ChatConversation]:
    """Of few shapes, so that most of them have come before."""
    texts = texts_of(source)
    roles = draw(st.sampled_from(ROLES))
    with_thought = draw(st.sampled_from([False, False, True]))
    weights = draw(st.lists(st.sampled_from([None, None, None, 0, 1]), min_size=5, max_size=5))
    made = []
    for _ in range(draw(st.integers(2, 5))):
        messages: list[Message] = []
        for role, weight in zip(roles, weights, strict=False):
            message: Message = {"role": role, "content": draw(texts)}
            if role == "assistant":
                message |= {} if weight is None else {"weight": weight}
                message |= {"reasoning_content": draw(texts)} if with_thought else {}
            messages.append(message)
        made.append(ChatConversation("chats, line 1", messages, None, "1"))
    return made


def quick(tokenizer: Any, turns: Turns = "auto") -> Shapes:
    """Learns a shape with its first conversation, and compares none."""
    return Shapes(Template(tokenizer), turns, often=1, checked=0, every=2**60)


def conversation(*texts: str) -> ChatConversation:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return ChatConversation("", messages, None, "")


def is_learned(shapes: Shapes) -> bool:
    return all(known.skeleton is not None for known in shapes.known.values())


SOURCES = {
    "chatml": CHATML,
    "tagged": CHATML_TAGGED,
    "drops thinking": DROPS_THINKING,
    "llama": LLAMA3,
}
TOKENIZERS = {name: tiny_tokenizer(source) for name, source in SOURCES.items()} | {
    name: family_tokenizer(name) for name in FAMILIES
}


@pytest.mark.parametrize("name", in_default_run(TOKENIZERS, "qwen3", "llama3"))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_rows_are_those_that_are_made_turn_by_turn(name: str, data: st.DataObject) -> None:
    turns: Turns = data.draw(st.sampled_from(["auto", "auto", "whole", "each"]))
    shapes = quick(TOKENIZERS[name], turns)
    for item in data.draw(conversations(TOKENIZERS[name].chat_template)):
        assert shapes.rows(item) == rows_of(shapes.template, item, turns)


@pytest.mark.parametrize("name", in_default_run(TOKENIZERS, "qwen3", "llama3"))
def test_a_plain_conversation_is_learned_under_every_template_that_does_not_ask_for_thoughts(
    name: str,
) -> None:
    shapes = quick(TOKENIZERS[name])
    for text in ("four", "five"):
        rows = shapes.rows(conversation("two", text))
        assert rows == rows_of(shapes.template, conversation("two", text))
    assert is_learned(shapes) == (name != "qwq"), "QwQ's prompt opens a thought"


def test_what_a_template_looks_for_is_not_plain() -> None:
    source = (
        "{% if '/think' in messages[0].content %}{% endif %}{% if 'name' in messages[0] %}"
        "{{ messages[0].name }}{% endif %}"
        "{{ messages[0].content.split('[end]')[0].strip('\\n').lstrip('#') | replace('cat', 'dog') }}"
    )
    assert looked_for(source) == {"/think", "[end]", "#", "cat", "dog"}
    assert looked_for("{% set tag = '[x]' %}{{ messages[0].content.endswith(tag) }}") == {"[x]"}


def test_of_many_words_their_beginnings_are_looked_for() -> None:
    assert shortest({"<a>", "<a><b>", "[x]"}) == ("<a>", "[x]")
    assert shortest({f"<unused{number}>" for number in range(6000)} | {"[x]"}) == (
        *(f"<unused{number}" for number in range(10)),
        "[x]",
    )


@pytest.mark.parametrize("name", in_default_run(TOKENIZERS, "qwen3", "llama3"))
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_documents_are_those_of_rows_that_are_made_turn_by_turn(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    drawn = [item for _ in range(4) for item in data.draw(conversations(tokenizer.chat_template))]
    made = [item for item in drawn * 8 if rows_of(template_of(tokenizer), item).pieces]
    if not made:
        return
    expected = []
    for item in made:
        for piece in rows_of(template_of(tokenizer), item).pieces:
            assert isinstance(piece, Rendered)
            (encoding,) = tokenizer([piece.text], add_special_tokens=False).encodings
            expected.append([column.tolist() for column in with_mask(encoding, piece)])
    documents = encode(made, tokenizer, 2**20)
    assert [
        [document.ids_T.tolist(), document.loss_mask_T.tolist()] for document in documents
    ] == expected


COUNTS = CHATML.replace(
    "{% if add", "{% if messages[0].content | length CONDITION %}{{ '!' }}{% endif %}{% if add"
)


def test_a_template_that_counts_the_characters_of_a_text_is_not_learned() -> None:
    shapes = quick(tiny_tokenizer(COUNTS.replace("CONDITION", "> 100 and add_generation_prompt")))
    shapes.rows(conversation("two", "four"))
    assert not is_learned(shapes)


# a fault that cannot be seen in the texts: the prompt of some conversations is another one, and the whole is as ever
FAULTY = COUNTS.replace("CONDITION", "== 3 and add_generation_prompt")


def test_a_shape_of_which_one_conversation_differs_goes_turn_by_turn_from_then_on() -> None:
    faulty = conversation("six", "four")
    careless = quick(tiny_tokenizer(FAULTY))
    careless.rows(conversation("seven", "four"))
    assert is_learned(careless)
    assert careless.rows(faulty) != rows_of(careless.template, faulty), "the fault must be one"
    careful = Shapes(Template(tiny_tokenizer(FAULTY)), often=1, checked=1, every=4)
    careful.rows(conversation("seven", "four"))
    assert careful.rows(faulty) == rows_of(careful.template, faulty)
    assert not is_learned(careful)
    assert careful.rows(faulty) == rows_of(careful.template, faulty)


def test_a_shape_is_given_up_when_its_texts_are_written_otherwise_again_and_again() -> None:
    shapes = quick(tiny_tokenizer(CHATML.replace("m['content']", "(m['content'] | tojson)")))
    shapes.rows(conversation("two", "four"))
    assert is_learned(shapes)
    for _ in range(20):
        item = conversation('"two"', "four")
        assert shapes.rows(item) == rows_of(shapes.template, item)
    assert not is_learned(shapes)
