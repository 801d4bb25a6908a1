"""The drafter's rows: committed ones come from true features, guessed ones leave no trace."""

import pytest
import torch
from torch import Tensor

from specdec.decoding import Chain, DraftShape, DraftTree, DynamicTree
from specdec.drafter import Drafter, DrafterSpec
from specdec.drafting.mode import Frontier
from tests.decoding.drafting import Drafting
from tests.decoding.trees import path_to
from tests.tiny import HIDDEN, VOCAB, presets, tiny_drafter

LENGTH = 20
GROWTHS = [Chain(4), DynamicTree(depth=3, top_k=3, nodes=8)]
SPECS = presets() | {"two_layers": DrafterSpec(draft_vocab_size=40, num_layers=2)}


def text(
    drafter: Drafter, length: int = LENGTH, seed: int = 0, batch: int = 1
) -> tuple[Tensor, Tensor]:
    """Tokens (batch, length + 1) and the true features (batch, length, N, H) of all but the last."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, len(drafter.config.aux_layers), HIDDEN)
    aux = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, VOCAB, (batch, length + 1), generator=generator), aux


def extend(proposer: Drafting, ids: Tensor, aux: Tensor, until: int) -> Frontier:
    """Commit the rows that are missing up to ``until``."""
    length = int(proposer.length_B)
    return proposer.commit(ids[:, length + 1 : until + 1], aux[:, length:until])


def fresh(
    drafter: Drafter, growth: DraftShape, ids: Tensor, aux: Tensor, until: int
) -> tuple[Drafting, DraftTree]:
    proposer = Drafting(drafter, growth, LENGTH)
    start = extend(proposer, ids, aux, until)
    return proposer, proposer.draft(ids[:, until], start)


def assert_same(tree: DraftTree, wanted: DraftTree) -> None:
    assert torch.equal(tree.tokens_BN, wanted.tokens_BN) and torch.equal(
        tree.parents_BN, wanted.parents_BN
    )


@pytest.mark.parametrize("growth", GROWTHS, ids=lambda g: g.name)
@pytest.mark.parametrize("name", SPECS)
def test_rounds_of_drafting_leave_no_trace(name: str, growth: DraftShape) -> None:
    """Commits of every size after drafts: rows, law and proposal are those of a cache that never drafted."""
    drafter = tiny_drafter(SPECS[name])
    ids, aux = text(drafter)
    proposer = Drafting(drafter, growth, LENGTH)
    for until in (1, 2, 5, 6, 11, 15, 20):
        start = extend(proposer, ids, aux, until)
        tree = proposer.draft(ids[:, until], start)
        clean, wanted = fresh(drafter, growth, ids, aux, until)
        assert proposer.rows().shape[-2] == until
        assert (proposer.rows() - clean.rows()).abs().max() < 1e-12
        assert_same(tree, wanted)
        assert tree.tokens_BN[0, 0] == ids[0, until]


def spoil(proposer: Drafting, first: int) -> None:
    """Rubbish in every slot from ``first`` on."""
    for keys, values in zip(
        proposer.memory.cache.keys_BgSd, proposer.memory.cache.values_BgSd, strict=True
    ):
        keys[:, :, first:], values[:, :, first:] = 1e3, -1e3


@pytest.mark.parametrize("growth", GROWTHS, ids=lambda g: g.name)
def test_garbage_beyond_the_committed_rows_is_never_seen(growth: DraftShape) -> None:
    drafter = tiny_drafter(presets()["eagle3_1"])
    ids, aux = text(drafter)
    proposer = Drafting(drafter, growth, LENGTH)
    for until in (7, 9):
        spoil(proposer, int(proposer.length_B))
        start = extend(proposer, ids, aux, until)
        spoil(proposer, until)
        tree = proposer.draft(ids[:, until], start)
        clean, wanted = fresh(drafter, growth, ids, aux, until)
        assert (proposer.rows() - clean.rows()).abs().max() < 1e-12
        assert_same(tree, wanted)


LENGTHS = (3, 0, 11, 6)  # the second sequence is nobody's


@pytest.mark.parametrize("growth", GROWTHS, ids=lambda g: g.name)
@pytest.mark.parametrize("name", SPECS)
def test_each_sequence_of_a_ragged_batch_is_as_alone(name: str, growth: DraftShape) -> None:
    """Three rounds of commits of different sizes; what is padded behind a count leaves no trace."""
    drafter = tiny_drafter(SPECS[name])
    B, P = len(LENGTHS), growth.depth + 1
    ids, aux = text(drafter, batch=B)
    proposer, rubbish = Drafting(drafter, growth, LENGTH, B), torch.Generator().manual_seed(3)
    for b, length in enumerate(LENGTHS):
        if length > 1:
            proposer.prefill(b, ids[b : b + 1, 1:length], aux[b : b + 1, : length - 1])
    proposer.length_B = torch.tensor(LENGTHS).sub(1).clamp(min=0)
    for counts in ((1, 0, 1, 1), (2, 0, P, 1), (1, 0, 2, P)):
        count_B = torch.tensor(counts)
        ids_BP = torch.randint(0, VOCAB, (B, P), generator=rubbish)
        aux_BPNH = torch.randn(B, P, *aux.shape[2:], generator=rubbish, dtype=torch.float64) * 100
        for b, (first, count) in enumerate(zip(proposer.length_B.tolist(), counts, strict=True)):
            ids_BP[b, :count] = ids[b, first + 1 : first + count + 1]
            aux_BPNH[b, :count] = aux[b, first : first + count]
        start = proposer.commit(ids_BP, aux_BPNH, count_B)
        assert start.h_BKH.shape[:2] == start.logits_BKD.shape[:2] == (B, 1)
        tree = proposer.draft(ids.gather(1, proposer.length_B[:, None])[:, 0], start)
        assert tree.tokens_BN.shape == (B, growth.nodes_drafted + 1)
        for b, until in enumerate(proposer.length_B.tolist()):
            if b == 1:
                assert until == 0
                continue
            alone = Drafting(drafter, growth, LENGTH)
            wanted = extend(alone, ids[b : b + 1], aux[b : b + 1], until)
            torch.testing.assert_close(start.h_BKH[b], wanted.h_BKH[0], rtol=0, atol=1e-11)
            torch.testing.assert_close(
                start.logits_BKD[b], wanted.logits_BKD[0], rtol=0, atol=1e-11
            )
            torch.testing.assert_close(proposer.rows(b), alone.rows(), rtol=0, atol=1e-11)
            own = alone.draft(ids[b : b + 1, until], wanted)
            assert torch.equal(tree.tokens_BN[b], own.tokens_BN[0])
            assert torch.equal(tree.parents_BN[b], own.parents_BN[0])


@pytest.mark.parametrize("name", list(presets()))
def test_a_committed_row_is_the_pair_of_its_feature_and_the_next_token(name: str) -> None:
    drafter = tiny_drafter(SPECS[name])
    ids, aux = text(drafter, 6)
    for part in ("ids", "aux"):
        for position in range(6):
            other_ids, other_aux = ids.clone(), aux.clone()
            if part == "ids":
                other_ids[0, position + 1] = (ids[0, position + 1] + 1) % VOCAB
            else:
                other_aux[:, position] += 1
            a, b = Drafting(drafter, Chain(1), 6), Drafting(drafter, Chain(1), 6)
            extend(a, ids, aux, 6)
            extend(b, other_ids, other_aux, 6)
            changed = (a.rows() != b.rows()).flatten(0, 2).any(0).any(-1)
            assert changed.nonzero().flatten().tolist() == [position]


@pytest.mark.parametrize("name", SPECS)
def test_a_dynamic_tree_is_grown_from_the_law_of_every_path(name: str) -> None:
    """Each kept node is among the best children of its parent, by a law recomputed along that path alone."""
    drafter = tiny_drafter(SPECS[name])
    ids, aux = text(drafter)
    growth = DynamicTree(depth=4, top_k=3, nodes=24)
    _, tree = fresh(drafter, growth, ids, aux, 9)
    parents, tokens = tree.parents_BN[0].tolist(), tree.tokens_BN[0]

    def law(path: list[int]) -> Tensor:
        """The law after the nodes of ``path``, on a cache of its own, one node after another."""
        proposer = Drafting(drafter, Chain(len(path) + 1), LENGTH)
        frontier = extend(proposer, ids, aux, 9)
        for depth in range(len(path)):
            seen = torch.ones(1, depth + 1, dtype=torch.bool)
            node = tokens[path[depth : depth + 1]][None]
            frontier = proposer.memory.append(
                proposer.length_B, node, frontier.h_BKH, seen, torch.arange(depth + 1)
            )
        return frontier.logits_BKD.log_softmax(-1)[0, 0]

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
    assert torch.allclose(
        torch.tensor(kept_first, dtype=torch.float64), first_level[: len(kept_first)]
    )
    assert len(set(parents)) > 4


@pytest.mark.parametrize(
    "growth", [*GROWTHS, Chain(1), DynamicTree(depth=1, top_k=2, nodes=2)], ids=str
)
def test_the_capacity_is_used_to_the_last_slot(growth: DraftShape) -> None:
    drafter = tiny_drafter(presets()["eagle3"])
    ids, aux = text(drafter)
    proposer, again = Drafting(drafter, growth, LENGTH), growth.depth + 1
    extend(proposer, ids, aux, LENGTH - 1)
    # as a round has it: one row that counts, and padding up to the deepest path's length
    start = proposer.commit(
        ids[:, -1:].expand(-1, again), aux[:, -1:].expand(-1, again, -1, -1), torch.tensor([1])
    )
    padded = bool(proposer.memory.cache.keys_BgSd[0][..., -1, :].any())
    tree = proposer.draft(ids[:, LENGTH], start)
    assert proposer.memory.capacity == LENGTH + max(growth.slots, growth.depth)
    roomy = Drafting(drafter, growth, LENGTH + 9)
    assert_same(tree, roomy.draft(ids[:, LENGTH], extend(roomy, ids, aux, LENGTH)))
    assert padded == (growth.depth >= growth.slots)
    assert bool(proposer.memory.cache.keys_BgSd[0][..., -1, :].any())
