"""Twenty optimizer steps of each preset, to the last digits.

A change that should not alter numbers leaves these losses alone; one that should comes with new ones and the reason:
``python -m tests.training.test_golden`` writes them.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.data import Batch
from specdec.drafter import Drafter
from specdec.nn.rope import Rope
from specdec.training.losses import SoftCrossEntropy
from specdec.training.objective import objective, teach
from tests.tiny import HIDDEN, VOCAB, presets, tiny_config, tiny_target

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = {"eagle1": 1, "eagle3": 4, "eagle3_1": 4}


def batch() -> Batch:
    T = 24
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (3, T), generator=generator)
    mask = torch.ones(3, T, dtype=torch.bool)
    mask[:, :4] = mask[:, 12:15] = False
    documents = torch.tensor([[0] * T, [0] * 12 + [1] * 12, [0] * 9 + [1] * 11 + [-1] * 4])
    return Batch(ids, mask & (documents >= 0), documents)


@torch.no_grad()
def whole_numbers(parameters: Iterable[Tensor], scale: float) -> None:
    """Weights that every machine draws alike: normal_ differs in the last bit between processors, randint does not."""
    generator = torch.Generator().manual_seed(3)
    for parameter in parameters:
        if parameter.ndim > 1:
            parameter.copy_(torch.randint(-64, 65, parameter.shape, generator=generator) * scale)


def float64_tables(rope: Rope, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary tables without float32, whose cosines differ in the last bit between processors."""
    width = 12
    inverse = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.cat([positions_BT[:, None, :, None] * inverse] * 2, dim=-1)
    return angles.cos(), angles.sin()


def losses(name: str) -> list[float]:
    """As the module trains: warm start, frozen embedding, AdamW with the default betas."""
    target = tiny_target()
    whole_numbers(target.model.parameters(), 1 / 1024)
    whole_numbers([target.head_weight()], 1 / 128)
    config = tiny_config(presets()[name])
    drafter = Drafter(config, torch.arange(VOCAB)[: config.draft_vocab_size]).double()
    whole_numbers(drafter.parameters(), 1 / 2048)
    drafter.warm_start(target.embedding_weight(), target.head_weight(), torch.ones(HIDDEN))
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(config.head == "own")
    optimizer = torch.optim.AdamW(
        [p for p in drafter.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    data = batch()
    said = teach(target, drafter, data)
    teacher = type(said)(*(x.mul(16).round().div(16) for x in said))  # its own float32 parts end here
    out = []
    for _ in range(20):
        loss = objective(drafter, data, teacher, SoftCrossEntropy(), STEPS[name], 0.8).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(float(loss.detach()))
    return out


@pytest.mark.parametrize("name", presets())
def test_losses_are_the_committed_ones_and_fall(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rope, "tables", float64_tables)
    got = losses(name)
    assert got == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-10, abs=0)
    assert got[-1] < 0.85 * got[0] and got == sorted(got, reverse=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Rope.tables = float64_tables  # type: ignore[method-assign]
    GOLDEN.write_text(json.dumps({name: losses(name) for name in presets()}, indent=1) + "\n")
