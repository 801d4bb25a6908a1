"""Side by side decoding of prompts: what is decoded, in which order, and what the answers say."""

from typing import Any, NamedTuple

import pytest
import torch

from specdec.decoding import Chain, DynamicTree, Generation, PlainDecoder, SpeculativeDecoder
from specdec.drafter import Drafter, DrafterConfig
from specdec.evaluation.benchmark import WARM_UP_TOKENS, Turn, benchmark
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.record import Answer
from specdec.target import Target
from tests.data.tiny import CHATML, tiny_tokenizer
from tests.tiny import LAYERS, presets, tiny_target

NEW = 12
GROWTHS = [Chain(3), DynamicTree(depth=2, top_k=3, nodes=7)]
PROMPTS = [
    Prompt("7", "writing", ["what is two plus two?", "and the sky?"], None, None),
    Prompt("raw", None, None, None, "the grass is"),
    Prompt("8", "math", None, [{"role": "system", "content": "hi"}, {"role": "user", "content": "fine"}], None),
]


class Pair(NamedTuple):
    """A target with a tokenizer, and a drafter for it."""

    target: Target
    drafter: Drafter


class Call(NamedTuple):
    """One generation, as the decoders were asked for it."""

    who: str
    prompt: list[int]
    most: int
    end: frozenset[int]
    made: Generation


