"""A chain that ends in doubt is the beginning of the whole chain, and as lossless."""

import math

import pytest
import torch

from specdec.decoding import Chain, ConfidentChain, PlainDecoder, Sampling, SpeculativeDecoder
from specdec.decoding.children import Children
from specdec.decoding.rules import WithoutReplacement
from tests.decoding.oracle import ROOT, draft_vocab, grow, paths_of, random_law
from tests.perfect import markov_target, perfect_drafter
from tests.tiny import presets, tiny_drafter, tiny_target


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_chain_up_to_its_first_doubt(seed: int, threshold: float) -> None:
    law, vocab = random_law(seed, 5), draft_vocab(5)
    whole, _ = grow(Chain(6), law, vocab)
    tree, oracle = grow(ConfidentChain(6, threshold), law, vocab)
    (path,) = [path for path in paths_of(tree) if len(path) == len(tree.tokens_N) - 1]
    assert tree.tokens_N.tolist() == whole.tokens_N[: len(tree.tokens_N)].tolist()
    value, wanted = 0.0, 0
    ids = vocab.target_ids_D.tolist()
    for token in whole.tokens_N[1:].tolist():
        value += float(law(path[:wanted])[ids.index(token)])
        wanted += 1
        if value < (math.log(threshold) if threshold else -math.inf):
            break
    assert len(path) == wanted and len(oracle.levels) == wanted - 1 and tree.tokens_N[0] == ROOT


def test_thresholds_matter() -> None:
    vocab = draft_vocab(5)

    def lengths(threshold: float) -> set[int]:
        trees = [grow(ConfidentChain(6, threshold), random_law(seed, 5), vocab)[0] for seed in range(9)]
        return {len(tree.tokens_N) - 1 for tree in trees}

    assert lengths(0.0) == {6} and lengths(0.99) == {1} and len(lengths(0.1)) > 2


def test_drawn_chains_tell_the_law_of_every_node_but_the_last() -> None:
    law, vocab = random_law(3, 5), draft_vocab(5)
    start = grow(Chain(1), law, vocab)[1].frontier([()])
    tree = ConfidentChain(1, 0.5).grow(
        torch.tensor([ROOT]), start, lambda *_: start, vocab, Children(WithoutReplacement(), seed=4)
    )
    assert tree.q_ND is not None and tree.q_ND.shape == (2, 5)
    torch.testing.assert_close(tree.q_ND[0], law(()).exp())
    assert tree.q_ND[1].eq(0).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
def test_decoding_stays_lossless(sampling: Sampling) -> None:
    markov = markov_target()
    pairs = [
        (markov, perfect_drafter(markov, presets()["eagle3_1"])),
        (tiny_target(), tiny_drafter(presets()["eagle3"])),
    ]
    for target, drafter in pairs:
        decoder = SpeculativeDecoder(target, drafter, ConfidentChain(5, 0.3), sampling)
        made = decoder.generate([3, 4, 5], 30, seed=2)
        assert made.ids == PlainDecoder(target, sampling).generate([3, 4, 5], 30, seed=2).ids
        assert max(made.accepted) <= 5
