"""What users hand in and get: prompts of every kind, texts, chunks."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec.decoding import (
    Chain,
    Chunk,
    Generation,
    PlainDecoder,
    SpeculativeDecoder,
    continuation,
)
from specdec.decoding.generation import TextStream, request_ids
from specdec.target import Target
from tests.perfect import markov_target, perfect_drafter, successors
from tests.tiny import VOCAB, presets, tiny_drafter, tiny_target

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
LETTERS = "".join(chr(code) for code in range(32, 127))[: VOCAB - 7]


def byte_level() -> PreTrainedTokenizerFast:
    """Of every token one byte: capitals and signs, and the two bytes of é and the three of €."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((written, _),) = splitter.pre_tokenize_str(LETTERS + "é€")
    tokens = ["<s>", "</s>", *written]
    assert len(tokens) == len(set(tokens)) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def words() -> PreTrainedTokenizerFast:
    """Words behind a space that a text does not begin with, as Llama 2's tokenizer has them."""
    tokens = ["<s>", "</s>", "▁", *(f"▁w{n}" for n in range(20)), *(f"x{n}" for n in range(10))]
    tokenizer = Tokenizer(
        models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="<s>")
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


BYTES, WORDS = byte_level(), words()
MARKOV = markov_target()
TARGET = Target(MARKOV.model, BYTES)
PERFECT = perfect_drafter(
    MARKOV, dataclasses.replace(presets()["eagle3_1"], draft_vocab_size="all")
)
DECODER = SpeculativeDecoder(TARGET, PERFECT)


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BYTES, "chat_template", TEMPLATE)


def test_text_begins_with_what_the_tokenizer_adds() -> None:
    ids = [0, *BYTES.encode("AB", add_special_tokens=False)]
    assert request_ids("AB", TARGET) == ids
    assert DECODER.generate("AB", 20).ids == DECODER.generate(ids, 20).ids


@pytest.mark.usefixtures("template")
def test_a_conversation_is_asked_in_the_template_and_its_bos_stands_once() -> None:
    messages = [{"role": "system", "content": "AB"}, {"role": "user", "content": "C"}]
    assert request_ids(messages, TARGET) == BYTES.encode("[AB][C]>")
    assert DECODER.generate(messages, 5).prompt == BYTES.encode("[AB][C]>")


@pytest.mark.parametrize(
    "ids",
    [[3, 4], (3, 4), torch.tensor([3, 4]), torch.tensor([[3, 4]]), list(torch.tensor([3, 4]))],
    ids=str,
)
def test_token_ids_of_any_make(ids: Any) -> None:
    assert request_ids(ids, TARGET) == [3, 4]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["AB", "c"], "one text's token ids, not list of str"),
        ([[3, 4]], "not list of list"),
        ([{"role": "user", "content": "A"}, 3], "not list of dict"),
        (torch.tensor([[3, 4], [5, 6]]), "not list of list"),
        (torch.tensor([0.5]), "not list of float"),
        ({"input_ids": [3, 4]}, "not dict"),
        (
            [{"role": "user", "content": "A"}],
            "the tokenizer has no chat template, which a conversation needs",
        ),
        ([], "the prompt is empty"),
        ([VOCAB], "token ids outside"),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_what_is_no_prompt_is_refused_at_the_call(method: str, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(DECODER, method)(prompt)


@pytest.mark.usefixtures("template")
def test_a_template_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BYTES, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        ValueError, match="the chat template refuses the conversation: roles must alternate"
    ):
        DECODER.generate([{"role": "user", "content": "A"}])


def test_a_generation_says_what_it_is() -> None:
    made = DECODER.generate([3, 4], 31, ())
    # the chain of five that is the default
    assert made.acceptance_length == 6 and made.accepted == (5,) * 5
    assert made.text == BYTES.decode(made.ids, skip_special_tokens=True)
    assert made.tokens_per_second == 31 / made.seconds
    shown = repr(made)
    assert (
        shown == str(made)
        and shown.startswith("Generation(31 tokens in 0.")
        and repr(made.text) in shown
    )
    assert ", acceptance length 6.00, " in shown
    assert PlainDecoder(TARGET).generate([3, 4], 7).acceptance_length == 1
    assert DECODER.generate([3, 4], 1).acceptance_length is None
    assert "acceptance" not in repr(DECODER.generate([3, 4], 1))


