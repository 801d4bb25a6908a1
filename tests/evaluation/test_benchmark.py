"""Side by side decoding of prompts: what is decoded, in which order, and what the answers say."""

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.decoding import (
    Chain,
    DynamicTree,
    Generation,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
)
from specdec.drafter import Drafter, DrafterConfig
from specdec.evaluation.benchmark import WARM_UP_TOKENS, benchmark, parse_baseline
from specdec.evaluation.metrics import Answer
from specdec.evaluation.prompts import Prompt, PromptConversation, Skipped
from specdec.target import Target
from tests.data.tiny import ALTERNATING, CHATML, tiny_tokenizer
from tests.evaluation.made import alter
from tests.tiny import LAYERS, presets, tiny_target

NEW = 9
SHAPES = [Chain(3), DynamicTree(depth=2, top_k=3, nodes=7)]
PROMPTS = [
    Prompt("7", "writing", ["what is two plus two?", "and the sky?"], None, None),
    Prompt("raw", None, None, None, "the grass is"),
    Prompt(
        "8",
        "math",
        None,
        [{"role": "system", "content": "hi"}, {"role": "user", "content": "fine"}],
        None,
    ),
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
    seed: int


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


def spied(patch: pytest.MonkeyPatch) -> list[Call]:
    """Every generation that the benchmark asks for, in order."""
    seen: list[Call] = []
    original = PlainDecoder.generate_all  # the other's too

    def spy(
        self: PlainDecoder, requests: Sequence[Request], end: frozenset[int]
    ) -> Iterator[tuple[int, Generation]]:
        who = self.shape.name if isinstance(self, SpeculativeDecoder) else "plain"
        for number, made in original(self, requests, end):
            request = requests[number]
            seen.append(
                Call(who, list(request.prompt), request.max_new_tokens, end, made, request.seed)
            )
            yield number, made

    patch.setattr(PlainDecoder, "generate_all", spy)
    return seen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    return spied(monkeypatch)


Measured = tuple[list[list[Answer]], list[Call]]


@pytest.fixture(scope="module")
def measured(pair: Pair) -> Measured:
    """All shapes and prompts, greedily with seed 5: the answers, and the generations."""
    with pytest.MonkeyPatch.context() as patch:
        seen = spied(patch)
        return benchmark(
            pair.target, pair.drafter, SHAPES, PROMPTS, NEW, sampling=Sampling(seed=5)
        ), seen


def moved_on(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


def test_decoders_take_turns_after_one_warm_up_each(pair: Pair, measured: Measured) -> None:
    _, calls = measured
    names = ["plain", "chain of 3", "tree of 7 (depth 2, top 3)"]
    # two of one prompt, and of two prompts one
    turns = [name for turn in range(4) for name in moved_on(names, turn)]
    assert [call.who for call in calls] == names + turns  # nobody always follows the same other
    assert [call.most for call in calls] == [WARM_UP_TOKENS] * 3 + [NEW] * 12
    for first in range(0, 15, 3):
        assert calls[first].prompt == calls[first + 1].prompt == calls[first + 2].prompt
    assert calls[0].prompt == calls[3].prompt
    assert {call.end for call in calls} == {pair.target.eos_token_ids} != {frozenset()}


def test_an_answer_records_what_was_decoded(measured: Measured) -> None:
    answers, calls = measured
    assert len(answers) == 2
    for shape, own in enumerate(answers):
        assert [(a.prompt_id, a.category) for a in own] == [("7", "writing")] * 2 + [
            ("raw", None),
            ("8", "math"),
        ]
        for turn, answer in enumerate(own):
            by = {call.who: call for call in calls[3 + 3 * turn : 6 + 3 * turn]}
            plain, spec = by["plain"], by[SHAPES[shape].name]
            assert answer == Answer(
                prompt_id=answer.prompt_id,
                category=answer.category,
                tokens=len(spec.made.ids),
                accepted=spec.made.accepted,
                drafted=spec.made.drafted,
                seconds=spec.made.seconds,
                plain_seconds=plain.made.seconds,
                plain_tokens=len(plain.made.ids),
                identical=True,
                draft_ms=spec.made.draft_ms,
                verify_ms=spec.made.verify_ms,
            )
            depth = SHAPES[shape].depth
            if isinstance(SHAPES[shape], Chain):
                assert answer.drafted == (depth,) * len(answer.accepted)
            assert len(answer.drafted) == len(answer.accepted) and all(
                0 < one <= depth for one in answer.drafted
            )
            inside = sum(answer.draft_ms) + sum(answer.verify_ms)
            assert (
                min(answer.draft_ms) > 0 < min(answer.verify_ms) and inside < 1e3 * answer.seconds
            )
            assert answer.seconds > 0 and answer.plain_seconds > 0 and 0 < answer.tokens <= NEW


def test_the_next_turn_builds_on_the_plain_answer(pair: Pair, calls: list[Call]) -> None:
    benchmark(pair.target, pair.drafter, SHAPES[:1], PROMPTS[:1], NEW)
    tokenizer, plain = pair.target.tokenizer, calls[2]
    first = [{"role": "user", "content": "what is two plus two?"}]
    text = tokenizer.decode(plain.made.ids, skip_special_tokens=True)
    second = [
        *first,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "and the sky?"},
    ]
    for call, messages in ((calls[2], first), (calls[4], second), (calls[5], second)):
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert call.prompt == tokenizer.encode(rendered, add_special_tokens=False)


def test_without_plain_decoding_nothing_is_compared(
    pair: Pair, calls: list[Call], measured: Measured
) -> None:
    with_plain, _ = measured
    answers = benchmark(pair.target, pair.drafter, SHAPES, PROMPTS, NEW, plain=False)
    assert [call.who for call in calls if call.most == NEW] == [
        name
        for turn in range(4)
        for name in moved_on(["chain of 3", "tree of 7 (depth 2, top 3)"], turn)
    ]
    for own, wanted in zip(answers, with_plain, strict=True):
        for answer, other in zip(own, wanted, strict=True):
            assert (answer.plain_seconds, answer.plain_tokens, answer.identical) == (0.0, 0, None)
            # turn two: the same prompt
            assert (answer.tokens, answer.accepted) == (other.tokens, other.accepted)


def test_a_difference_is_recorded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(decoder: SpeculativeDecoder, asked: Request, ids: list[int]) -> list[int]:
        return [*ids[:-1], ids[-1] ^ 1] if decoder.shape == SHAPES[1] else ids

    alter(monkeypatch, wrong)
    right, changed = benchmark(pair.target, pair.drafter, SHAPES, PROMPTS[1:2], NEW)
    assert (right[0].identical, changed[0].identical) == (True, False)


def test_a_turn_has_one_seed_for_all_decoders(measured: Measured) -> None:
    _, calls = measured
    turns = [(0, 0), (0, 1), (1, 0), (2, 0)]
    seeds = [5 + (prompt << 44) + (turn << 32) for prompt, turn in turns]
    assert [call.seed for call in calls[3:]] == [seed for seed in seeds for _ in range(3)]


def test_side_by_side_answers_are_those_of_one_at_a_time(pair: Pair) -> None:
    sampling, new = Sampling(temperature=0.9, seed=5), 6
    prompts = [*PROMPTS, PROMPTS[1]._replace(prompt_id="raw again")]
    alone = benchmark(pair.target, pair.drafter, SHAPES, prompts, new, sampling=sampling)
    together = benchmark(
        pair.target, pair.drafter, SHAPES, prompts, new, sampling=sampling, batch=2
    )

    def counts(answers: list[list[Answer]]) -> list[list[Answer]]:
        return [
            [one._replace(seconds=0, plain_seconds=0, draft_ms=(), verify_ms=()) for one in own]
            for own in answers
        ]

    assert counts(together) == counts(alone)


def test_baselines_say_the_same_and_have_no_passes(pair: Pair) -> None:
    baselines = [parse_baseline(text) for text in ("transformers", "prompt_lookup")]
    found = benchmark(pair.target, pair.drafter, SHAPES, PROMPTS, NEW, baselines=baselines)
    assert len(found) == len(SHAPES) + 2
    for answers in found:
        assert [answer.identical for answer in answers] == [True] * 4
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in found[0]]
        assert all(answer.seconds > 0 for answer in answers)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of this package's own."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("specdec")]


