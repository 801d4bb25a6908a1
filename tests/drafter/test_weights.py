"""How a drafter's weights are called and laid out, here and in papers."""

import pytest
import torch

from tests.published import fill, published
from tests.tiny import HIDDEN, VOCAB, biased, presets, tiny_drafter, variants

H, I, QKV = HIDDEN, 48, (4 + 2 * 2) * 12  # noqa: E741  of the tiny Llama's drafters
VECTOR, FUSION = (H,), {"fusion.fc.weight": (H, 3 * H)}
BLOCK = {
    "attention.qkv_proj.weight": (QKV, H),
    "attention.o_proj.weight": (H, 48),
    "post_attention_norm.weight": VECTOR,
    "mlp.gate_up_proj.weight": (2 * I, H),
    "mlp.down_proj.weight": (H, I),
}
WIDE = {"entry.token_qkv_proj.weight": (QKV, H)}
NARROW = {"entry.token_fc.weight": (H, H), "entry.feature_fc.weight": (H, H)}
NORMS = {f"norms.{site}.weight": VECTOR for site in ("embed", "hidden", "output")}
EACH = {f"norms.aux.{n}.weight": VECTOR for n in range(3)}
HEAD_NORMS = {f"layers.layers.0.attention.norm.{part}_norm.weight": (12,) for part in "qk"}
SECOND = {f"layers.layers.1.{name}": shape for name, shape in BLOCK.items()} | {"layers.input_norms.0.weight": VECTOR}
DESIGNS = presets() | variants() | {"biased": biased()}
HELD: dict[str, dict[str, tuple[int, ...]]] = {
    "eagle1": NARROW,
    "biased": NARROW | {"entry.feature_fc.bias": VECTOR},
    "eagle3": WIDE | FUSION | NORMS,
    "eagle3_1": WIDE | FUSION | NORMS | EACH,
    "nvidia": WIDE | FUSION | NORMS | {"norms.aux.weight": (3 * H,)},
    "qwen3": WIDE | FUSION | NORMS | EACH | HEAD_NORMS,
    "weighted_sum": WIDE | NORMS | EACH | {"fusion.fc.weight": (H, H), "fusion.scores_N": (3,)},
    "two_layer": WIDE | FUSION | NORMS | EACH | SECOND,
    "narrow_fusion": NARROW | FUSION | NORMS | {"norms.input.weight": VECTOR},
}


@pytest.mark.parametrize("name", HELD)
def test_the_names_that_a_checkpoint_holds(name: str) -> None:
    """Exporters and stored drafters rest on these, and on their shapes."""
    drafter = tiny_drafter(DESIGNS[name])
    D = drafter.config.draft_vocab_size
    common = {"vocab.target_ids_D": (D,), "embed_tokens.weight": (VOCAB, H), "lm_head.weight": (D, H)}
    want = common | {f"layers.layers.0.{part}": shape for part, shape in BLOCK.items()} | HELD[name]
    assert {part: tuple(value.shape) for part, value in drafter.state_dict().items()} == want


PUBLISHED = {f"{part}_proj": shape for part, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))}


@pytest.mark.parametrize("name", HELD)
def test_the_published_names_and_back(name: str) -> None:
    """One matrix a projection, as papers and other repositories have them, and nothing lost on the way."""
    drafter = tiny_drafter(DESIGNS[name])
    w = {part: value.detach().clone() for part, value in published(drafter).items()}
    assert sum(value.numel() for value in w.values()) == sum(p.numel() for p in drafter.parameters())
    assert not any("qkv_proj" in part or "gate_up" in part or "token_fc" in part or "feature" in part for part in w)
    narrow = name in ("eagle1", "biased", "narrow_fusion")
    for i in range(drafter.config.num_layers):
        wide = 2 * H if i == 0 and not narrow else H
        shapes = {"q_proj": (48, wide), "k_proj": (24, wide), "v_proj": (24, wide), "o_proj": (H, 48)}
        for part, shape in shapes.items():
            assert w[f"layers.layers.{i}.attention.{part}.weight"].shape == shape
        for part, shape in PUBLISHED.items():
            assert w[f"layers.layers.{i}.mlp.{part}.weight"].shape == shape
    assert ("entry.fc.weight" in w) == narrow and ("entry.fc.bias" in w) == (name == "biased")
    assert not narrow or w["entry.fc.weight"].shape == (H, 2 * H)
    assert ("layers.layers.0.attention.q_norm.weight" in w) == (name == "qwen3")
    other = tiny_drafter(DESIGNS[name], seed=1)
    assert not any(torch.equal(a, b) for a, b in zip(other.parameters(), drafter.parameters(), strict=True))
    fill(other, w)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), drafter.parameters(), strict=True))
