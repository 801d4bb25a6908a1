"""How large drafters are, against closed formulas and published counts; nothing of their size is allocated."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, Narrow, Norms, PreNorm, WeightedSum
from tests.tiny import presets

EAGLE3 = DrafterSpec(norms=Norms(), recurrence=PreNorm())


class Sizes(NamedTuple):
    """Hidden, intermediate, query heads, key heads, head width."""

    H: int
    I: int  # noqa: E741
    q: int
    kv: int
    d: int


QWEN3_4B, LLAMA31_8B = Sizes(2560, 9728, 32, 8, 128), Sizes(4096, 14336, 32, 8, 128)
OTHERS = [Sizes(96, 200, 6, 3, 10), Sizes(64, 72, 8, 1, 24), Sizes(40, 16, 5, 5, 8)]


def count(spec: DrafterSpec, sizes: Sizes, target_width: int | None = None) -> int:
    """Parameters without the embedding, which is the target's own."""
    hf_config = SimpleNamespace(
        hidden_size=target_width or sizes.H,
        intermediate_size=sizes.I,
        num_attention_heads=sizes.q,
        num_key_value_heads=sizes.kv,
        head_dim=sizes.d,
        max_position_embeddings=4096,
        rope_theta=1e6,
    )
    config = DrafterConfig.for_target(
        dataclasses.replace(spec, hidden_size=sizes.H), hf_config,
        vocab_size=128256, num_target_layers=32, identity={"source": "sizes"},
    )  # fmt: skip
    ids_D = torch.arange(config.draft_vocab_size)
    with torch.device("meta"):
        drafter = Drafter(config, ids_D)
    return sum(p.numel() for name, p in drafter.named_parameters() if name != "embed_tokens.weight")


def layer(sizes: Sizes, width_in: int) -> int:
    """Projections, feed-forward and the norm between them."""
    H, I, q, kv, d = sizes  # noqa: E741
    return width_in * (q + 2 * kv) * d + q * d * H + 3 * H * I + H


def eagle3(sizes: Sizes, D: int = 32000, n_aux: int = 3, H_t: int | None = None) -> int:
    """The closed formula: fusion, one wide layer, head, and the norms on embedding, feature and output."""
    return n_aux * (H_t or sizes.H) * sizes.H + layer(sizes, 2 * sizes.H) + D * sizes.H + 3 * sizes.H


def test_qwen3_4b() -> None:
    assert count(EAGLE3, QWEN3_4B) == eagle3(QWEN3_4B) == 218_245_120


def test_llama_3_1_8b() -> None:
    assert round(count(EAGLE3, LLAMA31_8B) / 1e6, 1) == round(eagle3(LLAMA31_8B) / 1e6, 1) == 424.7


@pytest.mark.parametrize("aux", ["none", "each", "concat"])
@pytest.mark.parametrize("layers", [[5], [2, 16, 29], [1, 4, 9, 16, 25]], ids=len)
@pytest.mark.parametrize("H_t", [None, 56])
@pytest.mark.parametrize("sizes", OTHERS, ids=lambda sizes: str(sizes.H))
def test_the_closed_formula(sizes: Sizes, H_t: int | None, layers: list[int], aux: str) -> None:
    """Each of the two aux norms has one weight for every channel of every state."""
    norms = Norms(aux=aux)  # type: ignore[arg-type]
    spec = dataclasses.replace(EAGLE3, norms=norms, aux_layers=layers, draft_vocab_size=77)
    more = 0 if aux == "none" else len(layers) * (H_t or sizes.H)
    assert count(spec, sizes, H_t) == eagle3(sizes, 77, len(layers), H_t) + more


@pytest.mark.parametrize("sizes", [QWEN3_4B, *OTHERS], ids=lambda sizes: str(sizes.H))
def test_what_each_variant_adds(sizes: Sizes) -> None:
    plain, (H, _, q, kv, d) = eagle3(sizes), sizes
    assert count(dataclasses.replace(EAGLE3, norms=Norms(query_key=True)), sizes) == plain + 2 * d
    assert count(dataclasses.replace(EAGLE3, num_layers=2), sizes) == plain + layer(sizes, H) + H
    assert count(dataclasses.replace(EAGLE3, fusion=WeightedSum()), sizes) == plain - 2 * H * H + 3
    assert count(dataclasses.replace(EAGLE3, entry=Narrow()), sizes) == plain + 2 * H * H + H - H * (q + 2 * kv) * d
    assert count(dataclasses.replace(EAGLE3, norms=Norms(residual="normed")), sizes) == plain
    assert count(dataclasses.replace(EAGLE3, attention_window=512), sizes) == plain
    deep = dataclasses.replace(EAGLE3, norms=Norms(query_key=True), num_layers=3)
    assert count(deep, sizes) == plain + 2 * (layer(sizes, H) + H) + 3 * 2 * d


@pytest.mark.parametrize("sizes", OTHERS, ids=lambda sizes: str(sizes.H))
def test_eagle1_has_a_projection_and_a_layer(sizes: Sizes) -> None:
    head = 128256 * sizes.H  # the target's own
    assert count(presets()["eagle1"], sizes) - head == 2 * sizes.H**2 + layer(sizes, sizes.H)
