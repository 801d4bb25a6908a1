"""Masks, positions and slots, against a slow reading of their definition; spans say what pairs say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.nn.view import Pairs, Spans, View
from tests.nn.trees import Tree, seen_by, trees
from tests.nn.visibilities import packed_visibilities


@st.composite
def packings(draw: st.DrawFn) -> list[list[int]]:
    """Rows of document numbers as packing makes them: runs, then padding; a number may return after another one."""
    length = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 2), min_size=0, max_size=length).map(sorted)
    return [
        (numbers + [-1] * length)[:length]
        for numbers in draw(st.lists(row, min_size=1, max_size=3))
    ]


@settings(max_examples=60, deadline=None)
@given(packings())
def test_packed_is_causal_inside_each_run(rows: list[list[int]]) -> None:
    view = View.packed(torch.tensor(rows))
    assert view.slots_BT is None and view.cache is None
    assert view.visibility.mask_B1TS.dtype == torch.bool and view.positions_BT.dtype == torch.int64
    assert torch.equal(view.key_positions_BS, view.positions_BT)
    for b, row in enumerate(rows):
        for t, number in enumerate(row):
            start = t
            while start and row[start - 1] == number:
                start -= 1
            assert int(view.positions_BT[b, t]) == t - start
            assert view.visibility.mask_B1TS[b, 0, t].nonzero()[:, 0].tolist() == list(
                range(start, t + 1)
            )


def row(view: View, b: int) -> View:
    """One sequence's part of a batch's view; each field has one for every sequence."""
    assert view.slots_BT is not None
    assert (
        len(view.positions_BT)
        == len(view.visibility.mask_B1TS)
        == len(view.key_positions_BS)
        == len(view.slots_BT)
        > b
    )
    one = slice(b, b + 1)
    visible = Pairs(view.visibility.mask_B1TS[one], view.visibility.columns)
    return View(view.positions_BT[one], visible, view.key_positions_BS[one], view.slots_BT[one])


def check_append(view: View, prefix: int, tree: Tree, new: int, capacity: int) -> None:
    drafted, depths = len(tree.parents), tree.depths
    columns = (
        list(range(prefix)) + [prefix + d for d in depths] + list(range(prefix + drafted, capacity))
    )
    assert view.key_positions_BS.tolist() == [columns]
    nodes = range(drafted - new, drafted)
    assert view.slots_BT is not None and view.slots_BT.dtype == torch.int64
    assert view.slots_BT.tolist() == [[prefix + node for node in nodes]]
    assert view.positions_BT.tolist() == [[prefix + depths[node] for node in nodes]]
    assert (
        view.visibility.mask_B1TS.shape == (1, 1, new, capacity)
        and view.visibility.mask_B1TS.dtype == torch.bool
    )
    for row, node in enumerate(nodes):
        want = set(range(prefix)) | {prefix + seen for seen in tree.ancestors(node)}
        assert set(view.visibility.mask_B1TS[0, 0, row].nonzero()[:, 0].tolist()) == want


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(0, 6), st.integers(0, 3), st.data())
def test_append_sees_prefix_and_ancestors(
    tree: Tree, prefix: int, spare: int, data: st.DataObject
) -> None:
    drafted = len(tree.parents)
    new = data.draw(st.integers(1, drafted))
    capacity = prefix + drafted + spare
    given_as = data.draw(st.sampled_from([prefix, torch.tensor(prefix), torch.tensor([prefix])]))
    seen_TQ, depth_Q = seen_by(tree)[drafted - new :], torch.tensor(tree.depths)
    check_append(View.append(given_as, seen_TQ, depth_Q, capacity), prefix, tree, new, capacity)


@settings(max_examples=150, deadline=None)
@given(
    st.data(),
    st.integers(1, 6),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_a_batch_of_appends_is_each_of_them_alone(
    data: st.DataObject, drafted: int, prefixes: list[int], spare: int
) -> None:
    """Prefixes and trees differ; or one tree, given without a batch or with a batch of one, serves all."""
    new = data.draw(st.integers(1, drafted))
    capacity = max(prefixes) + drafted + spare
    size = trees(drafted, drafted)
    shared = data.draw(st.sampled_from(["", "tree", "batch of one"]))
    grown = [data.draw(size)] * len(prefixes) if shared else [data.draw(size) for _ in prefixes]
    seen_BTQ = torch.stack([seen_by(tree)[drafted - new :] for tree in grown])
    depth_BQ = torch.tensor([tree.depths for tree in grown])
    if shared:
        seen_BTQ, depth_BQ = seen_BTQ[:1], depth_BQ[:1]
    if shared == "tree":
        seen_BTQ, depth_BQ = seen_BTQ[0], depth_BQ[0]
    view = View.append(torch.tensor(prefixes), seen_BTQ, depth_BQ, capacity)
    for b, (prefix, tree) in enumerate(zip(prefixes, grown, strict=True)):
        check_append(row(view, b), prefix, tree, new, capacity)


@pytest.mark.parametrize("prefix", [0, 3, torch.tensor([3])])
@pytest.mark.parametrize("length", [1, 4])
def test_chain_is_a_tree_without_branches(prefix: int | Tensor, length: int) -> None:
    tree = Tree([None, *range(length - 1)])
    check_append(View.chain(prefix, length, 9), int(prefix), tree, length, 9)


def test_chains_of_a_batch_start_where_each_ends() -> None:
    view = View.chain(torch.tensor([0, 3, 5]), 4, 9)
    for b, prefix in enumerate((0, 3, 5)):
        check_append(row(view, b), prefix, Tree([None, 0, 1, 2]), 4, 9)


def sees(view: View, window: int, sinks: int) -> list[list[list[int]]]:
    """Columns that every node of every row should see within a window and of the sinks, one by one."""
    return [
        [
            [
                column
                for column, key in enumerate(view.key_positions_BS[b].tolist())
                if bool(view.visibility.mask_B1TS[b, 0, t, column])
                and (key > int(view.positions_BT[b, t]) - window or key < sinks)
            ]
            for t in range(view.positions_BT.shape[1])
        ]
        for b in range(view.positions_BT.shape[0])
    ]


def check_within(view: View, window: int, sinks: int) -> None:
    narrow = view.within(window, sinks)
    found = [
        [row.nonzero()[:, 0].tolist() for row in mask[0]] for mask in narrow.visibility.mask_B1TS
    ]
    assert found == sees(view, window, sinks)
    assert narrow.visibility.mask_B1TS.shape == view.visibility.mask_B1TS.shape
    for name in ("positions_BT", "key_positions_BS", "slots_BT", "cache"):
        assert getattr(narrow, name) is getattr(view, name)


@settings(max_examples=60, deadline=None)
@given(packings(), st.integers(1, 6), st.integers(0, 3), st.integers(0, 4))
def test_within_counts_the_node_itself_in_packed_rows(
    rows: list[list[int]], window: int, step: int, sinks: int
) -> None:
    """Also at later steps of the unroll, whose nodes have moved on while their keys stand."""
    view = View.packed(torch.tensor(rows))
    check_within(view._replace(positions_BT=view.positions_BT + step), window, sinks)


@settings(max_examples=100, deadline=None)
@given(
    trees(), st.integers(0, 6), st.integers(0, 3), st.integers(1, 6), st.integers(0, 4), st.data()
)
def test_within_only_narrows_in_a_cache(
    tree: Tree, prefix: int, spare: int, window: int, sinks: int, data: st.DataObject
) -> None:
    """Slots that nobody has written lie ahead of every node; distance alone would let them in."""
    drafted = len(tree.parents)
    new = data.draw(st.integers(1, drafted))
    seen_TQ, depth_Q = seen_by(tree)[drafted - new :], torch.tensor(tree.depths)
    view = View.append(prefix, seen_TQ, depth_Q, prefix + drafted + spare, object())  # type: ignore[arg-type]
    check_within(view, window, sinks)
    for row, node in enumerate(range(drafted - new, drafted)):
        depth = tree.depths[node]
        kept = {i for i in range(prefix) if i > prefix + depth - window or i < sinks}
        near = {
            i
            for i in tree.ancestors(node)
            if tree.depths[i] > depth - window or prefix + tree.depths[i] < sinks
        }
        kept |= {prefix + seen for seen in near}
        assert (
            set(view.within(window, sinks).visibility.mask_B1TS[0, 0, row].nonzero()[:, 0].tolist())
            == kept
        )


@settings(max_examples=100, deadline=None)
@given(packed_visibilities(), st.data())
def test_every_answer_is_the_masks(visible: Spans, data: st.DataObject) -> None:
    mask = visible.mask_B1TS
    B, _, T, S = mask.shape
    pairs = Pairs(mask, S)
    a, i = data.draw(st.integers(0, T - 1)), data.draw(st.integers(0, S - 1))
    rows, keys = (
        slice(a, data.draw(st.integers(a + 1, T))),
        slice(i, data.draw(st.integers(i + 1, S))),
    )
    nodes = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(0, T - 1), min_size=3, max_size=3), min_size=2, max_size=2
            )
        )
    )
    assert torch.equal(visible.part(rows, keys, slice(None)), mask[:, :, rows, keys])
    assert torch.equal(visible.part(rows, keys, slice(1, 2)), mask[1:, :, rows, keys])
    for one in (visible, pairs):
        assert torch.equal(
            one.of(nodes).mask_B1TS, torch.stack([mask[b, :, nodes[b]] for b in range(B)])
        )
        assert torch.equal(one.cut(i + 1).mask_B1TS, mask[..., : i + 1])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-1, 2), min_size=1, max_size=12),
    st.integers(1, 13),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_a_window_narrows_spans_as_it_narrows_pairs(
    documents: list[int], window: int, step: int, sinks: int
) -> None:
    view = View.packed(torch.tensor([documents]))
    view = view._replace(positions_BT=view.positions_BT + step)
    by_pairs = view._replace(visibility=Pairs(view.visibility.mask_B1TS, view.visibility.columns))
    narrow, by_pairs = view.within(window, sinks), by_pairs.within(window, sinks)
    assert torch.equal(narrow.visibility.mask_B1TS, by_pairs.visibility.mask_B1TS)
    chain = View.chain(torch.tensor([3, 0]), len(documents), len(documents) + 5)
    by_pairs = chain._replace(
        visibility=Pairs(chain.visibility.mask_B1TS, chain.visibility.columns)
    )
    narrow, by_pairs = chain.within(window, sinks), by_pairs.within(window, sinks)
    assert torch.equal(narrow.visibility.mask_B1TS, by_pairs.visibility.mask_B1TS)
