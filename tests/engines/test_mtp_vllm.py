"""A module that was fine-tuned and put back is what a real vLLM drafts with: GLM's, which runs on a CPU.

vLLM's build for CPUs computes DeepSeek's latent attention otherwise, and does not put back Qwen3-Next's states.
"""

import shutil
from pathlib import Path

import pytest
import torch

from specdec.data import Batch
from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.embedded import embedded_target
from specdec.export import export_drafter, import_drafter
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from tests.engines.test_vllm import Inside, inside  # noqa: F401  a fixture
from tests.mtp import UNREAD, made

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS, DRAFTS = 61, 3
# vLLM gives the module no embedding in a text's first row, which is the second token's
PROMPTS = [
    [7 * n % 59 + 1, UNREAD, *((3 * n + 11 * k) % 61 + 1 for k in range(n))] for n in range(1, 6)
]


def test_acceptance_is_ours_at_every_position(tmp_path: Path, inside: Inside) -> None:  # noqa: F811
    source = tmp_path / "target"
    target, _ = made("glm4_moe", source, torch.float32, 4, vocab_size=64, hidden_size=64, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=32, moe_intermediate_size=32, eos_token_id=0)  # fmt: skip
    for file in embedded_target().glob("tokenizer*"):
        shutil.copy(file, source)
    drafter = import_drafter(source, target).requires_grad_(True)
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(False)
    plain = [PlainDecoder(target).generate(prompt, TOKENS, ()).ids for prompt in PROMPTS]
    ids = torch.tensor(
        [(prompt + text)[:TOKENS] for prompt, text in zip(PROMPTS, plain, strict=True)]
    )
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))
    recipe = ObjectiveConfig(steps=DRAFTS)
    teacher = target_outputs(target, drafter, batch, recipe)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        TrainStep(drafter, recipe)(batch, teacher).loss.backward()
        optimizer.step()
    stitched = export_drafter(
        drafter.requires_grad_(False), target, tmp_path / "stitched", "mtp"
    ).directory
    decoder = SpeculativeDecoder(target, drafter, Chain(DRAFTS))
    ours = [decoder.generate(prompt, TOKENS, ()) for prompt in PROMPTS]
    assert [one.ids for one in ours] == plain
    speculative = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    (found,) = inside(
        "offline", target=str(stitched), drafter=speculative, tokens=TOKENS, asked=[(0, PROMPTS)]
    )
    assert found["ids"] == plain
    accepted = [count for one in ours for count in one.accepted]
    assert found["drafts"] == [len(accepted)]
    assert found["accepted_tokens_per_pos"] == [
        sum(count > k for count in accepted) for k in range(DRAFTS)
    ]
    assert len(accepted) / 5 < sum(accepted) and sum(
        count == DRAFTS for count in accepted
    ) < 0.8 * len(accepted)
