"""Slots, places and commits of the target's cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.nn.view import View
from specdec.target.attention import TargetCache


def write(cache: TargetCache, prefix: int | Tensor, length: int, layer: int, seed: int) -> Tensor:
    """Fill slots of one sequence, or of as many as there are prefixes."""
    batch = prefix.numel() if isinstance(prefix, Tensor) else 1
    cache.place(View.chain(prefix, length, cache.capacity, cache))
    keys = torch.randn(batch, 2, length, 4, generator=torch.Generator().manual_seed(seed))
    cache.update(keys, -keys[..., :3], layer)
    return keys


def assert_holds(cache: TargetCache, b: int, layer: int, wanted: Tensor) -> None:
    """The first slots of a sequence hold these keys (g, T, d), and the values that :func:`write` gives them."""
    keys, values = (buffer[b, :, : wanted.shape[1]] for buffer in cache._buffers[layer])
    assert torch.equal(keys, wanted) and torch.equal(values, -wanted[..., :3])


def test_it_returns_what_a_view_can_see() -> None:
    cache = TargetCache(10)
    first = write(cache, 0, 4, 0, 1)
    cache.place(View.chain(4, 2, 10, cache))
    second = torch.randn(1, 2, 2, 4)
    keys, values = cache.update(second, second[..., :3], 0)
    assert torch.equal(keys, torch.cat([first, second], dim=2))
    assert values.shape == (1, 2, 6, 3)


@pytest.mark.parametrize("path", [[0, 2, 5], [0, 1, 2], [0], [1, 4]])
def test_commit_moves_accepted_nodes_in_every_layer(path: list[int]) -> None:
    cache = TargetCache(12)
    before = [write(cache, 0, 3, layer, layer) for layer in range(2)]
    tree = [write(cache, 3, 6, layer, 10 + layer) for layer in range(2)]
    cache.commit(torch.tensor([3]), torch.tensor([path]))
    for layer in range(2):
        assert_holds(cache, 0, layer, torch.cat([before[layer], tree[layer][:, :, path]], dim=2)[0])


@st.composite
def paths(draw: st.DrawFn, nodes: int, most: int) -> list[int]:
    """Nodes of a tree in order, the root first."""
    rest = draw(st.sets(st.integers(1, nodes - 1), max_size=most - 1)) if nodes > 1 else set()
    return [0, *sorted(rest)]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 7))
def test_each_sequence_of_a_batch_commits_a_path_of_its_own(
    data: st.DataObject, prefixes: list[int], T: int
) -> None:
    """Behind a shorter path's end stand the nodes' own numbers; what is committed stays."""
    most = data.draw(st.integers(1, T))
    own = [data.draw(paths(T, most)) for _ in prefixes]
    cache = TargetCache(max(prefixes) + T, len(prefixes))
    before = [
        write(cache, torch.zeros(len(prefixes), dtype=torch.int64), max(prefixes) + T, k, k)
        for k in range(2)
    ]
    tree = [write(cache, torch.tensor(prefixes), T, layer, 10 + layer) for layer in range(2)]
    cache.commit(
        torch.tensor(prefixes), torch.tensor([path + list(range(len(path), most)) for path in own])
    )
    for layer in range(2):
        for b, (prefix, path) in enumerate(zip(prefixes, own, strict=True)):
            assert_holds(
                cache,
                b,
                layer,
                torch.cat([before[layer][b, :, :prefix], tree[layer][b][:, path]], dim=1),
            )


def test_a_row_is_the_same_memory_whoever_writes_first() -> None:
    cache = TargetCache(8, 3)
    with cache.begin(1) as row:
        pass
    assert row.capacity == 8
    alone = write(row, 0, 4, 0, 1)
    row.place(View.chain(4, 1, 8, row))
    keys, values = row.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 3), 0)
    assert (
        torch.equal(keys[:, :, :4], alone)
        and keys.shape == (1, 2, 5, 4)
        and values.shape == (1, 2, 5, 3)
    )
    together = write(cache, torch.tensor([0, 5, 2]), 2, 0, 2)
    buffer = cache._buffers[0][0]
    assert torch.equal(
        buffer[1, :, :7], torch.cat([alone[0], torch.ones(2, 1, 4), together[1]], dim=1)
    )
    assert torch.equal(buffer[0, :, :2], together[0]) and torch.equal(
        buffer[2, :, 2:4], together[2]
    )
    assert not buffer[0, :, 2:].any() and not buffer[2, :, :2].any() and not buffer[1, :, 7:].any()
    assert torch.equal(write(row, 7, 1, 0, 3)[0], buffer[1, :, 7:])


def test_views_that_do_not_fit_are_refused() -> None:
    cache = TargetCache(8)
    with pytest.raises(ValueError, match="9 key columns and the cache 8 slots"):
        cache.place(View.chain(0, 2, 9, cache))
    with pytest.raises(ValueError, match=r"View\.append"):
        cache.place(View.packed(torch.zeros(1, 8, dtype=torch.int64)))
    with pytest.raises(ValueError, match="slot 8 is beyond the view's 8 key columns"):
        cache.place(View.chain(6, 3, 8, cache))
    with pytest.raises(ValueError, match="slot 5 is beyond the view's 5 key columns"):
        cache.place(View.chain(3, 3, 5, cache))
    with pytest.raises(ValueError, match="at least one slot"):
        TargetCache(0)
    with pytest.raises(ValueError, match="one sequence, not 8 and 0"):
        TargetCache(8, 0)
    with pytest.raises(ValueError, match="slot 9 is beyond the view's 8 key columns"):
        TargetCache(8, 2).place(View.chain(torch.tensor([7, 0]), 3, 8))
