"""Static trees: EAGLE-1's own and any other, against following the ranks path by path."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.decoding import Chain, DraftTree, Growth, PlainDecoder, SpeculativeDecoder, StaticTree, read_static_tree
from specdec.decoding.children import Children
from specdec.decoding.growth import Expand, Frontier
from specdec.decoding.rules import ancestors
from specdec.drafter import Drafter, DrafterSpec, DraftVocab
from tests.decoding.drafting import Drafting
from tests.decoding.oracle import ROOT, draft_vocab, grow, paths_of, random_law
from tests.perfect import FAMILIES, disturb, markov_target, perfect_drafter
from tests.tiny import HIDDEN, VOCAB, presets, tiny_drafter, tiny_target

Ranks = tuple[int, ...]
LENGTH = 20
GAPS: tuple[Ranks, ...] = ((1,), (4,), (4, 0), (4, 6), (1, 2), (4, 6, 3), (4, 6, 3, 0), (1, 2, 1))
TREES = {"eagle1": StaticTree(), "gaps": StaticTree(GAPS), "one": StaticTree(((2,),))}
SPECS = presets() | {
    "two_layers": DrafterSpec(draft_vocab_size=40, num_layers=2),
    "window": DrafterSpec(draft_vocab_size=40, attention_window=16),
}


@st.composite
def trees(draw: st.DrawFn) -> list[Ranks]:
    """Paths of a tree in any order, with gaps between the ranks of siblings."""
    paths: list[Ranks] = [()]
    for _ in range(draw(st.integers(1, 16))):
        paths.append((*draw(st.sampled_from(paths)), draw(st.integers(0, 5))))
    nodes = sorted(set(paths) - {()})
    random.Random(draw(st.integers(0, 999))).shuffle(nodes)
    return nodes


def test_eagle1s_own_tree() -> None:
    tree = StaticTree()
    assert [sum(len(path) == depth for path in tree.paths) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert [list(path) for path in tree.paths] == [
        *([0], [1], [2], [3]),
        *([0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]),
        *([0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]),
        *([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]),
        *([0, 0, 0, 0, 0], [0, 0, 0, 0, 1]),
    ]
    assert (tree.depth, tree.nodes_drafted, tree.slots) == (5, 25, 10)
    assert tree.name == "static tree of 25 (depth 5)"
    tree.check(4)


@settings(max_examples=150, deadline=None, derandomize=True)
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
            path = (*path, int(vocab.target_ids_D[sorted(range(7), key=lambda token: -row[token])[rank]]))
        wanted.append(path)
    assert paths_of(tree) == wanted
    assert tree.tokens_BN.shape == (1, growth.nodes_drafted + 1) == (1, len(nodes) + 1)
    inner = {node[:-1] for node in nodes} - {()}
    assert sum(map(len, oracle.levels)) == growth.slots == len(inner)
    assert len(oracle.levels) == growth.depth - 1 == max(map(len, nodes)) - 1  # the deepest are not expanded
    assert len({path[: len(path) - 1] for path in wanted}) == len(inner | {()})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(trees(), trees())
def test_trees_of_the_same_nodes_are_equal(nodes: list[Ranks], others: list[Ranks]) -> None:
    tree = StaticTree(tuple(nodes))
    again = StaticTree(json.loads(json.dumps(tree.describe()))["paths"])
    assert tree == StaticTree(tuple(reversed(nodes))) == again and hash(tree) == hash(again)
    assert (tree == StaticTree(tuple(others))) == (set(nodes) == set(others))


def propose(drafter: Drafter, growth: Growth, room: int = LENGTH) -> tuple[Drafting, DraftTree]:
    """A proposal after LENGTH random committed rows, the last of them with as much padding as rounds have."""
    generator = torch.Generator().manual_seed(1)
    count = len(drafter.config.aux_layers)
    aux = torch.randn(1, LENGTH, count, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=generator)
    proposer = Drafting(drafter, growth, room)
    proposer.commit(ids[:, 1:-1], aux[:, :-1])
    again = 1 + growth.depth
    start = proposer.commit(ids[:, -1:].expand(-1, again), aux[:, -1:].repeat(1, again, 1, 1), torch.tensor([1]))
    return proposer, proposer.draft(ids[:, -1], start)


@dataclasses.dataclass(frozen=True)
class Alone(Growth):
    """One path of ranks, one node after another, whatever else a tree holds."""

    ranks: Ranks = ()

    @property
    def slots(self) -> int:
        return len(self.ranks)

    def grow(self, root_B: Tensor, start: Frontier, expand: Expand, vocab: DraftVocab, children: Children) -> DraftTree:
        tokens, frontier = [root_B], start
        for place, rank in enumerate(self.ranks):
            order_BD = frontier.log_probs_BKD[:, 0].argsort(descending=True)
            tokens.append(vocab.to_target(order_BD[:, rank]))
            if place + 1 < len(self.ranks):
                seen_1Q = torch.ones(1, place + 1, dtype=torch.bool)
                frontier = expand(tokens[-1][:, None], frontier.h_BKH, seen_1Q, torch.arange(place + 1))
        return DraftTree(torch.stack(tokens, 1), torch.arange(-1, len(self.ranks)).clamp(min=0)[None])


@pytest.mark.parametrize("growth", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", SPECS)
def test_a_drafters_tree_is_what_it_says_along_every_path_alone(name: str, growth: StaticTree) -> None:
    drafter = tiny_drafter(SPECS[name])
    _, tree = propose(drafter, growth)
    seen_NN = ancestors(tree.parents_BN)[0]
    for node, path in enumerate(growth.paths, start=1):
        _, alone = propose(drafter, Alone(ranks=path))
        assert tree.tokens_BN[0, seen_NN[node]].tolist() == alone.tokens_BN[0].tolist(), path
    assert len(set(tree.tokens_BN[0].tolist())) > 1


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("name", SPECS)
def test_a_static_chain_is_the_chain(name: str, depth: int) -> None:
    drafter = tiny_drafter(SPECS[name])
    growth = StaticTree(tuple((0,) * length for length in range(1, depth + 1)))
    _, tree = propose(drafter, growth)
    _, chain = propose(drafter, Chain(depth))
    assert torch.equal(tree.tokens_BN, chain.tokens_BN) and torch.equal(tree.parents_BN, chain.parents_BN)
    assert (growth.depth, growth.slots, growth.nodes_drafted) == (depth, Chain(depth).slots, depth)


@pytest.mark.parametrize("growth", TREES.values(), ids=TREES)
def test_the_capacity_is_used_to_the_last_slot_and_committed_rows_stay(growth: StaticTree) -> None:
    drafter = tiny_drafter(presets()["eagle3_1"])
    proposer, tree = propose(drafter, growth)
    assert proposer.capacity == LENGTH + max(growth.slots, growth.depth)
    assert bool(proposer.cache.keys_BgSd[0][..., -1, :].any())
    roomy, same = propose(drafter, growth, LENGTH + 9)
    assert torch.equal(tree.tokens_BN, same.tokens_BN)
    clean, _ = propose(drafter, Chain(1))
    for other in (proposer, roomy):
        torch.testing.assert_close(other.rows(), clean.rows(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
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
    assert len(set(accepted["eagle1"])) > 2 and len(set(accepted["gaps"])) > 1, "it both refused and accepted"


@pytest.mark.parametrize("name", presets())
def test_drafters_that_know_nothing_change_nothing(name: str) -> None:
    target, drafter = tiny_target(1), tiny_drafter(presets()[name], 2)
    for growth in TREES.values():
        made = SpeculativeDecoder(target, drafter, growth).generate([7, 8], 12)
        assert made.ids == PlainDecoder(target).generate([7, 8], 12).ids


def test_of_a_perfect_drafter_the_deepest_path_is_accepted() -> None:
    target = markov_target()
    drafter = perfect_drafter(target, dataclasses.replace(presets()["eagle1"], draft_vocab_size="all"))
    made = SpeculativeDecoder(target, drafter, StaticTree()).generate([3, 4, 5], 1 + 4 * 6)
    assert made.accepted == (5,) * 4
    assert SpeculativeDecoder(target, drafter, TREES["one"]).generate([3], 9).accepted == (0,) * 8  # the third guess


def test_a_tree_grown_in_inference_serves_outside_of_it() -> None:
    law, growth = random_law(5, 8), StaticTree(((7,), (7, 7)))
    with torch.inference_mode():
        inside, _ = grow(growth, law, draft_vocab(8))
    outside, _ = grow(growth, law, draft_vocab(8))
    assert paths_of(inside) == paths_of(outside) and not outside.parents_BN.is_inference()
    assert int(inside.tokens_BN[0, 0]) == ROOT


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], r"a static tree is a list of paths, as \[\[0\], \[1\], \[0, 0\]\], not \[\]"),
        (None, "a list of paths, .* not None"),
        ("00", "a list of paths, .* not '00'"),
        ({"paths": [[0]]}, "a list of paths, .* not {'paths'"),
        ([[0], []], r"a path is a list of child ranks, as \[0, 1\], not \[\]; the root has none"),
        ([0, 1], "a path is a list of child ranks, .* not 0"),
        (["0"], "a path is a list of child ranks, .* not '0'"),
        ([[0], [0, -1]], r"path \[0, -1\] has a rank that is not a whole number from 0 up"),
        ([[0], [0, 1.0]], r"path \[0, 1.0\] has a rank that is not a whole number"),
        ([[True]], r"path \[True\] has a rank that is not"),
        ([["a\nb"]], r"path \['a\\nb'\] has a rank that is not"),
        ([[0], [1], [0]], r"path \[0\] is there twice"),
        ([[0], [0, 1, 2]], r"path \[0, 1, 2\] lacks its parent: add \[0, 1\]"),
        ([[1, 0]], r"path \[1, 0\] lacks its parent: add \[1\]"),
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(paths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^growth: .*{message}") as caught:
        StaticTree(paths)
    assert "\n" not in str(caught.value)


def test_ranks_fit_the_draft_vocabulary() -> None:
    growth = StaticTree(((0,), (0, 5)))
    growth.check(6)
    with pytest.raises(ValueError, match=r"path \[0, 5\] goes beyond the draft vocabulary of 5"):
        growth.check(5)
    drafter = tiny_drafter(dataclasses.replace(presets()["eagle3_1"], draft_vocab_size=6))
    assert propose(drafter, growth)[1].tokens_BN.shape == (1, 3)
    with pytest.raises(ValueError, match=r"path \[6\] goes beyond the draft vocabulary of 6"):
        SpeculativeDecoder(tiny_target(), drafter, StaticTree(((6,),)))


@pytest.mark.parametrize("text", ["[[0], [2], [2, 1]]", "# mine\n- [2, 1]\n- [0]\n- [2]\n"])
def test_a_file_holds_a_tree(tmp_path: Path, text: str) -> None:
    (tmp_path / "tree").write_text(text)
    assert read_static_tree(tmp_path / "tree") == StaticTree(((0,), (2,), (2, 1)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a list of paths, .* not None"),
        (b"[[0], [1, 0]]", r"path \[1, 0\] lacks its parent: add \[1\]"),
        (b"[[0], [1", "not valid YAML or JSON: .*line 1"),
        (b"[[0], \x00]", "not valid YAML or JSON: "),
        (b"\xff\xfe\xff", "not UTF-8 text"),
        (b"!!python/tuple [0]", "not valid YAML or JSON: "),
    ],
)
def test_a_file_that_holds_none_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tree.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'tree.yaml'}: .*{message}") as caught:
        read_static_tree(tmp_path / "tree.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path / 'none.json'}: no such file"):
        read_static_tree(tmp_path / "none.json")
    with pytest.raises(ValueError, match=f"^{tmp_path}: it is a directory"):
        read_static_tree(tmp_path)
