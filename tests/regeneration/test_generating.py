"""Batches of prompts of different lengths: every prompt gets what it gets alone."""

import pytest

from specdec.decoding import PlainDecoder, Sampling
from specdec.regeneration.generating import Generator
from specdec.target import Target
from tests.target.zoo import make, tokens

LENGTHS = (1, 17, 4, 11, 2)
NEW = 12
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "phi", "gpt2", "opt", "cohere2")

EAGER = ("gemma2",)  # whose softmax is in float32, where the mask of float64 is minus infinity: padding becomes NaN


def prompts() -> list[list[int]]:
    return [tokens(length, seed=length)[0].tolist() for length in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_token(family: str) -> None:
    """Against our own decoder, which knows no padding; some of the families have windows of five."""
    model = make(family)
    target = Target(model.float() if family in EAGER else model)
    made = Generator(target, Sampling(), NEW).generate(prompts(), [0] * len(LENGTHS))
    decoder, ends = PlainDecoder(target), target.eos_token_ids
    assert made == [decoder.generate(ids, NEW, ends).ids for ids in prompts()]
    assert len({tuple(ids) for ids in made}) == len(LENGTHS)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9, top_k=20), Sampling(1.3, min_p=0.1)])
def test_drawn_tokens_are_those_of_our_decoder(sampling: Sampling) -> None:
    target = Target(make("llama").float())
    seeds = [5, 6, 7, 8, 2**47]
    made = Generator(target, sampling, NEW).generate(prompts(), seeds)
    decoder, ends = PlainDecoder(target, sampling), target.eos_token_ids
    for ids, seed, found in zip(prompts(), seeds, made, strict=True):
        assert decoder.generate(ids, NEW, ends, seed).ids == found
    greedy = Generator(target, Sampling(), NEW).generate(prompts(), seeds)
    assert sum(one != other for one, other in zip(made, greedy, strict=True)) > 1


def test_a_text_ends_with_its_end_token() -> None:
    target = Target(make("llama"))
    free = Generator(target, Sampling(), NEW).generate(prompts(), [0] * len(LENGTHS))
    target.model.generation_config.eos_token_id = [free[1][4], free[3][2]]
    made = Generator(target, Sampling(), NEW).generate(prompts(), [0] * len(LENGTHS))
    for ids, found in zip(free, made, strict=True):
        end = next((index for index, token in enumerate(ids, start=1) if token in target.eos_token_ids), NEW)
        assert found == ids[:end]
    assert min(map(len, made)) < NEW


def test_the_targets_own_settings_of_generation_are_not_at_work() -> None:
    target = Target(make("llama"))
    plain = Generator(target, Sampling(), NEW).generate(prompts(), [0] * len(LENGTHS))
    config = target.model.generation_config
    config.repetition_penalty, config.do_sample, config.temperature, config.no_repeat_ngram_size = 5.0, True, 3.0, 1
    assert Generator(target, Sampling(), NEW).generate(prompts(), [0] * len(LENGTHS)) == plain


def test_logits_that_are_no_numbers_are_no_tokens() -> None:
    target = Target(make("llama"))
    target.head_weight().data[3] = float("nan")
    with pytest.raises(ValueError, match=r"its logits are not numbers in torch.float64"):
        Generator(target, Sampling(), NEW).generate(prompts(), [0] * len(LENGTHS))
