"""Static trees: EAGLE-1's own and any other, against following the ranks path by path."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.decoding import (
    DraftShape,
    DraftTree,
    PlainDecoder,
    SpeculativeDecoder,
    StaticTree,
)
from specdec.decoding.accept import ancestors
from specdec.decoding.shapes import ChildSampling
from specdec.drafter import Drafter, DrafterSpec, DraftVocab
from specdec.drafting.mode import Expand, Frontier
from tests.decoding.drafting import Drafting
from tests.decoding.oracle import draft_vocab, grow, paths_of, random_law
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import HIDDEN, VOCAB, presets, tiny_drafter, tiny_target, vocabulary

Ranks = tuple[int, ...]
LENGTH = 20
OTHER: tuple[Ranks, ...] = (
    (0,),
    (1,),
    (2,),
    (1, 0),
    (1, 1),
    (2, 0),
    (1, 1, 0),
    (1, 1, 0, 0),
    (2, 0, 0),
)
TREES = {"eagle1": StaticTree(), "other": StaticTree(OTHER), "one": StaticTree(((0,),))}
SPECS = presets() | {
    "two_layers": DrafterSpec(draft_vocab_size=40, num_layers=2),
    "window": DrafterSpec(draft_vocab_size=40, attention_window=16),
    "sinks": DrafterSpec(draft_vocab_size=40, attention_window=16, attention_sinks=2),
}


@st.composite
def trees(draw: st.DrawFn) -> list[Ranks]:
    """Paths of a tree in any order; no node has more than seven children."""
    paths: list[Ranks] = [()]
    for _ in range(draw(st.integers(1, 16))):
        parent = draw(st.sampled_from(paths))
        paths.append((*parent, min(6, sum(path[:-1] == parent for path in paths if path))))
    nodes = sorted(set(paths) - {()})
    random.Random(draw(st.integers(0, 999))).shuffle(nodes)
    return nodes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trees(), st.integers(0, 10**6))
def test_every_node_is_the_token_of_its_rank_at_its_parent(nodes: list[Ranks], seed: int) -> None:
    """Also: what it announces is what it takes, and the oracle checks what the drafter is told to see."""
    law, vocab, growth = random_law(seed, 7), draft_vocab(7), StaticTree(tuple(nodes))
    tree, oracle = grow(growth, law, vocab)
    wanted = []
    for node in sorted(nodes, key=lambda path: (len(path), path)):
        path: Ranks = ()
        for rank in node:
            row = law(path).tolist()
            path = (
                *path,
                int(vocab.target_ids_D[sorted(range(7), key=lambda token: -row[token])[rank]]),
            )
        wanted.append(path)
    assert paths_of(tree) == wanted
    assert tree.tokens_BN.shape == (1, growth.nodes_drafted + 1) == (1, len(nodes) + 1)
    inner = {node[:-1] for node in nodes} - {()}
    assert sum(map(len, oracle.levels)) == growth.slots == len(inner)
    # the deepest are not expanded
    assert len(oracle.levels) == growth.depth - 1 == max(map(len, nodes)) - 1
    assert len({path[: len(path) - 1] for path in wanted}) == len(inner | {()})


def propose(drafter: Drafter, growth: DraftShape, room: int = LENGTH) -> tuple[Drafting, DraftTree]:
    """A proposal after LENGTH random committed rows, the last of them with as much padding as rounds have."""
    generator = torch.Generator().manual_seed(1)
    count = len(drafter.config.aux_layers)
    aux = torch.randn(1, LENGTH, count, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=generator)
    proposer = Drafting(drafter, growth, room)
    proposer.commit(ids[:, 1:-1], aux[:, :-1])
    again = 1 + growth.depth
    start = proposer.commit(
        ids[:, -1:].expand(-1, again), aux[:, -1:].repeat(1, again, 1, 1), torch.tensor([1])
    )
    return proposer, proposer.draft(ids[:, -1], start)


@dataclasses.dataclass(frozen=True)
class Alone(DraftShape):
    """One path of ranks, one node after another, whatever else a tree holds."""

    ranks: Ranks = ()

    @property
    def slots(self) -> int:
        return len(self.ranks)

    def grow(
        self,
        root_B: Tensor,
        start: Frontier,
        expand: Expand,
        vocab: DraftVocab,
        children: ChildSampling,
    ) -> DraftTree:
        tokens, frontier = [root_B], start
        for place, rank in enumerate(self.ranks):
            order_BD = frontier.logits_BKD[:, 0].argsort(descending=True)
            tokens.append(vocab.to_target(order_BD[:, rank]))
            if place + 1 < len(self.ranks):
                seen_1Q = torch.ones(1, place + 1, dtype=torch.bool)
                frontier = expand(
                    tokens[-1][:, None], frontier.h_BKH, seen_1Q, torch.arange(place + 1)
                )
        return DraftTree(
            torch.stack(tokens, 1), torch.arange(-1, len(self.ranks)).clamp(min=0)[None]
        )


@pytest.mark.parametrize("growth", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", SPECS)
def test_a_drafters_tree_is_what_it_says_along_every_path_alone(
    name: str, growth: StaticTree
) -> None:
    drafter = tiny_drafter(SPECS[name])
    _, tree = propose(drafter, growth)
    seen_NN = ancestors(tree.parents_BN)[0]
    for node, path in enumerate(growth.paths, start=1):
        _, alone = propose(drafter, Alone(ranks=path))
        assert tree.tokens_BN[0, seen_NN[node]].tolist() == alone.tokens_BN[0].tolist(), path
    assert len(set(tree.tokens_BN[0].tolist())) > 1


@pytest.mark.parametrize("family", ["mistral"])
def test_decoding_is_lossless(family: str) -> None:
    """A target that looks at its context, and a drafter that is right often and wrong often."""
    target = markov_target(family, {"llama": 0.45, "mistral": 0.42, "gemma2": 1.2}[family])
    spec = dataclasses.replace(presets()["eagle1"], draft_vocab_size="all")
    drafter = disturb(perfect_drafter(target, spec), 0.5)
    wanted = PlainDecoder(target).generate([3, 4, 5], 40).ids
    accepted: dict[str, tuple[int, ...]] = {}
    for name, growth in TREES.items():
        made = SpeculativeDecoder(target, drafter, growth).generate([3, 4, 5], 40)
        assert made.ids == wanted and max(made.accepted) <= growth.depth
        accepted[name] = made.accepted
    assert len(set(accepted["eagle1"])) > 2 and len(set(accepted["other"])) > 1, (
        "it both refused and accepted"
    )


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), r"a list of paths of child ranks from 0 up, as \[\[0\], \[1\], \[0, 0\]\]"),
        (((0,), ()), "a list of paths of child ranks from 0 up"),
        (((0,), (0, -1)), "a list of paths of child ranks from 0 up"),
        (((0,), (0, 0, 0)), r"with the path \[0, 0, 0\] has \[0, 0\] too"),
        (((1, 0),), r"with the path \[1, 0\] has \[1\] too"),
        (((0,), (2,)), r"with the path \[2\] has \[1\] too"),
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(paths: tuple[Ranks, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^shape: .*{message}") as caught:
        StaticTree(paths)
    assert "\n" not in str(caught.value)


def test_ranks_fit_the_draft_vocabulary() -> None:
    growth = StaticTree(((0,), (0, 0), (0, 1), (0, 2)))
    growth.check(vocabulary(3))
    with pytest.raises(ValueError, match="the child rank 2 is beyond the draft vocabulary of 2"):
        growth.check(vocabulary(2))
    drafter = tiny_drafter(dataclasses.replace(presets()["eagle3_1"], draft_vocab_size=3))
    assert propose(drafter, growth)[1].tokens_BN.shape == (1, 5)
    with pytest.raises(ValueError, match="the child rank 3 is beyond the draft vocabulary of 3"):
        SpeculativeDecoder(tiny_target(), drafter, StaticTree())
