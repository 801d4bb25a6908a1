import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec.evaluation.prompts import Conversation, Prompt, load_prompts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a start token put in front of plain text as Llama's tokenizers do."""
    vocabulary = {"<s>": 0, "</s>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")


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
        ("{", r"line 2, column 2: not valid JSON: Expecting property name"),
        ('{"prompt": %s}' % ("9" * 5000), "line 2: not usable JSON"),
        ("[" * 100_000, "line 2: not usable JSON"),
        ('["a"]', "must be a JSON object, not list"),
        ("{}", "exactly one of turns, messages and prompt; it has none of them"),
        ({"prompt": None, "turns": None}, "none of them"),
        ({"prompt": "a", "turns": ["b"]}, "turns and prompt together"),
        ({"prompt": ["a"]}, "prompt must be a string, not list"),
        ({"prompt": " \n"}, "prompt is empty"),
        ('{"prompt": "a\\ud800"}', "half of a surrogate pair"),
        ({"turns": "a"}, "turns must be a list"),
        ({"turns": []}, "turns must be a list with something in it"),
        ({"turns": ["a", 3]}, "a turn must be a string, not int"),
        ({"turns": ["a", ""]}, "a turn is empty"),
        ({"messages": {"role": "user"}}, "messages must be a list"),
        ({"messages": ["a"]}, "message 1 must be an object"),
        ({"messages": [USER, {"role": "assistant", "content": "Yes"}]}, "must end with a user turn.*not assistant"),
        ({"messages": [{"role": "human", "content": "Hi"}]}, "message 1 has role 'human'"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "message 1 has role"),
        ({"messages": [{"role": "user"}]}, "must have role and content"),
        ({"messages": [USER | {"tool_calls": [1]}]}, "and nothing else.*tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content must be a string, not list"),
        ({"id": 1.5, "prompt": "a"}, "id must be a string or an integer, not float"),
        ({"id": True, "prompt": "a"}, "id must be a string or an integer, not bool"),
        ({"category": 3, "prompt": "a"}, "category must be a string"),
        ({"id": "first", "prompt": "a"}, "line 2: id first is taken by line 1 already"),
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
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(ValueError, match=r"name it \.jsonl"):
        load_prompts([tmp_path / "rows.json"])


def test_raw_text_is_tokenised_as_the_tokenizer_does(
    tokenizer: PreTrainedTokenizerFast, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    for one in (tokenizer, plain_tokenizer):
        conversation = Conversation(Prompt("a", None, None, None, "Hi"), one)
        ids = conversation.next_ids()
        assert ids == one("Hi").input_ids
        assert ids[0] == one.bos_token_id
        conversation.add_answer([5, 6])
        assert conversation.next_ids() is None
        assert conversation.next_ids() is None


def test_turns_build_on_the_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = Prompt("a", None, ["One?", "Two?"], None, None)
    conversation = Conversation(prompt, tokenizer, system="Be brief.")
    first = conversation.next_ids()
    assert tokenizer.decode(first) == "<s>[system]Be brief.[user]One?[assistant]"
    assert first.count(tokenizer.bos_token_id) == 1
    answer = [*tokenizer.encode("Ünö.", add_special_tokens=False), tokenizer.eos_token_id]
    conversation.add_answer(answer)
    second = conversation.next_ids()
    assert tokenizer.decode(second) == ("<s>[system]Be brief.[user]One?[assistant]Ünö.</s>[user]Two?[assistant]")
    assert second[: len(first + answer)] == first + answer
    conversation.add_answer([])
    assert conversation.next_ids() is None
    assert prompt.turns == ["One?", "Two?"]  # the prompt can be used again, for the next growth


def test_messages_are_one_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [USER, {"role": "assistant", "content": "Yes"}, USER]
    prompt = Prompt("a", None, None, messages, None)
    conversation = Conversation(prompt, tokenizer)
    assert tokenizer.decode(conversation.next_ids()) == "<s>[user]Hi[assistant]Yes</s>[user]Hi[assistant]"
    conversation.add_answer([5])
    assert conversation.next_ids() is None
    assert messages == [USER, {"role": "assistant", "content": "Yes"}, USER]
    with_system = Conversation(prompt, tokenizer, system="S").next_ids()
    assert tokenizer.decode(with_system).startswith("<s>[system]S[user]Hi")


def test_what_a_conversation_refuses(
    tokenizer: PreTrainedTokenizerFast, plain_tokenizer: PreTrainedTokenizerFast
) -> None:
    turns = Prompt("t", None, ["Hi"], None, None)
    system = {"role": "system", "content": "S"}
    with pytest.raises(ValueError, match=r"prompt t: the tokenizer has no chat template.*`prompt` rows"):
        Conversation(turns, plain_tokenizer)
    with pytest.raises(ValueError, match="raw text takes no system prompt"):
        Conversation(Prompt("r", None, None, None, "Hi"), tokenizer, system="S")
    with pytest.raises(ValueError, match="brings its own system message"):
        Conversation(Prompt("m", None, None, [system, USER], None), tokenizer, system="S")
    with pytest.raises(ValueError, match=r"prompt m: the chat template refuses.*system comes first"):
        Conversation(Prompt("m", None, None, [USER, system, USER], None), tokenizer).next_ids()


def test_turns_and_answers_alternate(tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = Conversation(Prompt("t", None, ["a", "b"], None, None), tokenizer)
    with pytest.raises(AssertionError):
        conversation.add_answer([5])
    conversation.next_ids()
    with pytest.raises(AssertionError):
        conversation.next_ids()


def test_a_prompt_of_no_tokens_is_refused() -> None:
    class Silent:
        chat_template = None

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return []

    with pytest.raises(ValueError, match="prompt r: the tokenizer makes no tokens"):
        Conversation(Prompt("r", None, None, None, "Hi"), Silent()).next_ids()
