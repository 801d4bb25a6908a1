"""Multi-head latent attention beside transformers' own of DeepSeek-V3."""

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from specdec.nn.latent import LatentAttention
from specdec.nn.rope import Rope, rope_scale
from specdec.nn.view import View

HEADS, PLAIN, TURNED, VALUES, KV, WIDTH, T = 3, 6, 4, 5, 8, 32, 11
PLAINLY = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
ROPES = {
    "default": PLAINLY,
    "yarn": YARN,
    "stretched": YARN | {"mscale": 0.8, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("q_rank", [0, 10])
def test_it_is_transformers(q_rank: int, rope: str) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=q_rank or None,
        kv_lora_rank=KV, qk_nope_head_dim=PLAIN, qk_rope_head_dim=TURNED, v_head_dim=VALUES,
        max_position_embeddings=128, rope_parameters=dict(ROPES[rope]), attn_implementation="eager",
    )  # fmt: skip
    theirs = DeepseekV3Attention(config, 0).double()
    sizes = HEADS, q_rank, KV, PLAIN, TURNED, VALUES
    ours = LatentAttention(WIDTH, *sizes, 0, config.rms_norm_eps, rope_scale(ROPES[rope])).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-1, 1)
    weights = theirs.state_dict()
    first = "q_a_proj" if q_rank else "q_proj"
    # theirs reads queries' and keys' latents with a matrix each
    joined = [weights.pop(f"{name}.weight") for name in (first, "kv_a_proj_with_mqa")]
    ours.load_state_dict(weights | {"qkv_proj.weight": torch.cat(joined)})
    # rounding of the norms' epsilon apart, both are the same sums
    x_1TH, positions = torch.randn(1, T, WIDTH, dtype=torch.float64), torch.arange(T)[None]
    mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    want, _ = theirs(x_1TH, DeepseekV3RotaryEmbedding(config)(x_1TH, positions), mask)
    table = Rope(ROPES[rope], TURNED, 128)
    view = View.packed(torch.zeros_like(positions))
    got = ours(x_1TH, view, table.tables(view.positions_BT))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # they rotate in float32


def test_what_scores_are_stretched_by() -> None:
    assert rope_scale(PLAINLY) == rope_scale(YARN) == 1.0
    assert rope_scale(YARN | {"mscale_all_dim": 1.0}) == pytest.approx(1.2079441541679836**2)