@pytest.fixture(scope="module")
def pair() -> Pair:
    tokenizer = tiny_tokenizer(CHATML)
    target = Target(tiny_target(vocab_size=len(tokenizer)).model, tokenizer)
    config = DrafterConfig.for_target(
        presets()["eagle3_1"],
        target.config,
        vocab_size=target.vocab_size,
        num_target_layers=LAYERS,
        identity={"source": "tiny"},
    )
    torch.manual_seed(0)
    return Pair(target, Drafter(config, torch.arange(40)).double().requires_grad_(False))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every generation that the benchmark asks for, in order."""
    seen: list[Call] = []
    for cls in (PlainDecoder, SpeculativeDecoder):
        original = cls.generate

        def spy(self: Any, prompt: list[int], most: int, end: Any = (), original: Any = original) -> Generation:
            made = original(self, prompt, most, end)
            who = self.growth.name if isinstance(self, SpeculativeDecoder) else "plain"
            seen.append(Call(who, list(prompt), most, end, made))
            return made

        monkeypatch.setattr(cls, "generate", spy)
    return seen


def test_decoders_take_turns_after_one_warm_up_each(pair: Pair, calls: list[Call]) -> None:
    benchmark(pair.target, pair.drafter, GROWTHS, PROMPTS, NEW)
    names = ["plain", "chain of 3", "tree of 7 (depth 2, top 3)"]
    assert [call.who for call in calls] == names * 5  # warm-up, two turns, and two prompts of one
    assert [call.most for call in calls] == [WARM_UP_TOKENS] * 3 + [NEW] * 12
    for first in range(0, 15, 3):
        assert calls[first].prompt == calls[first + 1].prompt == calls[first + 2].prompt
    assert calls[0].prompt == calls[3].prompt
    assert {call.end for call in calls} == {pair.target.eos_token_ids} != {frozenset()}


def test_an_answer_records_what_was_decoded(pair: Pair, calls: list[Call]) -> None:
    answers = benchmark(pair.target, pair.drafter, GROWTHS, PROMPTS, NEW)
    assert len(answers) == 2
    for growth, own in enumerate(answers):
        assert [(a.prompt_id, a.category) for a in own] == [("7", "writing")] * 2 + [("raw", None), ("8", "math")]
        for turn, answer in enumerate(own):
            plain, spec = calls[3 + 3 * turn], calls[3 + 3 * turn + 1 + growth]
            assert answer == Answer(
                prompt_id=answer.prompt_id,
                category=answer.category,
                tokens=len(spec.made.ids),
                accepted=spec.made.accepted,
                drafted=(GROWTHS[growth].depth,) * len(spec.made.accepted),
                seconds=spec.made.seconds,
                plain_seconds=plain.made.seconds,
                plain_tokens=len(plain.made.ids),
                identical=True,
            )
            assert answer.seconds > 0 and answer.plain_seconds > 0 and 0 < answer.tokens <= NEW


def test_the_next_turn_builds_on_the_plain_answer(pair: Pair, calls: list[Call]) -> None:
    benchmark(pair.target, pair.drafter, GROWTHS[:1], PROMPTS[:1], NEW)
    tokenizer, plain = pair.target.tokenizer, calls[2]
    first = [{"role": "user", "content": "what is two plus two?"}]
    text = tokenizer.decode(plain.made.ids, skip_special_tokens=True)
    second = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "and the sky?"}]
    for call, messages in ((calls[2], first), (calls[4], second), (calls[5], second)):
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert call.prompt == tokenizer.encode(rendered, add_special_tokens=False)


def test_the_system_prompt_comes_first(pair: Pair, calls: list[Call]) -> None:
    benchmark(pair.target, pair.drafter, GROWTHS[:1], PROMPTS[:1], 2, system="be kind")
    assert all("be kind<|im_end|>" in pair.target.tokenizer.decode(call.prompt) for call in calls)


def test_without_plain_decoding_nothing_is_compared(pair: Pair, calls: list[Call]) -> None:
    with_plain = benchmark(pair.target, pair.drafter, GROWTHS, PROMPTS, NEW)
    calls.clear()
    answers = benchmark(pair.target, pair.drafter, GROWTHS, PROMPTS, NEW, plain=False)
    assert [call.who for call in calls if call.most == NEW] == ["chain of 3", "tree of 7 (depth 2, top 3)"] * 4
    for own, wanted in zip(answers, with_plain, strict=True):
        for answer, other in zip(own, wanted, strict=True):
            assert (answer.plain_seconds, answer.plain_tokens, answer.identical) == (0.0, 0, None)
            assert (answer.tokens, answer.accepted) == (other.tokens, other.accepted)  # turn two: the same prompt


def test_a_difference_is_recorded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SpeculativeDecoder.generate

    def wrong(self: SpeculativeDecoder, prompt: list[int], most: int, end: Any = ()) -> Generation:
        made = original(self, prompt, most, end)
        return made._replace(ids=[*made.ids[:-1], made.ids[-1] ^ 1]) if self.growth == GROWTHS[1] else made

    monkeypatch.setattr(SpeculativeDecoder, "generate", wrong)
    right, changed = benchmark(pair.target, pair.drafter, GROWTHS, PROMPTS[1:2], NEW)
    assert (right[0].identical, changed[0].identical) == (True, False)


def test_progress_counts_tokens_and_prompts(pair: Pair, calls: list[Call]) -> None:
    turns: list[Turn] = []
    benchmark(pair.target, pair.drafter, GROWTHS, PROMPTS, NEW, on_turn=turns.append)
    assert [turn.last for turn in turns] == [False, True, True, True]
    timed = calls[3:]
    assert [turn.tokens for turn in turns] == [
        sum(len(call.made.ids) for call in timed[i : i + 3]) for i in range(0, 12, 3)
    ]
    benchmark(pair.target, pair.drafter, GROWTHS[:1], PROMPTS[1:2], NEW, plain=False, on_turn=turns.append)
    assert turns[-1].tokens == len(calls[-1].made.ids)


def test_a_prompt_too_long_is_named(pair: Pair) -> None:
    long = Prompt("long one", None, None, None, "sky " * 520)
    for prompts in ([PROMPTS[1], long], [long]):
        with pytest.raises(ValueError, match=r"^prompt long one: a prompt of \d+ tokens and \d+ new ones exceed"):
            benchmark(pair.target, pair.drafter, GROWTHS, prompts, NEW)


def test_a_prompt_without_what_it_needs_is_named(pair: Pair) -> None:
    bare = Target(pair.target.model, tiny_tokenizer(None))
    with pytest.raises(ValueError, match="prompt 7: the tokenizer has no chat template"):
        benchmark(bare, pair.drafter, GROWTHS, PROMPTS, NEW)
    with pytest.raises(ValueError, match="has no tokenizer"):
        benchmark(Target(pair.target.model), pair.drafter, GROWTHS, PROMPTS, NEW)


def test_a_drafter_of_another_target_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="drafter and target do not match: the target's vocabulary size is 61"):
        benchmark(tiny_target(), pair.drafter, GROWTHS, PROMPTS, NEW)


def test_no_prompts_give_no_answers(pair: Pair, calls: list[Call]) -> None:
    assert benchmark(pair.target, pair.drafter, GROWTHS, [], NEW) == [[], []]
    assert calls == []
