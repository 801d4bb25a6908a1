"""The decoder layers against transformers' LlamaDecoderLayer with the same weights."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specdec.drafter import Drafter, DrafterSpec, Narrow, Norms, PreNorm, Wide
from specdec.drafter.entry import Entered
from specdec.drafter.layers import Layers
from specdec.nn.norm import RMSNorm
from specdec.nn.view import View
from tests.published import published
from tests.tiny import HIDDEN, biased, llama_config, presets, tiny_config, tiny_drafter

QKV = (4 + 2 * 2) * 12  # queries, keys and values of all heads
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1]])
VIEW = View.packed(DOCUMENTS)


def hugging_face(drafter: Drafter, index: int, input_norm: nn.Module) -> LlamaDecoderLayer:
    """Theirs with the weights of our layer ``index``; their norm computes in float32, so ours stands in for it."""
    config = llama_config()
    config._attn_implementation = "sdpa"
    theirs = LlamaDecoderLayer(config, layer_idx=0).double()
    w = published(drafter)
    for module, at in ((theirs.self_attn, "attention"), (theirs.mlp, "mlp")):
        prefix = f"layers.layers.{index}.{at}."
        module.load_state_dict({k.removeprefix(prefix): x for k, x in w.items() if k.startswith(prefix)})
    theirs.input_layernorm = input_norm
    theirs.post_attention_layernorm = drafter.layers.layers[index].post_attention_norm
    return theirs.requires_grad_(False)


def run(layer: LlamaDecoderLayer, x: Tensor) -> Tensor:
    bias = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~VIEW.mask_B1TS, -torch.inf)
    tables = LlamaRotaryEmbedding(llama_config())(x, VIEW.positions_BT)
    out = layer(x, attention_mask=bias, position_embeddings=tables)
    return out[0] if isinstance(out, tuple) else out


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (2, 6), generator=generator)
    return ids, torch.randn(2, 6, HIDDEN, dtype=torch.float64, generator=generator)


def merged(drafter: Drafter, ids: Tensor, h: Tensor) -> Tensor:
    """EAGLE-1's projection of embedding and feature."""
    w = published(drafter)
    return nn.functional.linear(
        torch.cat([w["embed_tokens.weight"][ids], h], dim=-1), w["entry.fc.weight"], w.get("entry.fc.bias")
    )


def test_a_narrow_entry_with_an_input_norm_is_a_llama_layer() -> None:
    norms = Norms(embed=False, hidden=False, input=True, output=False)
    spec = dataclasses.replace(biased(), norms=norms)
    drafter, (ids, h) = tiny_drafter(spec), inputs()
    x = merged(drafter, ids, h)
    want = run(hugging_face(drafter, 0, drafter.norms.input), x)
    torch.testing.assert_close(drafter.step(ids, h, VIEW).h_BTH, want, rtol=0, atol=1e-11)
    without = run(hugging_face(drafter, 0, nn.Identity()), x)
    assert not torch.allclose(without, want)


def test_eagle1s_first_layer_has_no_input_norm_and_no_final_norm() -> None:
    drafter, (ids, h) = tiny_drafter(presets()["eagle1"]), inputs()
    norms = [name for name, module in drafter.named_modules() if isinstance(module, RMSNorm)]
    assert norms == ["layers.layers.0.post_attention_norm"]
    want = run(hugging_face(drafter, 0, nn.Identity()), merged(drafter, ids, h))
    step = drafter.step(ids, h, VIEW)
    torch.testing.assert_close(step.h_BTH, want, rtol=0, atol=1e-11)
    assert torch.equal(step.h_BTH, step.normed_BTH)


def test_further_layers_are_plain_pre_norm_layers() -> None:
    for entry_of in ("eagle1", "eagle3"):
        spec = dataclasses.replace(presets()[entry_of], num_layers=3, recurrence=PreNorm())
        drafter = tiny_drafter(spec)
        layers = drafter.layers
        assert len(layers.layers) == 3 and len(layers.input_norms) == 2
        generator = torch.Generator().manual_seed(1)
        widths = (HIDDEN, QKV, HIDDEN)
        block, beside, residual = (torch.randn(2, 6, w, dtype=torch.float64, generator=generator) for w in widths)
        entered = Entered(block, beside if entry_of == "eagle3" else None, residual)
        x = layers.layers[0](entered, VIEW, layers.rope.tables(VIEW.positions_BT))
        for index, norm in enumerate(layers.input_norms, start=1):
            x = run(hugging_face(drafter, index, norm), x)
        torch.testing.assert_close(layers(entered, VIEW), x, rtol=0, atol=1e-11)


def test_every_layer_has_its_own_place_in_the_cache() -> None:
    layers = Layers(tiny_config(DrafterSpec(num_layers=3)))
    assert [layer.attention.layer for layer in layers.layers] == [0, 1, 2]


def test_every_layer_reads_the_drafters_width_whatever_its_entry() -> None:
    for entry in (Wide(), Narrow()):
        layers = Layers(tiny_config(DrafterSpec(entry=entry, num_layers=2)))
        shapes = [tuple(layer.attention.qkv_proj.weight.shape) for layer in layers.layers]
        assert shapes == [(QKV, HIDDEN), (QKV, HIDDEN)]


def test_what_stands_beside_the_block_reaches_the_first_layer_alone() -> None:
    """And its attention alone: the residual path goes past it."""
    layers, generator = tiny_drafter(DrafterSpec(num_layers=2)).layers, torch.Generator().manual_seed(1)
    block, beside, residual = (
        torch.randn(2, 6, w, dtype=torch.float64, generator=generator) for w in (HIDDEN, QKV, HIDDEN)
    )
    seen: list[Tensor | None] = []
    for layer in layers.layers:
        layer.attention.register_forward_pre_hook(lambda module, args: seen.append(args[3]))
    alone = layers(Entered(block, None, residual), VIEW)
    assert seen == [None, None]
    together = layers(Entered(block, beside, residual), VIEW)
    assert seen[2] is beside and seen[3] is None and not torch.allclose(alone, together)
    nothing = layers(Entered(block, torch.zeros_like(beside), residual), VIEW)
    torch.testing.assert_close(nothing, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_window_narrows_every_layer_once(num_layers: int) -> None:
    """As the same layers do under a view that was narrowed outside."""
    spec = DrafterSpec(num_layers=num_layers, norms=Norms())
    full = tiny_drafter(spec).layers
    narrow = tiny_drafter(dataclasses.replace(spec, attention_window=16)).layers
    narrow.load_state_dict(full.state_dict())
    view = View.packed(torch.tensor([[0] * 20 + [1] * 20]))
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 40, HIDDEN), (1, 40, QKV), (1, 40, HIDDEN)]
    entered = Entered(*(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes))
    assert torch.equal(narrow(entered, view), full(entered, view.within(16)))
    gap_T = (narrow(entered, view) - full(entered, view)).abs().amax(-1)[0]
    assert (gap_T > 1e-9).nonzero()[:, 0].tolist() == [16, 17, 18, 19, 36, 37, 38, 39]


def test_the_full_text_is_no_window() -> None:
    assert isinstance(Layers(tiny_config(DrafterSpec())).sight, nn.Identity)
