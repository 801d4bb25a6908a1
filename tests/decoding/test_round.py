"""One round: what a tree that is written by hand earns, and what it leaves for the next.

Legend: B sequences, N tree nodes with the root, P path nodes at most.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.decoding import (
    Chain,
    DraftTree,
    DynamicTree,
    PlainDecoder,
    Sampling,
    SpeculativeDecoder,
)  # fmt: skip
from specdec.decoding.accept import nodes_in_order
from specdec.decoding.round import PlainRound, SpeculativeRound
from specdec.drafter import Drafter
from tests.decoding.trees import parent_lists, path_to
from tests.tiny import presets, tiny_drafter, tiny_target

TARGET = tiny_target()
GREEDY = Sampling()
TREE = DynamicTree(depth=3, top_k=3, nodes=7)
PROMPTS = [[3, 4, 5], [9], [7, 50, 2, 31, 19]]


def answer(prompt: list[int], count: int) -> list[int]:
    return PlainDecoder(TARGET).generate(prompt, count).ids


ANSWERS = [answer(prompt, 12) for prompt in PROMPTS]


def new_round(batch: int = 1, drafter: Drafter | None = None) -> SpeculativeRound:
    """With room for forty tokens, and for a tree of seven nodes whose paths have at most three."""
    return SpeculativeRound(
        TARGET, drafter or tiny_drafter(presets()["eagle3"]), TREE, GREEDY, 40, batch
    )


def begun(round_: PlainRound, only: tuple[int, ...] = (0, 1, 2)) -> None:
    for b in only:
        assert round_.prefill(b, PROMPTS[b], 0).tolist() == ANSWERS[b][:1]


def state(round_: PlainRound) -> list[Tensor]:
    """What is known of each sequence, its states apart."""
    return [
        round_.live_B,
        round_.length_B,
        round_.root_B,
        round_.fresh_BP,
        round_.count_B,
        round_.seed_B,
    ]


def tree_of(texts: list[list[int]], right: list[int]) -> DraftTree:
    """Nodes 0, 3, 4 and 6 are a text of four tokens, as far as so many drafts may be right; all else is wrong."""
    tokens = []
    for (root, *true), count in zip(texts, right, strict=True):
        wrong = [(token + 1) % 61 for token in true]
        drafts = true[:count] + wrong[count:]
        tokens.append([root, wrong[0], (wrong[0] + 1) % 61, *drafts[:2], wrong[1], drafts[2]])
    return DraftTree(torch.tensor(tokens), torch.tensor([[0, 0, 0, 0, 3, 3, 4]] * len(tokens)))


def test_each_sequence_commits_what_the_target_says_and_hands_its_states_on() -> None:
    """Paths that leave the first branch, of three lengths; the next pass shows that the keys have moved."""
    round_, right = new_round(3), [0, 2, 3]
    begun(round_)
    report = round_.verify(tree_of([own[:4] for own in ANSWERS], right))
    assert report.shape == (3, 1 + 4 + 1) and report.dtype == torch.int64
    for b, ((count, *fresh, depth), drafts) in enumerate(zip(report.tolist(), right, strict=True)):
        assert count == drafts + 1 and fresh[:count] == ANSWERS[b][1 : count + 1] and depth == 3
        assert set(fresh[count:]) <= {fresh[count - 1]}  # padding
        assert (
            int(round_.length_B[b]) == len(PROMPTS[b]) + count and int(round_.count_B[b]) == count
        )
        assert int(round_.root_B[b]) == ANSWERS[b][count]
        ids = [*PROMPTS[b], *ANSWERS[b][:count]]
        whole = SpeculativeRound(TARGET, round_.proposer.drafter, Chain(1), GREEDY, 40)
        assert whole.prefill(0, ids, 0).tolist() == [ANSWERS[b][count]]
        torch.testing.assert_close(
            round_.aux_BPLH[b, count - 1], whole.aux_BPLH[0, 0], rtol=0, atol=1e-10
        )
    again = round_.verify(
        DraftTree(round_.root_B[:, None].clone(), torch.zeros(3, 1, dtype=torch.int64))
    ).tolist()
    assert [[*row[:2], row[-1]] for row in again] == [
        [1, ANSWERS[b][drafts + 2], 0] for b, drafts in enumerate(right)
    ]


def test_one_that_is_not_live_takes_part_in_nothing() -> None:
    """Nothing is reported of it, it does not grow, and the others are as they are without it."""
    round_, full = new_round(3), new_round(3)
    begun(round_, (0, 2))
    begun(full)
    for _ in range(3):
        tree = round_.draft()
        report, wanted = round_.verify(tree), full.verify(full.draft())
        assert torch.equal(report[[0, 2]], wanted[[0, 2]]) and int(report[1, 0]) == 0 < int(
            wanted[1, 0]
        )
        assert (bool(round_.live_B[1]), int(round_.length_B[1]), int(round_.count_B[1])) == (
            False,
            0,
            0,
        )
        assert bool(round_.aux_BPLH.isfinite().all())


def test_one_begins_while_others_are_under_way() -> None:
    """In a slot that another has left full: it is as alone, and nobody else notices."""
    round_, undisturbed = new_round(3), new_round(3)
    begun(round_)
    begun(undisturbed)
    for each in (round_, undisturbed):
        for _ in range(4):
            each.verify(each.draft())
    round_.end(1)
    before = [x[[0, 2]].clone() for x in state(round_)]
    assert round_.prefill(1, PROMPTS[0], 0).tolist() == ANSWERS[0][:1]
    after = [x[[0, 2]] for x in state(round_)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    alone, got, wanted = new_round(), [], []
    begun(alone, (0,))
    for _ in range(4):
        tree, own = round_.draft(), alone.draft()
        assert torch.equal(tree.tokens_BN[1], own.tokens_BN[0]) and torch.equal(
            tree.parents_BN[1], own.parents_BN[0]
        )
        report, others = round_.verify(tree), undisturbed.verify(undisturbed.draft())
        assert torch.equal(report[[0, 2]], others[[0, 2]])
        got += report[1, 1 : 1 + int(report[1, 0])].tolist()
        wanted += alone.verify(own)[0, 1:2].tolist()
    assert got[: len(wanted)] == wanted == ANSWERS[0][1:5]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.lists(parent_lists(9), min_size=1, max_size=4), st.integers(0, 3))
def test_paths_in_order(data: st.DataObject, trees: list[list[int]], spare: int) -> None:
    """Their nodes from the root on; behind the end each place's own number, as far as there are nodes."""
    N = max(map(len, trees))
    paths = [path_to(data.draw(st.integers(0, len(parents) - 1)), parents) for parents in trees]
    most = max(map(len, paths)) + spare
    path_BN = torch.tensor([[node in path for node in range(N)] for path in paths])
    found = nodes_in_order(path_BN, most)
    assert found.dtype == torch.int64
    assert found.tolist() == [
        path + [min(j, N - 1) for j in range(len(path), most)] for path in paths
    ]


def test_a_tree_may_be_allowed_more_levels_than_nodes() -> None:
    """Up to the last slot of the cache."""
    growth = DynamicTree(depth=6, top_k=1, nodes=3)
    decoder, plain = (
        SpeculativeDecoder(TARGET, tiny_drafter(presets()["eagle3"]), growth),
        PlainDecoder(TARGET),
    )
    assert SpeculativeRound(TARGET, decoder.drafter, growth, GREEDY, 40).longest_path == 4
    for most in range(1, 7):
        assert decoder.generate([3, 4], most).ids == plain.generate([3, 4], most).ids