def test_without_a_tokenizer_there_are_ids_alone() -> None:
    decoder = SpeculativeDecoder(MARKOV, PERFECT)
    made = decoder.generate([3, 4], 7)
    assert made.ids == DECODER.generate([3, 4], 7).ids and f"ids={made.ids}" in repr(made)
    for fails in (
        lambda: made.text,
        lambda: decoder.generate("AB"),
        lambda: decoder.stream([3, 4]),
    ):
        with pytest.raises(ValueError, match="has no tokenizer"):
            fails()


def test_it_stops_at_the_targets_own_end_unless_told_otherwise() -> None:
    end = int(successors()[successors()[successors()[4]]])
    target = tiny_target()
    ends = Target(MARKOV.model, BYTES)
    assert not target.eos_token_ids and ends.eos_token_ids == {1}
    wanted = DECODER.generate([3, 4], 70, ()).ids
    assert len(wanted) == 70 and wanted[2] == end
    assert DECODER.generate([3, 4], 70).ids == wanted[: wanted.index(1) + 1]
    assert DECODER.generate([3, 4], 70, [end]).ids == wanted[:3]
    assert [chunk.ids for chunk in DECODER.stream([3, 4], 70, [end])] == [wanted[:1], wanted[1:3]]


@pytest.mark.parametrize("most", [1, 2, 6, 7, 8, 40])
@pytest.mark.parametrize("end", [(), None], ids=["endless", "ends"])
def test_chunks_are_the_generation(most: int, end: tuple[int, ...] | None) -> None:
    made: Generation = DECODER.generate("AB", most, end)
    chunks = list(DECODER.stream("AB", most, end))
    assert [token for chunk in chunks for token in chunk.ids] == made.ids
    assert "".join(chunk.text for chunk in chunks) == made.text
    assert all(len(chunk.texts) == len(chunk.ids) for chunk in chunks)
    assert chunks[0].accepted == 0 and len(chunks[0].ids) == 1  # the prompt's pass
    assert [chunk.accepted for chunk in chunks[1:-1]] == list(made.accepted[:-1])
    for chunk in chunks[1:]:
        # cut, the last may be of drafts alone
        assert len(chunk.ids) - 1 <= chunk.accepted <= len(chunk.ids)


def test_drafts_that_are_refused_are_in_no_chunk() -> None:
    target, drafter = tiny_target(), tiny_drafter(presets()["eagle3"])
    decoder = SpeculativeDecoder(Target(target.model, BYTES), drafter, Chain(3))
    chunks = list(decoder.stream([3, 4], 30, ()))
    assert [len(chunk.ids) - 1 for chunk in chunks[1:-1]] == list(
        decoder.generate([3, 4], 30, ()).accepted[:-1]
    )
    assert 0 in [chunk.accepted for chunk in chunks[1:]]


def test_a_stream_may_be_left_and_begun_anew() -> None:
    first = next(DECODER.stream("AB", 20))
    again = list(DECODER.stream("AB", 20))
    assert again[0] == first and isinstance(first, Chunk)
    assert not torch.is_inference_mode_enabled()


def test_one_character_of_several_tokens() -> None:
    stream = TextStream(BYTES, [0])
    tokens = BYTES.encode("Aé€", add_special_tokens=False)
    assert [stream.add(token) for token in tokens] == ["A", "", "é", "", "", "€"]
    assert stream.add(tokens[3]) == "" and stream.rest() == "\N{REPLACEMENT CHARACTER}"


def test_a_word_behind_the_prompt_keeps_its_space() -> None:
    prompt, ids = (
        WORDS.convert_tokens_to_ids(["▁w1", "x1"]),
        WORDS.convert_tokens_to_ids(["▁w2", "x3", "▁w4"]),
    )
    assert WORDS.decode(ids) == "w2x3 w4" and continuation(WORDS, prompt, ids) == " w2x3 w4"
    stream = TextStream(WORDS, prompt)
    assert [stream.add(token) for token in ids] == [" w2", "x3", " w4"]


@given(st.data())
def test_the_stream_of_any_tokens_is_their_text(data: st.DataObject) -> None:
    tokenizer = data.draw(st.sampled_from([BYTES, WORDS]))
    token = st.integers(0, len(tokenizer) - 1) | st.integers(len(tokenizer) - 6, len(tokenizer) - 1)
    prompt, ids = data.draw(st.lists(token, max_size=6)), data.draw(st.lists(token, max_size=16))
    stream = TextStream(tokenizer, prompt)
    assert "".join([*map(stream.add, ids), stream.rest()]) == continuation(tokenizer, prompt, ids)
