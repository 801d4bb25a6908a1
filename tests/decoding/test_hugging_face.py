"""A drafter in ``model.generate``: what transformers says without it is the oracle."""

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import BaseStreamer

from specdec.decoding import Chain, DraftedGenerate, DraftShape, DynamicTree
from specdec.drafter import save_drafter
from specdec.target import Target
from tests.perfect import astray, markov_target, perfect_drafter
from tests.tiny import HIDDEN, VOCAB, presets, tiny_drafter, variants

SPECS = {
    name: dataclasses.replace(spec, draft_vocab_size="all")
    for name, spec in (presets() | variants()).items()
}
TARGET = markov_target(context=0.4)  # now and then it says what the drafters do not expect
MODEL: PreTrainedModel = TARGET.model
PLAIN = copy.deepcopy(MODEL)  # with transformers' own attention
PLAIN.set_attn_implementation("sdpa")
DRAFTER = perfect_drafter(TARGET, SPECS["eagle3_1"])
PROMPTS = [[3, 4, 5], [60], list(range(40))]
LENGTH = 24


def plain(prompt: list[int], **options: Any) -> list[int]:
    """Prompt and tokens of transformers' own loop."""
    answer: Tensor = PLAIN.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, **options)
    return answer[0].tolist()


@pytest.fixture(scope="module")
def drafted() -> DraftedGenerate:
    return DraftedGenerate(MODEL, DRAFTER, Chain(depth=4))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("eagle1", Chain(1)),
        ("eagle3_1", Chain(4)),
        ("eagle3_1", DynamicTree(depth=4, top_k=3, nodes=12)),
        ("peagle", Chain(4)),
        ("dflash", Chain(3)),
    ],
)
def test_greedy_tokens_are_those_of_plain_generate(name: str, shape: DraftShape) -> None:
    is_perfect = name in presets()
    drafter = perfect_drafter(TARGET, SPECS[name]) if is_perfect else tiny_drafter(SPECS[name])
    drafted = DraftedGenerate(MODEL, drafter, shape)
    accepted: list[int] = []
    for prompt in PROMPTS:
        text = MODEL.generate(
            torch.tensor([prompt]), max_new_tokens=LENGTH, custom_generate=drafted
        )
        assert text[0].tolist() == plain(prompt)
        assert drafted.generation is not None
        accepted += drafted.generation.accepted
    depth = shape.depth if isinstance(shape, Chain | DynamicTree) else 0
    if is_perfect:  # a drafter of which all is accepted, or nothing, would prove little
        assert 0 < sum(accepted) < len(accepted) * depth
        assert astray(plain(PROMPTS[0])) > 0


def test_the_order_of_words_in_the_prompt_matters() -> None:
    """So that equal tokens say something about attention."""
    ends = {tuple(plain([*order, 5])[4:]) for order in itertools.permutations([3, 40, 21])}
    assert len(ends) > 1


def test_it_reads_a_saved_drafter_and_ends_at_the_models_own_end_token(tmp_path: Path) -> None:
    saved = save_drafter(DRAFTER, tmp_path / "drafter")
    drafted = DraftedGenerate(MODEL, saved, "chain:depth=3")
    text = plain(PROMPTS[0])
    for end in dict.fromkeys(text[3:]):
        expected = plain(PROMPTS[0], eos_token_id=end, pad_token_id=0)
        given = MODEL.generate(
            torch.tensor(PROMPTS[:1]),
            max_new_tokens=LENGTH,
            custom_generate=drafted,
            eos_token_id=[end, 1000],
            pad_token_id=0,
        )
        assert given[0].tolist() == expected == text[: text.index(end, 3) + 1]
        assert drafted.generation is not None
        assert drafted.generation.ids == expected[3:]