LONG = Prompt("long one", None, None, None, "sky " * 520)
LATER = Prompt("long later", "x", ["what is two plus two?", "sky " * 520], None, None)


def test_a_prompt_too_long_is_left_out(
    pair: Pair, measured: Measured, calls: list[Call], caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    skipped: list[Skipped] = []
    prompts = [LONG, PROMPTS[1], LATER, PROMPTS[2]]
    found = benchmark(
        pair.target, pair.drafter, SHAPES, prompts, NEW, advance=lambda more, now="": done.append(more),
        on_skip=skipped.append,
    )  # fmt: skip
    assert [call.most for call in calls] == [WARM_UP_TOKENS] * 3 + [NEW] * 9
    assert [one.prompt_id for one in skipped] == ["long one", "long later"]
    assert all(
        one.reason.startswith("a prompt of ") and "positions" in one.reason for one in skipped
    )
    assert sum(done) == 4
    (warning,) = told(caplog)
    assert warning.startswith(
        "left out 2 of 4 prompts (long one, long later); long one: a prompt of "
    )
    for own, wanted in zip(found, (own[2:] for own in measured[0]), strict=True):
        assert [(a.prompt_id, a.tokens, a.accepted) for a in own] == [
            (a.prompt_id, a.tokens, a.accepted) for a in wanted
        ]


@pytest.mark.parametrize(
    ("prompts", "end"),
    [([LONG], ""), ([LATER], ""), ([LONG, LATER], "; none of 2 can be decoded")],
)
def test_if_all_are_left_out_the_first_is_named(
    pair: Pair, prompts: list[Prompt], end: str
) -> None:
    wanted = rf"^prompt {prompts[0].prompt_id}: a prompt of [\d,]+ tokens and 9 new ones exceed .* positions{end}$"
    with pytest.raises(ValueError, match=wanted):
        benchmark(pair.target, pair.drafter, SHAPES, prompts, NEW)


def test_a_prompt_that_the_template_refuses_is_left_out(pair: Pair) -> None:
    strict = Target(pair.target.model, tiny_tokenizer(ALTERNATING))
    skipped: list[Skipped] = []
    (answers,) = benchmark(strict, pair.drafter, SHAPES[:1], PROMPTS, NEW, on_skip=skipped.append)
    assert [answer.prompt_id for answer in answers] == ["7", "7", "raw"]
    assert skipped == [
        Skipped("8", "the chat template refuses the conversation: roles must alternate")
    ]


@pytest.mark.parametrize("more", [{}, {"system": "Be brief."}], ids=["alone", "system"])
def test_a_blank_prompt_is_left_out(pair: Pair, more: dict[str, Any]) -> None:
    blank = Prompt("blank", None, None, None, "")
    skipped: list[Skipped] = []
    (answers,) = benchmark(
        pair.target, pair.drafter, SHAPES[:1], [blank, PROMPTS[0]], NEW, converse=partial(PromptConversation, **more),
        on_skip=skipped.append,
    )  # fmt: skip
    assert [answer.prompt_id for answer in answers] == ["7", "7"]
    assert skipped == [Skipped("blank", "it is empty, or a part of it is")]


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_reaches_the_template(pair: Pair, calls: list[Call], thinking: bool) -> None:
    end = "{% if enable_thinking is defined and not enable_thinking %}{{ 'fine' }}{% endif %}"
    chats = [PROMPTS[0], PROMPTS[2]]
    thinker = Target(pair.target.model, tiny_tokenizer(CHATML + end))
    benchmark(
        thinker,
        pair.drafter,
        SHAPES[:1],
        chats,
        2,
        converse=partial(PromptConversation, thinking=thinking),
    )
    assert len(calls) == 8
    assert {
        thinker.tokenizer.decode(call.prompt).endswith("assistant\nfine") for call in calls
    } == {not thinking}
    with pytest.raises(ValueError, match="prompt raw: raw text takes no thinking"):
        benchmark(
            thinker,
            pair.drafter,
            SHAPES[:1],
            PROMPTS,
            2,
            converse=partial(PromptConversation, thinking=thinking),
        )


def test_a_drafter_of_another_target_is_refused(pair: Pair) -> None:
    with pytest.raises(
        ValueError, match="drafter and target do not match: the target's vocabulary size is 61"
    ):
        benchmark(tiny_target(), pair.drafter, SHAPES, PROMPTS, NEW)


REQUESTS = [Request([5, 6, 7], 12), Request(list(range(20, 40)), 12)]


def test_an_assistant_drafts_and_the_target_speaks(target_directory: Path) -> None:
    """The target is its own assistant here."""
    target = Target.load(str(target_directory))
    wanted = [PlainDecoder(target).generate(*request[:2], ()).ids for request in REQUESTS]
    baseline = parse_baseline(f"assisted:{target_directory}")
    assert str(target_directory) in baseline.name
    decoder = baseline.decoder(target, Sampling())
    assert [made.ids for _, made in decoder.generate_all(REQUESTS, ())] == wanted
    assert decoder.how["assistant_model"] is not target.model


def test_an_assistant_with_another_tokenizer_is_refused(
    target_directory: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(target_directory, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ValueError, match=r"assisted: .*other has another tokenizer than the target"
    ):
        parse_baseline(f"assisted:{other}").decoder(Target.load(str(target_directory)), Sampling())


@pytest.mark.parametrize("text", ["", "lookup", "assisted", "assisted:", "prompt_lookup:5"])
def test_what_is_no_baseline_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected transformers, prompt_lookup"):
        parse_baseline(text)


class Halved(PromptConversation):
    """Calls the first half of every answer a thought."""

    def regions(self, ids: Sequence[int]) -> list[str]:
        return ["thought" if 2 * n < len(ids) else "text" for n in range(len(ids))]


def test_every_pass_has_the_region_of_its_first_draft(pair: Pair) -> None:
    (answers,) = benchmark(pair.target, pair.drafter, SHAPES[:1], PROMPTS[2:], NEW, converse=Halved)
    (answer,) = answers
    starts = [1 + sum(answer.accepted[:n]) + n for n in range(len(answer.accepted))]
    inside = ["thought" if 2 * min(start, NEW - 1) < NEW else "text" for start in starts]
    assert list(answer.regions) == inside and set(inside) == {"thought", "text"}


class FirstTurnThinks(PromptConversation):
    """Calls the answer to the first turn a thought, as a prompt may open one in one turn alone."""

    asked = 0

    def next_ids(self) -> list[int] | None:
        self.asked += 1
        return super().next_ids()

    def regions(self, ids: Sequence[int]) -> list[str]:
        return ["thought" if self.asked == 1 else "text"] * len(ids)


def test_regions_are_those_of_the_turn_s_own_prompt(pair: Pair) -> None:
    (answers,) = benchmark(
        pair.target, pair.drafter, SHAPES[:1], PROMPTS[:1], NEW, converse=FirstTurnThinks
    )
    first, second = answers
    assert set(first.regions) == {"thought"} and second.regions == ()


def test_ordinary_answers_have_no_regions(pair: Pair) -> None:
    (answers,) = benchmark(pair.target, pair.drafter, SHAPES[:1], PROMPTS, NEW)
    assert {answer.regions for answer in answers} == {()}
