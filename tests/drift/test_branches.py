"""Chains off one trunk see what they would see alone."""

import torch

from specdec.drift.branches import Branches


def test_every_node_sees_the_trunk_before_its_anchor_and_its_own_chain() -> None:
    trunk, at, levels = 4, [0, 4, 2], 3
    branches = Branches(trunk, torch.tensor(at))
    seen, depth = branches.seen(0, levels)[0], branches.depth(levels)
    assert seen.shape == (len(at) * levels, trunk + len(at) * levels)
    for level in range(levels):
        for chain, anchor in enumerate(at):
            node = level * len(at) + chain
            wanted = {*range(anchor), *(trunk + below * len(at) + chain for below in range(level + 1))}
            assert set(seen[node].nonzero()[:, 0].tolist()) == wanted
            assert depth[trunk + node] == anchor + level
    assert depth[:trunk].tolist() == list(range(trunk))
    for level in range(levels):  # a level alone is that part of all
        rows = slice(level * len(at), (level + 1) * len(at))
        assert torch.equal(branches.seen(level, level + 1)[0], seen[rows, : trunk + (level + 1) * len(at)])
