"""Sampled decoding: plain decoding's tokens where the rule repeats them, and its law everywhere."""

import math
from collections import Counter
from functools import cache

import pytest
import torch

from specdec.decoding import (
    Chain,
    DraftShape,
    DynamicTree,
    PlainDecoder,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
)
from specdec.decoding.accept import Greedy, OneHot, WithoutReplacement
from specdec.decoding.decoder import Request
from specdec.decoding.sampling import draw, token_noise
from specdec.target import Target
from tests.perfect import markov_target, perfect_drafter
from tests.tiny import VOCAB, presets, tiny_drafter, tiny_target

PROMPT = [3, 4, 5]
BINARY = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
GROWTHS: list[DraftShape] = [Chain(4), BINARY, DynamicTree(depth=3, top_k=3, nodes=9)]
WARPS = {
    "warm": Sampling(temperature=0.8),
    "cut": Sampling(temperature=1.2, top_k=9, top_p=0.8, min_p=0.02),
    "one-hot, greedy": Sampling(rule="one_hot"),
}


def noisy_markov() -> Target:
    """A Markov target whose next token is uncertain, with a drafter that knows its law at the first step."""
    target = markov_target()
    with torch.no_grad():
        target.model.lm_head.weight *= 0.1
    return target


MARKOV = noisy_markov()
DRAFTER = perfect_drafter(MARKOV, presets()["eagle3_1"])
TINY = tiny_target(), tiny_drafter(presets()["eagle3"])


@cache
def plain(name: str, target: Target) -> list[list[int]]:
    """What plain decoding says with seeds 0 and 1."""
    return [
        PlainDecoder(target, WARPS[name]).generate(PROMPT, 12, seed=seed).ids for seed in range(2)
    ]


@pytest.mark.parametrize(("growth", "name"), list(zip(GROWTHS, WARPS, strict=True)), ids=str)
def test_the_tokens_are_those_that_plain_decoding_draws(name: str, growth: DraftShape) -> None:
    accepted = 0
    for pair in (MARKOV, DRAFTER), TINY:
        decoder, texts = SpeculativeDecoder(*pair, growth, WARPS[name]), plain(name, pair[0])
        for seed, wanted in enumerate(texts):
            made = decoder.generate(PROMPT, 12, seed=seed)
            assert made.ids == wanted
            accepted += sum(made.accepted)
        assert len(set(map(tuple, texts))) == (2 if WARPS[name].temperature else 1)
    assert accepted > 0


def test_plain_decoding_draws_from_the_law_of_the_whole_text() -> None:
    """Of all tokens so far, the first one drawn among them; one forward over everything for each token."""
    target, sampling = tiny_target(), WARPS["cut"]
    for seed in range(3):
        ids = list(PROMPT)
        for place in range(len(PROMPT), len(PROMPT) + 16):
            with torch.no_grad():
                logits_V = target.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            noise_V = token_noise(torch.tensor([seed]), torch.tensor([[place]]), VOCAB)[0, 0]
            ids.append(int(draw(sampling.probs(logits_V), noise_V)))
        assert (
            PlainDecoder(target, sampling).generate(PROMPT, 16, seed=seed).ids == ids[len(PROMPT) :]
        )


def exact(sampling: Sampling, depth: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of the prompt that is likely enough, by the target's own forwards."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        for path, p in found.items():
            with torch.no_grad():
                logits_V = MARKOV.model(torch.tensor([[*PROMPT, *path]]), use_cache=False).logits[
                    0, -1
                ]
            law_V = sampling.probs(logits_V)
            longer |= {
                (*path, token): p * float(law_V[token])
                for token in range(VOCAB)
                if law_V[token] > 0
            }
        found = longer
    return found


@pytest.mark.parametrize(
    ("rule", "growth"),
    [
        ("without_replacement", BINARY),
    ],
    ids=str,
)
def test_what_is_drawn_has_the_targets_law(rule: str, growth: DraftShape) -> None:
    """A G-test of the first three tokens; rare triples are counted together."""
    sampling = Sampling(temperature=0.9, top_k=3, rule=rule, draft_temperature=1.3)  # type: ignore[arg-type]
    decoder = SpeculativeDecoder(MARKOV, DRAFTER, growth, sampling, batch=100)
    runs, accepted = 300, 0
    counts: Counter[tuple[int, ...]] = Counter()
    for _, made in decoder.generate_all([Request(PROMPT, 3, seed) for seed in range(runs)]):
        counts[tuple(made.ids)] += 1
        accepted += sum(made.accepted)
    law = exact(sampling, 3)
    assert set(counts) <= set(law) and math.isclose(sum(law.values()), 1, abs_tol=1e-9)
    common = [path for path, p in law.items() if p * runs >= 5]
    cells = [(counts[path], law[path] * runs) for path in common]
    rest = runs - sum(seen for seen, _ in cells), runs - sum(wanted for _, wanted in cells)
    chi = sum((seen - wanted) ** 2 / wanted for seen, wanted in [*cells, rest] if wanted > 1)
    degrees = len(common)
    p_value = float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(chi / 2)))
    assert p_value > 1e-4, (p_value, chi, degrees)
    assert accepted > 0.2 * runs and degrees > 5


def test_a_text_draws_by_its_seed_and_its_place() -> None:
    seed_B, place_B = torch.arange(64) // 8, torch.arange(64) % 8
    drawn_B = Sampling(temperature=5.0).draw(torch.ones(64, VOCAB), seed_B, place_B)
    assert len(set(drawn_B[:8].tolist())) > 3 < len(set(drawn_B[::8].tolist()))


def test_a_seed_is_a_text_of_its_own() -> None:
    decoder = SpeculativeDecoder(
        MARKOV, DRAFTER, Chain(3), Sampling(temperature=1.0, rule="without_replacement")
    )
    texts = [tuple(decoder.generate(PROMPT, 20, seed=seed).ids) for seed in (5, 6, 5)]
    assert texts[0] == texts[2] != texts[1]


def test_the_rule_follows_the_temperature() -> None:
    assert isinstance(Sampling().acceptance, Greedy) and isinstance(
        Sampling(temperature=1.0).acceptance, OneHot
    )
    assert isinstance(Sampling(rule="without_replacement").acceptance, WithoutReplacement)
    assert isinstance(Sampling(rule="one_hot").acceptance, OneHot)


def test_what_would_not_be_lossless_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_temperature must be above 0"):
        Sampling(draft_temperature=0.0)
    drawn = Sampling(temperature=1.0, rule="without_replacement")
    with pytest.raises(ValueError, match="keeps the drafts it likes best"):
        SpeculativeDecoder(MARKOV, DRAFTER, DynamicTree(), drawn)
    SpeculativeDecoder(MARKOV, DRAFTER, BINARY, drawn)


def test_at_temperature_one_tokens_are_drawn() -> None:
    place_B = torch.arange(200)
    logits_BV = torch.zeros(200, 4)
    drawn_B = Sampling(temperature=1.0).draw(logits_BV, torch.zeros_like(place_B), place_B)
    counts = drawn_B.bincount(minlength=4)
    assert drawn_B.shape == (200,) and counts.min() > 25
