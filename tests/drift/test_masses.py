"""Shares of attention: every row in sight is one thing, and shares add up to one."""

import copy
import dataclasses
import math

import pytest
import torch

from specdec.drafter import Drafter
from specdec.drift.measure import measure
from specdec.drift.settings import Settings
from specdec.nn.attention import Attention
from tests.drift.made import SMALL, SPECS, drafter, means, measured, target, texts

PARTS = ("sink_mass", "prompt_mass", "recent_mass", "own_mass", "rest_mass")


def indifferent(name: str) -> Drafter:
    """Its queries are zero, so that all keys in sight weigh the same."""
    out = copy.deepcopy(drafter(name))
    with torch.no_grad():
        for module in out.modules():
            if isinstance(module, Attention):
                module.qkv_proj.weight[: module.heads * module.head_dim] = 0
        if hasattr(out.entry, "token_qkv_proj"):
            out.entry.token_qkv_proj.weight[: out.config.num_attention_heads * out.config.head_dim] = 0
    return out


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "two_layer", "sliding_window"])
def test_an_indifferent_drafter_spreads_its_attention_evenly(name: str) -> None:
    text, settings = texts()[0], Settings(depths=4, anchors=1, sink_tokens=2, recent=3)
    (anchor,) = text.anchors(1, 4)
    assert anchor > 12 and text.prompt == 4
    blind = indifferent(name)
    sums = measure(target(), blind, text, settings)
    for layer in [None] if blind.config.num_layers == 1 else [None, 0, 1]:
        found = means(sums, blind, layer)
        for k in range(1, 5):
            rows = anchor + k - 1  # the text's up to the root's, and what was drafted
            hidden = max(0, rows - 16) if name == "sliding_window" else 0
            at = k - 1
            assert found["sink_mass"][at] == pytest.approx(max(0, 2 - hidden) / (rows - hidden))
            assert found["prompt_mass"][at] == pytest.approx(max(0, 2 - max(0, hidden - 2)) / (rows - hidden))
            assert found["recent_mass"][at] == pytest.approx(3 / (rows - hidden))
            assert found["own_mass"][at] == pytest.approx((k - 1) / (rows - hidden))
            assert found["self_mass"][at] == pytest.approx(1 / (rows - hidden))
            assert found["entropy"][at] == pytest.approx(math.log(rows - hidden))


@pytest.mark.parametrize("name", SPECS)
def test_shares_add_up_to_one(name: str) -> None:
    found = measured(name, dataclasses.replace(SMALL, depths=7, anchors=9, recent=2), text=1)
    for k in range(7):
        assert sum(found[part][k] for part in PARTS) == pytest.approx(1, abs=1e-12)
        assert found["own_mass"][0] == 0
        assert 0 < found["self_mass"][k] <= (found["recent_mass"] if k == 0 else found["own_mass"])[k] + 1e-12


def test_the_position_that_takes_the_most_is_told() -> None:
    text, settings = texts()[0], SMALL
    calm = measure(target(), indifferent("eagle3"), text, settings)
    anchors = text.anchors(settings.anchors, settings.depths)
    wanted = [1 / (anchor + k) for anchor in anchors for k in range(settings.depths)]
    assert calm.top_2.tolist() == [0, pytest.approx(sum(wanted) / len(wanted))]  # all are alike: the first
