"""Slots, places and commits of the target's cache."""

import pytest
import torch

from specdec.nn.view import View
from specdec.target.cache import TargetCache


def write(cache: TargetCache, prefix: int, length: int, layer: int, seed: int) -> torch.Tensor:
    cache.place(View.chain(prefix, length, cache.capacity, cache))
    keys = torch.randn(1, 2, length, 4, generator=torch.Generator().manual_seed(seed))
    cache.update(keys, -keys[..., :3], layer)
    return keys


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
    cache.commit(torch.tensor(3), torch.tensor(path))
    for layer in range(2):
        keys, values = cache._buffers[layer]
        kept = torch.cat([before[layer], tree[layer][:, :, path]], dim=2)
        assert torch.equal(keys[:, :, : kept.shape[2]], kept)
        assert torch.equal(values[:, :, : kept.shape[2]], -kept[..., :3])


def test_views_that_do_not_fit_are_refused() -> None:
    cache = TargetCache(8)
    with pytest.raises(ValueError, match="7 key columns and the cache 8 slots"):
        cache.place(View.chain(0, 2, 7, cache))
    with pytest.raises(ValueError, match=r"View\.append"):
        cache.place(View.packed(torch.zeros(1, 8, dtype=torch.int64)))
    with pytest.raises(ValueError, match="slot 8 is beyond the cache's 8 slots"):
        cache.place(View.chain(6, 3, 8, cache))
    with pytest.raises(ValueError, match="at least one slot"):
        TargetCache(0)
