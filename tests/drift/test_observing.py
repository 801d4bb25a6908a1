"""Weights that are seen from outside are those that the drafter attends with."""

import pytest
import torch
from torch import Tensor, nn

from specdec.drift.observing import observing
from specdec.nn.attention import Attention
from specdec.nn.cache import StaticCache
from specdec.nn.view import View
from tests.drift.made import SPECS
from tests.tiny import HIDDEN, VOCAB, tiny_drafter

PREFIX, NODES, CAPACITY = 20, 3, 26


@pytest.mark.parametrize("name", SPECS)
def test_weights_times_values_are_the_attentions_output(name: str) -> None:
    drafter = tiny_drafter(SPECS[name])
    config = drafter.config
    cache = StaticCache(config.num_layers, config.num_key_value_heads, CAPACITY, config.head_dim, torch.float64)
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(1, PREFIX, len(config.aux_layers), HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (1, PREFIX), generator=generator)
    drafter.step(ids, drafter.fuse(aux), View.chain(0, PREFIX, CAPACITY, cache))
    heads: dict[int, Tensor] = {}  # what every attention hands to its output matrix
    for module in drafter.modules():
        if isinstance(module, Attention):
            keep = lambda _, args, layer=module.layer: heads.update({layer: args[0]})  # noqa: E731
            module.o_proj.register_forward_pre_hook(keep)
    tree = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)[None]
    view = View.append(PREFIX, tree, torch.tensor([[0, 0, 1]]), CAPACITY, cache)
    plain = drafter.step(ids[:, :NODES], drafter.fuse(aux[:, :NODES]), view)
    with observing(drafter) as seen:
        feature = drafter.fuse(aux[:, :NODES])
        step = drafter.step(ids[:, :NODES], feature, view)
    assert all(torch.equal(one, two) for one, two in zip(plain, step, strict=True))
    assert sorted(seen.weights_BhTS) == list(range(config.num_layers)) == sorted(heads)
    for layer, weights in seen.weights_BhTS.items():
        assert weights.shape == (1, config.num_attention_heads, NODES, CAPACITY)
        values = cache.values_BgSd[layer].repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 1)
        wanted = (weights @ values).transpose(1, 2).flatten(2)
        assert (wanted - heads[layer]).abs().max() < 1e-12
        sees = view.mask_B1TS if config.attention_window == "full" else view.within(16).mask_B1TS
        assert (weights > 0).any(1, keepdim=True).equal(sees)
    assert seen.out_BTH is not None and torch.equal(drafter.norms.output(seen.out_BTH), step.normed_BTH)
    assert seen.aux_BTNH is not None and torch.equal(seen.aux_BTNH, aux[:, :NODES])
    assert seen.normed_aux_BTNH is not None and torch.equal(drafter.fusion(seen.normed_aux_BTNH), feature)


def test_nothing_stays_behind() -> None:
    drafter = tiny_drafter(SPECS["two_layer"])
    with pytest.raises(KeyError), observing(drafter):
        raise KeyError
    assert not any(has_hooks(module) for module in drafter.modules())


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
