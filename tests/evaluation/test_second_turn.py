"""What the second turn of a conversation asks: what transformers' own rendering of the first answer's parts gives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdec.decoding import Chain
from specdec.drafter import Drafter, DrafterConfig
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.prompts import Prompt, PromptConversation
from specdec.target import Target
from tests.engines.chat_targets import (
    FAMILIES,
    TALKS,
    ChatFamily,
    Turn,
    asked_ids,
    chat_tokenizer,
    make_chat_target,
    prompts_of,
    user,
)
from tests.tiny import presets

ASKED = [asked["content"] for asked in TALKS["plain"].asked]
PROMPT = Prompt("talk", None, ASKED, None, None)
SWITCHED = [name for name, family in FAMILIES.items() if family.switched]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {name: chat_tokenizer(family) for name, family in FAMILIES.items()}


def second_ids(tokenizer: Any, written: str, thinking: bool | None = None) -> list[int]:
    """What is asked behind a first answer."""
    conversation = PromptConversation(PROMPT, tokenizer, thinking=thinking)
    assert conversation.next_ids() is not None
    conversation.add_answer(tokenizer.encode(written, add_special_tokens=False))
    ids = conversation.next_ids()
    assert ids is not None
    conversation.add_answer([])
    assert conversation.next_ids() is None
    return ids


def expected_ids(tokenizer: Any, answer: dict[str, Any], thinking: bool | None = None) -> list[int]:
    """The same by transformers alone."""
    switches = {} if thinking is None else {"enable_thinking": thinking}
    return asked_ids(tokenizer, [user(ASKED[0]), answer, user(ASKED[1])], **switches)


def without_end(family: ChatFamily, written: str) -> str:
    return next(written.removesuffix(end) for end in family.ends if written.endswith(end))


TURNS = {
    "text": Turn("add two and two", "four"),
    "lines": Turn("add\n\nboth,\nthen stop", "it is\n\n- four <b>\n- {four}"),
    "call": Turn("this needs the tool", arguments={"a": 2, "b": 3}),
}


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("kind", TURNS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_stands_as_the_template_writes_its_parts(
    name: str, kind: str, end: bool, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    family, turn, tokenizer = FAMILIES[name], TURNS[kind], tokenizers[name]
    if turn.arguments and not family.remembered:
        pytest.skip("the template writes no calls")
    written = family.write(turn)
    written = written if end else without_end(family, written)
    for thinking in (None, True) if family.switched else (None,):
        expected = expected_ids(tokenizer, family.message(turn), thinking)
        assert second_ids(tokenizer, written, thinking) == expected
        asked = tokenizer.decode(expected)
        assert ('"add"' in asked or "add" in asked) if turn.arguments else turn.text in asked
        # all templates drop the thought of an earlier turn
        assert turn.arguments or turn.thought not in asked


@pytest.mark.parametrize("name", SWITCHED)
def test_an_answer_without_a_thought(
    name: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    """The prompt holds the empty thought, and what is written is the text alone."""
    family, tokenizer = FAMILIES[name], tokenizers[name]
    answer = {"role": "assistant", "content": "four\n\nor 4"}
    written = ("\n" if name == "glm" else "") + answer["content"] + family.ends[0]
    expected = expected_ids(tokenizer, answer, thinking=False)
    assert second_ids(tokenizer, written, thinking=False) == expected
    assert expected != expected_ids(tokenizer, answer)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SWITCHED])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_template_without_a_switch_is_refused(
    name: str, thinking: bool, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    with pytest.raises(
        ValueError, match="prompt talk: the chat template has no switch for thinking"
    ):
        PromptConversation(PROMPT, tokenizers[name], thinking=thinking)


CUT = {  # answers that ran out of tokens, and what becomes of them
    "deepseek_r1": ("add two and", {"content": "add two and"}),
    "qwen3": ("<think>\nadd two and", {"content": "<think>\nadd two and"}),
    "glm": ("\n<think>add two and", {"content": "<think>add two and"}),
    "llama3_1": ('{"name": "add", "para', {"content": '{"name": "add", "para'}),
}


@pytest.mark.parametrize("name", CUT)
def test_an_answer_that_cannot_be_read_is_asked_as_it_is(
    name: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    written, answer = CUT[name]
    expected = expected_ids(tokenizers[name], {"role": "assistant", **answer})
    assert second_ids(tokenizers[name], written) == expected
    assert written.strip() in tokenizers[name].decode(expected)


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("written", "content"),
    [
        (f"{ANALYSIS}add two and", ""),
        (f"{ANALYSIS}add two and<|end|>", ""),
        (f"{ANALYSIS}add two and<|end|><|start|>", ""),
        (f"{ANALYSIS}add two and<|end|><|start|>assistant", ""),
        (f"{ANALYSIS}add two and<|end|><|start|>assistant<|channel|>", ""),
        (f"{ANALYSIS}add two and<|end|><|start|>assistant<|channel|>final", ""),
        (f"{ANALYSIS}add<|end|><|start|>assistant{FINAL}fo", "fo"),
        # two answers, which it never reads
        (f"{FINAL}four{FINAL}five<|return|>", "finalfourfinalfive"),
    ],
)
def test_a_template_that_refuses_its_own_marks_in_a_text_goes_on(
    written: str, content: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    """A thought without an end would end the evaluation of the prompt."""
    tokenizer = tokenizers["gpt_oss"]
    assert second_ids(tokenizer, written) == expected_ids(
        tokenizer, {"role": "assistant", "content": content}
    )


# a template that knows nothing of thoughts, and one of DeepSeek-V3.1's kind, whose switch is named `thinking`
PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
V3_1 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% else %}"
    "<|assistant|></think>{{ m['content'].split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking is defined and thinking %}<think>{% else %}</think>"
    "{% endif %}{% endif %}"
)


def test_marks_that_the_template_does_not_know_are_text(
    tokenizers: dict[str, PreTrainedTokenizerFast],
) -> None:
    tokenizer = chat_tokenizer(FAMILIES["qwen3"])
    tokenizer.chat_template = PLAIN
    written = "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    expected = expected_ids(tokenizer, {"role": "assistant", "content": written})
    assert second_ids(tokenizer, written + "<|im_end|>") == expected
    assert written in tokenizer.decode(expected)


@pytest.mark.parametrize(
    ("thinking", "end", "written"),
    [
        (None, "</think>", "four"),
        (False, "</think>", "four"),
        (True, "<think>", "add two and two</think>four"),
    ],
)
def test_a_switch_that_is_named_thinking(thinking: bool | None, end: str, written: str) -> None:
    tokenizer = chat_tokenizer(FAMILIES["qwen3"])
    tokenizer.chat_template = V3_1
    switches = {} if thinking is None else {"thinking": thinking}
    first = PromptConversation(PROMPT, tokenizer, thinking=thinking).next_ids()
    assert first == asked_ids(tokenizer, [user(ASKED[0])], **switches)
    assert tokenizer.decode(first).endswith(f"<|assistant|>{end}")
    messages = [user(ASKED[0]), {"role": "assistant", "content": "four"}, user(ASKED[1])]
    expected = asked_ids(tokenizer, messages, **switches)
    assert second_ids(tokenizer, written + "<|im_end|>", thinking) == expected
    assert tokenizer.decode(expected).endswith(
        f"</think>four<|im_end|><|user|>{ASKED[1]}<|assistant|>{end}"
    )


class Recorded(PromptConversation):
    """Keeps what is asked."""

    asked: list[list[int]]

    def next_ids(self) -> list[int] | None:
        ids = super().next_ids()
        if ids is not None:
            self.__dict__.setdefault("asked", []).append(ids)
        return ids


@pytest.mark.parametrize("name", ["deepseek_r1", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_target_that_answers_by_itself(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a whole evaluation."""
    family = FAMILIES[name]
    target = Target.load(make_chat_target(name, tmp_path_factory.mktemp("target") / name))
    spec = replace(presets()["eagle3_1"], aux_layers=(0, 1, 2))
    config = DrafterConfig.for_target(
        spec,
        target.config,
        vocab_size=target.vocab_size,
        num_target_layers=2,
        identity={"source": "tiny"},
    )
    torch.manual_seed(0)
    conversations: list[Recorded] = []

    def converse(prompt: Prompt, tokenizer: Any) -> PromptConversation:
        conversations.append(Recorded(prompt, tokenizer))
        return conversations[-1]

    drafter = Drafter(config, torch.arange(config.draft_vocab_size)).requires_grad_(False)
    (answers,) = benchmark(target, drafter, [Chain(2)], [PROMPT], 60, converse=converse)
    assert len(answers) == 2 and all(answer.identical for answer in answers)
    assert [conversation.asked for conversation in conversations] == [
        prompts_of(target.tokenizer, family, TALKS["plain"])
    ]
