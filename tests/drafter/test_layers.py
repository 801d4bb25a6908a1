"""The decoder layers against transformers' LlamaDecoderLayer with the same weights."""

import dataclasses

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specdec.drafter import DrafterSpec, Narrow, Norms, PreNorm
from specdec.drafter.entry import Entered
from specdec.drafter.layers import Layer, Layers
from specdec.nn.norm import RMSNorm
from specdec.nn.view import View
from tests.tiny import HIDDEN, llama_config, presets, tiny_config, tiny_drafter

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1]])
VIEW = View.packed(DOCUMENTS)


def hugging_face(ours: Layer, input_norm: nn.Module) -> LlamaDecoderLayer:
    """Theirs with our weights; their norm computes in float32, so ours stands in for it."""
    config = llama_config()
    config._attn_implementation = "sdpa"
    theirs = LlamaDecoderLayer(config, layer_idx=0).double()
    theirs.self_attn.load_state_dict(ours.attention.state_dict())
    theirs.mlp.load_state_dict(ours.mlp.state_dict())
    theirs.input_layernorm, theirs.post_attention_layernorm = input_norm, ours.post_attention_norm
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


def test_a_narrow_entry_with_an_input_norm_is_a_llama_layer() -> None:
    norms = Norms(embed=False, hidden=False, input=True, output=False)
    spec = dataclasses.replace(presets()["eagle1"], norms=norms)
    drafter, (ids, h) = tiny_drafter(spec), inputs()
    x = drafter.entry.fc(torch.cat([drafter.embed_tokens(ids), h], dim=-1))
    want = run(hugging_face(drafter.layers.layers[0], drafter.norms.input), x)
    torch.testing.assert_close(drafter.step(ids, h, VIEW).h_BTH, want, rtol=0, atol=1e-11)
    without = run(hugging_face(drafter.layers.layers[0], nn.Identity()), x)
    assert not torch.allclose(without, want)


def test_eagle1s_first_layer_has_no_input_norm_and_no_final_norm() -> None:
    drafter, (ids, h) = tiny_drafter(presets()["eagle1"]), inputs()
    norms = [name for name, module in drafter.named_modules() if isinstance(module, RMSNorm)]
    assert norms == ["layers.layers.0.post_attention_norm"]
    x = drafter.entry.fc(torch.cat([drafter.embed_tokens(ids), h], dim=-1))
    want = run(hugging_face(drafter.layers.layers[0], nn.Identity()), x)
    step = drafter.step(ids, h, VIEW)
    torch.testing.assert_close(step.h_BTH, want, rtol=0, atol=1e-11)
    assert torch.equal(step.h_BTH, step.normed_BTH)


def test_further_layers_are_plain_pre_norm_layers() -> None:
    for entry_of in ("eagle1", "eagle3"):
        spec = dataclasses.replace(presets()[entry_of], num_layers=3, recurrence=PreNorm())
        layers = tiny_drafter(spec).layers
        assert len(layers.layers) == 3 and len(layers.input_norms) == 2
        width = 2 * HIDDEN if entry_of == "eagle3" else HIDDEN
        generator = torch.Generator().manual_seed(1)
        block, residual = (torch.randn(2, 6, w, dtype=torch.float64, generator=generator) for w in (width, HIDDEN))
        entered = Entered(block, residual)
        x = layers.layers[0](entered, VIEW, layers.rope.tables(VIEW.positions_BT))
        for norm, layer in zip(layers.input_norms, layers.layers[1:], strict=True):
            x = run(hugging_face(layer, norm), x)
        torch.testing.assert_close(layers(entered, VIEW), x, rtol=0, atol=1e-11)


def test_every_layer_has_its_own_place_in_the_cache() -> None:
    layers = Layers(tiny_config(DrafterSpec(num_layers=3)))
    assert [layer.attention.layer for layer in layers.layers] == [0, 1, 2]


def test_the_first_layer_is_as_wide_as_its_entry() -> None:
    for entry, width in ((DrafterSpec().entry, 2 * HIDDEN), (Narrow(), HIDDEN)):
        layers = Layers(tiny_config(DrafterSpec(entry=entry, num_layers=2)))
        assert [layer.attention.q_proj.in_features for layer in layers.layers] == [width, HIDDEN]
