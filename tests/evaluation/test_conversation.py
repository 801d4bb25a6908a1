"""Conversations as token ids: chat templates, turns, thinking."""

import hashlib

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec.evaluation.prompts import Prompt, PromptConversation, template_sha256
from tests.data.tiny import CHATML, tiny_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKS = (
    TEMPLATE
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
USER = {"role": "user", "content": "Hi"}


def made(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes, and a start token put in front of plain text as Llama's tokenizers do."""
    vocabulary = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return made(TEMPLATE)


@pytest.fixture(scope="module")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return made(None)


def test_raw_text_is_tokenised_as_the_tokenizer_does(
    tokenizer: PreTrainedTokenizerFast, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    for one in (tokenizer, plain_tokenizer):
        conversation = PromptConversation(Prompt("a", None, None, None, "Hi"), one)
        ids = conversation.next_ids()
        assert ids == one("Hi").input_ids
        assert ids[0] == one.bos_token_id
        conversation.add_answer([5, 6])
        assert conversation.next_ids() is None
        assert conversation.next_ids() is None


def test_turns_build_on_the_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = Prompt("a", None, ["One?", "Two?"], None, None)
    conversation = PromptConversation(prompt, tokenizer, system="Be brief.")
    first = conversation.next_ids()
    assert tokenizer.decode(first) == "<s>[system]Be brief.[user]One?[assistant]"
    assert first.count(tokenizer.bos_token_id) == 1
    answer = [*tokenizer.encode("Ünö.", add_special_tokens=False), tokenizer.eos_token_id]
    conversation.add_answer(answer)
    second = conversation.next_ids()
    assert tokenizer.decode(second) == (
        "<s>[system]Be brief.[user]One?[assistant]Ünö.</s>[user]Two?[assistant]"
    )
    assert second[: len(first + answer)] == first + answer
    conversation.add_answer([])
    assert conversation.next_ids() is None
    assert prompt.turns == ["One?", "Two?"]  # the prompt can be used again, for the next shape


def test_messages_are_one_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [USER, {"role": "assistant", "content": "Yes"}, USER]
    prompt = Prompt("a", None, None, messages, None)
    conversation = PromptConversation(prompt, tokenizer)
    assert (
        tokenizer.decode(conversation.next_ids())
        == "<s>[user]Hi[assistant]Yes</s>[user]Hi[assistant]"
    )
    conversation.add_answer([5])
    assert conversation.next_ids() is None
    assert messages == [USER, {"role": "assistant", "content": "Yes"}, USER]
    with_system = PromptConversation(prompt, tokenizer, system="S").next_ids()
    assert tokenizer.decode(with_system).startswith("<s>[system]S[user]Hi")


def test_what_a_conversation_refuses(
    tokenizer: PreTrainedTokenizerFast, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    turns = Prompt("t", None, ["Hi"], None, None)
    system = {"role": "system", "content": "S"}
    with pytest.raises(
        ValueError, match=r"prompt t: the tokenizer has no chat template, which.*`prompt` rows"
    ):
        PromptConversation(turns, plain_tokenizer)
    with pytest.raises(ValueError, match="raw text takes no system prompt"):
        PromptConversation(Prompt("r", None, None, None, "Hi"), tokenizer, system="S")
    with pytest.raises(ValueError, match="prompt r: raw text takes no thinking"):
        PromptConversation(Prompt("r", None, None, None, "Hi"), tokenizer, thinking=False)
    with pytest.raises(ValueError, match="brings its own system message"):
        PromptConversation(Prompt("m", None, None, [system, USER], None), tokenizer, system="S")
    with pytest.raises(
        ValueError, match=r"prompt m: the chat template refuses.*system comes first"
    ):
        PromptConversation(
            Prompt("m", None, None, [USER, system, USER], None), tokenizer
        ).next_ids()
    with pytest.raises(ValueError, match=r"prompt t: the chat template refuses.*concatenate"):
        PromptConversation(turns, made("{{ messages[0]['content'] + 1 }}")).next_ids()


def test_a_prompt_of_no_tokens_is_refused() -> None:
    class Silent:
        chat_template = None

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return []

    with pytest.raises(ValueError, match="prompt r: the tokenizer makes no tokens"):
        PromptConversation(Prompt("r", None, None, None, "Hi"), Silent()).next_ids()


@pytest.mark.parametrize(("thinking", "end"), [(None, ""), (True, ""), (False, "<think></think>")])
def test_thinking_is_the_templates_argument(thinking: bool | None, end: str) -> None:
    tokenizer = made(THINKS)
    conversation = PromptConversation(
        Prompt("t", None, ["One?", "Two?"], None, None), tokenizer, thinking=thinking
    )
    assert tokenizer.decode(conversation.next_ids()) == f"<s>[user]One?[assistant]{end}"
    conversation.add_answer([])
    assert tokenizer.decode(conversation.next_ids()).endswith(f"[user]Two?[assistant]{end}")


def test_the_hash_of_the_template_is_of_its_text(
    tokenizer: PreTrainedTokenizerFast, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    turns, raw = Prompt("t", None, ["Hi"], None, None), Prompt("r", None, None, None, "Hi")
    assert template_sha256(tokenizer, [raw, turns]) == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert template_sha256(made(THINKS), [turns]) != template_sha256(tokenizer, [turns])
    assert template_sha256(tokenizer, [raw]) is None  # it was not used
    assert template_sha256(plain_tokenizer, [raw]) is None
    several = made(None)
    several.chat_template = {"default": TEMPLATE, "tool_use": THINKS}
    assert len(template_sha256(several, [turns]) or "") == 64


def test_tools_stand_in_the_prompt_and_calls_in_regions() -> None:
    pytest.importorskip("trl")
    from benchmarks.chat_oracle.tokenizers import tokenizer_of

    tokenizer = tokenizer_of("qwen3")
    tool = {
        "type": "function",
        "function": {"name": "get_forecast", "parameters": {"type": "object", "properties": {}}},
    }
    asked = Prompt("a", None, ["How warm is it?", "And now?"], None, None, [tool])
    conversation = PromptConversation(asked, tokenizer)
    prompt = tokenizer.decode(conversation.next_ids())
    assert "get_forecast" in prompt
    bare = PromptConversation(asked._replace(tools=None), tokenizer).next_ids()
    assert "get_forecast" not in tokenizer.decode(bare)
    call = '<tool_call>\n{"name": "get_forecast", "arguments": {}}\n</tool_call>'
    answer = tokenizer.encode(
        f"<think>\nLook.\n</think>\n\n{call}<|im_end|>", add_special_tokens=False
    )
    regions = conversation.regions(answer)
    assert set(regions) == {"thought", "text", "tool call"}
    assert sorted(regions, key=["thought", "text", "tool call"].index) == regions
    conversation.add_answer(answer)
    assert '"get_forecast", "arguments"' in tokenizer.decode(conversation.next_ids())


def test_tools_that_a_template_does_not_write_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "get_forecast", "parameters": {}}}
    asked = Prompt("a", None, ["How warm is it?"], None, None, [tool])
    conversation = PromptConversation(asked, tiny_tokenizer(CHATML))
    with pytest.raises(ValueError, match="prompt a: the chat template does not write tools"):
        conversation.next_ids()


def test_answers_to_raw_text_are_text() -> None:
    conversation = PromptConversation(Prompt("a", None, None, None, "Hi"), tiny_tokenizer(CHATML))
    assert conversation.regions([1, 2, 3]) == ["text"] * 3