class AfterToken(StoppingCriteria):
    """Stops at the given number of tokens, a place within a pass as good as any."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("length", range(4, 14))
def test_a_criterion_ends_the_text_within_a_pass_and_a_streamer_hears_no_more(
    length: int, drafted: DraftedGenerate
) -> None:
    heard = Heard()
    prompt = PROMPTS[0]
    text = MODEL.generate(
        torch.tensor([prompt]),
        max_new_tokens=LENGTH,
        custom_generate=drafted,
        stopping_criteria=[AfterToken(length)],
        token_streamer=heard,
        return_dict_in_generate=True,
    ).sequences[0].tolist()  # fmt: skip
    assert text == plain(prompt)[:length]
    assert heard.ids == text
    assert heard.ended == 1
    generation = drafted.generation
    assert generation is not None
    assert generation.ids == text[len(prompt) :]
    # the prompt's own pass gives one token, each further pass its accepted drafts and one more
    assert len(generation.ids) == 1 + sum(generation.accepted) + len(generation.accepted)


def test_what_it_returns_can_be_trained_on(drafted: DraftedGenerate) -> None:
    text = MODEL.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, custom_generate=drafted)
    assert not text.is_inference()
    text += 0


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_transformers_own_streamer_writes_what_plain_generate_writes(
    skip_prompt: bool, target_directory: Path, drafter_directory: Path, capsys: Any
) -> None:
    target = Target.load(target_directory)
    inputs = target.tokenizer("def add", return_tensors="pt")
    streamer = TextStreamer(target.tokenizer, skip_prompt=skip_prompt)
    plain_model = AutoModelForCausalLM.from_pretrained(target_directory)
    plain_model.generate(**inputs, max_new_tokens=12, do_sample=False, streamer=streamer)
    expected = capsys.readouterr().out
    drafted = DraftedGenerate(target.model, drafter_directory)
    target.model.generate(
        **inputs,
        max_new_tokens=12,
        do_sample=False,
        custom_generate=drafted,
        token_streamer=streamer,
    )
    assert capsys.readouterr().out == expected
    assert expected.startswith("def add") != skip_prompt


def test_sampling_is_that_of_transformers_and_repeats_with_the_seed(
    drafted: DraftedGenerate,
) -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        text = MODEL.generate(
            torch.tensor(PROMPTS[:1]), max_new_tokens=LENGTH, custom_generate=drafted, **options
        )
        texts.append(text[0].tolist())
    assert texts[0] == texts[1] != texts[2]
    used = drafted._decoder.sampling
    logits = torch.randn(50, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = logits
    for warper in (
        TemperatureLogitsWarper(1.5),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.01),
    ):
        scores = warper(torch.zeros(1, 1), scores)
    torch.testing.assert_close(used.probs(logits), scores.softmax(-1))
    assert not torch.allclose(used.probs(logits), logits.softmax(-1))


def test_first_tokens_are_drawn_with_the_models_probabilities(drafted: DraftedGenerate) -> None:
    """Of 200 texts the second token, which a draft was judged for, by Pearson's chi-square."""
    prompt = torch.tensor(PROMPTS[:1])
    options = {"do_sample": True, "temperature": 8.0, "top_k": 3, "max_new_tokens": 2}
    torch.manual_seed(0)
    ours = [MODEL.generate(prompt, custom_generate=drafted, **options)[0, 3:] for _ in range(200)]
    theirs = PLAIN.generate(prompt.expand(200, -1), **options)[:, 3:]

    def counts(texts: Any) -> Tensor:
        codes = torch.tensor([int(a) * VOCAB + int(b) for a, b in texts])
        return torch.bincount(codes, minlength=VOCAB**2).double()

    one, two = counts(ours), counts(theirs)
    seen = one + two >= 10
    statistic = float(((one - two)[seen] ** 2 / (one + two)[seen]).sum())
    freedom = int(seen.sum()) - 1
    assert freedom >= 3
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor cannot be applied"),
        ({"num_beams": 3}, "num_beams=3"),
        ({"num_return_sequences": 2, "do_sample": True}, "one sequence at a time, not 2"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "padding"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"max_new_tokens": 600}, "512 positions"),
        ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids must count from 0"),
        ({"inputs_embeds": torch.zeros(1, 3, HIDDEN).double()}, "inputs_embeds cannot be given"),
    ],
)
def test_what_it_cannot_do_is_one_error(
    options: dict[str, Any], message: str, drafted: DraftedGenerate
) -> None:
    options = {"max_new_tokens": LENGTH} | options
    with pytest.raises(ValueError, match=message):
        MODEL.generate(torch.tensor(PROMPTS[:1]), custom_generate=drafted, **options)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_another_model_or_cache_is_refused(drafted: DraftedGenerate) -> None:
    other = markov_target().model
    prompt = torch.tensor(PROMPTS[:1])
    with pytest.raises(ValueError, match="another model object"):
        other.generate(prompt, custom_generate=drafted, max_new_tokens=4)
    cache = MODEL(prompt, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds tokens already"):
        MODEL.generate(
            torch.tensor([[3, 4, 5, 6]]),
            past_key_values=cache,
            custom_generate=drafted,
            max_new_tokens=4,
        )


def test_a_drafter_of_another_target_is_refused(
    target_directory: Path, foreign_drafter: Path
) -> None:
    model = Target.load(target_directory).model
    with pytest.raises(ValueError, match="was trained for another target"):
        DraftedGenerate(model, foreign_drafter)
