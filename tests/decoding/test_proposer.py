"""The drafter's rows: committed ones come from true features, guessed ones leave no trace."""

import dataclasses

import pytest
import torch
from torch import Tensor

from specdec.decoding import Chain, DraftTree, DynamicTree, Growth
from specdec.decoding.growth import Frontier
from specdec.decoding.proposer import Proposer
from specdec.drafter import Drafter, DrafterSpec
from tests.decoding.trees import path_to
from tests.tiny import HIDDEN, VOCAB, presets, tiny_drafter

LENGTH = 20
GROWTHS = [Chain(4), DynamicTree(depth=3, top_k=3, nodes=8)]
SPECS = presets() | {"two_layers": DrafterSpec(draft_vocab_size=40, num_layers=2)}


def text(drafter: Drafter, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens (length + 1,) and the true features (1, length, N, H) of all but the last."""
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(1, length, len(drafter.config.aux_layers), HIDDEN, generator=generator, dtype=torch.float64)
    return torch.randint(0, VOCAB, (length + 1,), generator=generator), aux


def extend(proposer: Proposer, ids: Tensor, aux: Tensor, until: int) -> Frontier:
    """Commit the rows that are missing up to ``until``."""
    return proposer.extend(ids[proposer.length + 1 : until + 1], aux[:, proposer.length : until])


def fresh(drafter: Drafter, growth: Growth, ids: Tensor, aux: Tensor, until: int) -> tuple[Proposer, DraftTree]:
    proposer = Proposer(drafter, growth, LENGTH)
    start = extend(proposer, ids, aux, until)
    return proposer, proposer.propose(ids[until : until + 1], start)


def rows(proposer: Proposer) -> Tensor:
    return torch.cat([proposer.cache.keys_LBgSd, proposer.cache.values_LBgSd])[..., : proposer.length, :]


def assert_same(tree: DraftTree, wanted: DraftTree) -> None:
    assert torch.equal(tree.tokens_N, wanted.tokens_N) and torch.equal(tree.parents_N, wanted.parents_N)


@pytest.mark.parametrize("growth", GROWTHS, ids=lambda g: g.name)
@pytest.mark.parametrize("name", SPECS)
def test_rounds_of_drafting_leave_no_trace(name: str, growth: Growth) -> None:
    """Commits of every size after drafts: rows, law and proposal are those of a cache that never drafted."""
    drafter = tiny_drafter(SPECS[name])
    ids, aux = text(drafter)
    proposer = Proposer(drafter, growth, LENGTH)
    for until in (1, 2, 5, 6, 11, 15, 20):
        start = extend(proposer, ids, aux, until)
        tree = proposer.propose(ids[until : until + 1], start)
        clean, wanted = fresh(drafter, growth, ids, aux, until)
        assert proposer.length == clean.length == until
        assert (rows(proposer) - rows(clean)).abs().max() < 1e-12
        assert_same(tree, wanted)
        assert tree.tokens_N[0] == ids[until]


@pytest.mark.parametrize("growth", GROWTHS, ids=lambda g: g.name)
def test_garbage_beyond_the_committed_rows_is_never_seen(growth: Growth) -> None:
    drafter = tiny_drafter(presets()["eagle3_1"])
    ids, aux = text(drafter)
    proposer = Proposer(drafter, growth, LENGTH)
    for until in (7, 9):
        proposer.cache.keys_LBgSd[..., proposer.length :, :] = 1e3
        proposer.cache.values_LBgSd[..., proposer.length :, :] = -1e3
        start = extend(proposer, ids, aux, until)
        proposer.cache.keys_LBgSd[..., until:, :] = 1e3
        proposer.cache.values_LBgSd[..., until:, :] = -1e3
        tree = proposer.propose(ids[until : until + 1], start)
        clean, wanted = fresh(drafter, growth, ids, aux, until)
        assert (rows(proposer) - rows(clean)).abs().max() < 1e-12
        assert_same(tree, wanted)


def test_proposing_twice_gives_the_same_and_keeps_the_rows() -> None:
    drafter = tiny_drafter(presets()["eagle3"])
    ids, aux = text(drafter)
    proposer = Proposer(drafter, GROWTHS[1], LENGTH)
    start = extend(proposer, ids, aux, 8)
    before = rows(proposer).clone()
    assert_same(proposer.propose(ids[8:9], start), proposer.propose(ids[8:9], start))
    assert torch.equal(rows(proposer), before)


@pytest.mark.parametrize("name", list(presets()))
def test_a_committed_row_is_the_pair_of_its_feature_and_the_next_token(name: str) -> None:
    drafter = tiny_drafter(SPECS[name])
    ids, aux = text(drafter, 6)
    for part in ("ids", "aux"):
        for position in range(6):
            other_ids, other_aux = ids.clone(), aux.clone()
            if part == "ids":
                other_ids[position + 1] = (ids[position + 1] + 1) % VOCAB
            else:
                other_aux[:, position] += 1
            a, b = Proposer(drafter, Chain(1), 6), Proposer(drafter, Chain(1), 6)
            extend(a, ids, aux, 6)
            extend(b, other_ids, other_aux, 6)
            changed = (rows(a) != rows(b)).flatten(0, 2).any(0).any(-1)
            assert changed.nonzero().flatten().tolist() == [position]


@pytest.mark.parametrize("name", SPECS)
def test_a_dynamic_tree_is_grown_from_the_law_of_every_path(name: str) -> None:
    """Each kept node is among the best children of its parent, by a law recomputed along that path alone."""
    drafter = tiny_drafter(SPECS[name])
    ids, aux = text(drafter)
    growth = DynamicTree(depth=4, top_k=3, nodes=24)
    _, tree = fresh(drafter, growth, ids, aux, 9)
    parents, tokens = tree.parents_N.tolist(), tree.tokens_N

    def law(path: list[int]) -> Tensor:
        """The law after the nodes of ``path``, on a cache of its own, one node after another."""
        proposer = Proposer(drafter, Chain(len(path) + 1), LENGTH)
        frontier = extend(proposer, ids, aux, 9)
        for depth in range(len(path)):
            seen = torch.ones(1, depth + 1, dtype=torch.bool)
            node = tokens[path[depth : depth + 1]]
            frontier = proposer._expand(node, frontier.h_KH, seen, torch.arange(depth + 1))
        return frontier.log_probs_KD[0]

    laws = {parent: law(path_to(parent, parents)[1:]) for parent in set(parents)}
    for node in range(1, len(tokens)):
        best = drafter.vocab.to_target(laws[parents[node]].topk(growth.top_k).indices)
        assert tokens[node] in best
    values = [0.0]
    for node in range(1, len(tokens)):
        step = laws[parents[node]][drafter.vocab.to_draft(tokens[node])]
        values.append(values[parents[node]] + float(step))
    first_level = laws[0].topk(growth.top_k).values
    kept_first = [values[node] for node in range(1, len(tokens)) if parents[node] == 0]
    assert torch.allclose(torch.tensor(kept_first, dtype=torch.float64), first_level[: len(kept_first)])
    assert len(set(parents)) > 4


@pytest.mark.parametrize("growth", [*GROWTHS, Chain(1), DynamicTree(depth=1, top_k=2, nodes=2)], ids=str)
def test_the_capacity_is_used_to_the_last_slot(growth: Growth) -> None:
    drafter = tiny_drafter(presets()["eagle3"])
    ids, aux = text(drafter)
    proposer = Proposer(drafter, growth, LENGTH)
    start = extend(proposer, ids, aux, LENGTH)
    tree = proposer.propose(ids[LENGTH:], start)
    assert proposer.capacity == LENGTH + growth.slots
    roomy = Proposer(drafter, growth, LENGTH + 9)
    assert_same(tree, roomy.propose(ids[LENGTH:], extend(roomy, ids, aux, LENGTH)))
    if growth.slots:
        assert bool(proposer.cache.keys_LBgSd[..., -1, :].any())


def test_the_top_k_may_be_the_whole_draft_vocabulary() -> None:
    spec = dataclasses.replace(presets()["eagle3_1"], draft_vocab_size=3)
    drafter = tiny_drafter(spec)
    ids, aux = text(drafter)
    _, tree = fresh(drafter, DynamicTree(depth=2, top_k=3, nodes=12), ids, aux, 5)
    assert sorted(tree.tokens_N[1:4].tolist()) == drafter.vocab.target_ids_D.tolist()
    with pytest.raises(ValueError, match="top_k 4 is more than the draft vocabulary of 3"):
        Proposer(drafter, DynamicTree(depth=2, top_k=4, nodes=12), LENGTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_are_compared_in_float32_at_least(dtype: torch.dtype) -> None:
    drafter = tiny_drafter(presets()["eagle3_1"], dtype=dtype)
    ids, aux = text(drafter)
    proposer = Proposer(drafter, GROWTHS[1], LENGTH)
    start = extend(proposer, ids, aux.to(dtype), 4)
    assert proposer.cache.keys_LBgSd.dtype == start.h_KH.dtype == dtype
    assert start.log_probs_KD.dtype == torch.promote_types(dtype, torch.float32)
    assert float(start.log_probs_KD.exp().sum()) == pytest.approx(1, abs=1e-5)
    tree = proposer.propose(ids[4:5], start)
    assert len(tree.tokens_N) == 9
