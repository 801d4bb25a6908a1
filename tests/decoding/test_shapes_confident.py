"""A chain that ends in doubt is the beginning of the whole chain, and as lossless."""

import math

import pytest
import torch

from specdec.decoding import Chain, ConfidentChain, PlainDecoder, Sampling, SpeculativeDecoder
from specdec.decoding.accept import Greedy, Rule, WithoutReplacement
from specdec.decoding.sampling import ChildSampling
from specdec.drafter import DraftVocab
from tests.decoding.oracle import ROOT, Law, Path, draft_vocab, grow, grow_batch, paths_of, random_law
from tests.perfect import markov_target, perfect_drafter
from tests.tiny import presets, tiny_drafter, tiny_target


def length_of(law: Law, whole: Path, vocab: DraftVocab, threshold: float) -> int:
    """How many drafts of the whole chain there are up to the first doubt, with the one that brings it."""
    ids, value = vocab.target_ids_D.tolist(), 0.0
    for length, token in enumerate(whole, start=1):
        value += float(law(whole[: length - 1])[ids.index(token)])
        if value < (math.log(threshold) if threshold else -math.inf):
            return length
    return len(whole)


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_chain_up_to_its_first_doubt(seed: int, threshold: float) -> None:
    law, vocab = random_law(seed, 5), draft_vocab(5)
    whole, _ = grow(Chain(6), law, vocab)
    tree, oracle = grow(ConfidentChain(6, threshold), law, vocab)
    path = paths_of(tree)[-1]
    assert len(path) == tree.tokens_BN.shape[1] - 1
    assert [ROOT, *path] == whole.tokens_BN[0, : len(path) + 1].tolist()
    wanted = length_of(law, paths_of(whole)[-1], vocab, threshold)
    assert len(path) == wanted and len(oracle.levels) == wanted - 1


@pytest.mark.parametrize("rule", [Greedy(), WithoutReplacement()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("first", range(0, 24, 6))
def test_chains_of_a_batch_end_where_each_does(first: int, rule: Rule) -> None:
    """Drafting goes on until the last has ended; what the others have drafted by then is padding."""
    growth, vocab, batch = ConfidentChain(6, 0.1), draft_vocab(5), 6
    laws = [random_law(first + b, 5) for b in range(batch)]
    noise = torch.arange(batch) + 50, torch.arange(batch) * 2
    tree, oracle = grow_batch(growth, laws, vocab, ChildSampling(rule, 1.0, *noise))
    N, lengths = tree.tokens_BN.shape[1], []
    for b, law in enumerate(laws):
        own = ChildSampling(rule, 1.0, *(x[b : b + 1] for x in noise))
        alone, _ = grow_batch(growth, [law], vocab, own, ROOT + b)
        nodes = alone.tokens_BN.shape[1]
        assert len(paths_of(tree, b, padding=N - nodes)) == nodes - 1
        assert torch.equal(tree.tokens_BN[b, :nodes], alone.tokens_BN[0])
        assert torch.equal(tree.parents_BN[b, :nodes], alone.parents_BN[0])
        if rule.sampled:
            assert tree.q_BND is not None and alone.q_BND is not None and tree.q_BND.shape == (batch, N, 5)
            torch.testing.assert_close(tree.q_BND[b, : nodes - 1], alone.q_BND[0, : nodes - 1], rtol=0, atol=1e-15)
        lengths.append(nodes - 1)
    assert max(lengths) == N - 1 and len(set(lengths)) > 1
    assert [len(levels) for levels in oracle.all_levels] == [N - 2] * batch


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
def test_decoding_stays_lossless(sampling: Sampling) -> None:
    markov = markov_target()
    pairs = [
        (markov, perfect_drafter(markov, presets()["eagle3_1"])),
        (tiny_target(), tiny_drafter(presets()["eagle3"])),
    ]
    for target, drafter in pairs:
        decoder = SpeculativeDecoder(target, drafter, ConfidentChain(5, 0.3), sampling)
        assert not decoder.shape.fixed
        made = decoder.generate([3, 4, 5], 30, seed=2)
        assert made.ids == PlainDecoder(target, sampling).generate([3, 4, 5], 30, seed=2).ids
        assert max(made.accepted) <= 5
