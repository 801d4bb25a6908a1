"""Counted operations against torch's own counter and masks; estimated memory against what autograd keeps.

Legend: B rows, T tokens, K unroll steps.
"""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from specdec.data import Batch
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, LastLayer, Norms
from specdec.nn.unroll import Blocked, kept_bytes
from specdec.nn.view import View
from specdec.training import throughput as module
from specdec.training.cost import (
    MB,
    MemoryNeed,
    Precision,
    activations,
    row_counts,
    step_flops,
    target_flops,
)
from specdec.training.step import ObjectiveConfig
from specdec.training.throughput import report_memory
from specdec.training.ttt import supervised, ttt_unroll
from tests.tiny import HIDDEN, LAYERS, llama_config, presets, tiny_config, tiny_drafter, tiny_target, variants

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm)  # of linear layers; attention is made of bmm
B, T, K = 2, 9, 3
ROWS = (7, 4, 0)  # rows of the head at each step
BARE = DrafterSpec(LastLayer(), norms=Norms(embed=False, hidden=False), draft_vocab_size=40)
SPECS = presets() | variants() | {"bare": BARE}  # which asks for no gradient by the first step's states


def counted(counter: FlopCounterMode, *operators: object) -> int:
    return sum(counter.get_flop_counts()["Global"].get(operator, 0) for operator in operators)


def forward(spec: DrafterSpec) -> Tensor:
    """A sum over the logits of some rows of every step."""
    drafter = tiny_drafter(spec).requires_grad_()
    aux = torch.randn(B, T, len(drafter.config.aux_layers), HIDDEN, dtype=torch.float64)
    ids, documents = torch.ones(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.int64)
    out = torch.zeros((), dtype=torch.float64)
    for step, count in zip(ttt_unroll(drafter, ids, aux, documents, len(ROWS), Blocked()), ROWS, strict=True):
        out = out + drafter.logits(step.normed_BTH.flatten(0, 1)[:count]).square().sum()
    return out


def attention(spec: DrafterSpec, T: int = T, K: int = K) -> int:
    """Operations of the attention alone, from the masks of the views."""
    config = tiny_config(spec)
    view = View.packed(torch.zeros(1, T, dtype=torch.int64))
    seen = 0
    for k in range(K):
        late = view._replace(positions_BT=view.positions_BT + k)
        late = late if config.attention_window == "full" else late.within(config.attention_window)
        seen += int(late.mask_B1TS.sum()) + k * T
    return 4 * config.num_attention_heads * config.head_dim * config.num_layers * B * seen


@pytest.mark.parametrize("name", SPECS)
def test_every_product_of_a_linear_layer_is_counted(name: str) -> None:
    spec, model = SPECS[name], tiny_target().model
    whole = step_flops(tiny_config(spec), ObjectiveConfig(steps=K), model, B, T, (B * T, sum(ROWS), 0))
    with FlopCounterMode(display=False) as counter:
        forward(spec).backward()
    products = whole - target_flops(model, B, T) - 3 * attention(spec)
    assert products == pytest.approx(counted(counter, *PRODUCTS), rel=0.1)  # some inputs ask for no gradient


def test_the_targets_forward() -> None:
    target, ids = tiny_target(), torch.ones(B, T, dtype=torch.int64)
    view = View.packed(torch.zeros_like(ids))
    with FlopCounterMode(display=False) as counter:
        target.forward(ids, view, [2])
    attended = 4 * 48 * LAYERS * B * T * (T + 1) // 2
    assert target_flops(target.model, B, T) - attended == counted(counter, *PRODUCTS)


def test_rows_are_those_that_training_supervises() -> None:
    generator = torch.Generator().manual_seed(0)
    for K in (1, 4, 20):
        mask = torch.rand(5, 16, generator=generator) < 0.7
        documents = torch.randint(0, 3, (5, 16), generator=generator).sort(dim=1).values
        documents[:2, 13:] = -1
        batch = Batch(torch.zeros_like(documents), mask, documents)
        trained = [supervised(mask, documents, k) for k in range(K)]
        taught = torch.zeros(5, 16, dtype=torch.bool)
        for k, slots in enumerate(trained):
            for b, t in slots.nonzero().tolist():
                taught[b, t + 1 + k] = True
        want = [int(torch.stack(trained).any(0).sum()), int(sum(slots.sum() for slots in trained)), int(taught.sum())]
        assert row_counts(batch, K).tolist() == want and want[2] > 0


DESIGNS = presets() | variants()
WIDE_VOCAB = 400
CPU = torch.device("cpu")
SIZES = {"vocab_size": WIDE_VOCAB, "hidden_size": 96, "intermediate_size": 256, "head_dim": 24}


def config_of(spec: DrafterSpec) -> DrafterConfig:
    return DrafterConfig.for_target(
        spec, llama_config(**SIZES), vocab_size=WIDE_VOCAB, num_target_layers=LAYERS, identity={"source": "tiny"}
    )


def drafter_of(spec: DrafterSpec) -> Drafter:
    config = config_of(spec)
    drafter = Drafter(config, torch.arange(config.draft_vocab_size))
    drafter.embed_tokens.requires_grad_(False)
    return drafter


def kept(drafter: Drafter, B: int, T: int, K: int, autocast: bool) -> int:
    """Bytes of all that fusion and unroll save, weights, their copies, the target's states and biases left out."""
    aux = torch.randn(B, T, len(drafter.config.aux_layers), drafter.config.target_hidden_size)
    ids, documents = torch.ones(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.int64)
    shapes = {shape for p in drafter.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
    others = {x.untyped_storage().data_ptr() for x in (aux, *drafter.parameters())}
    alive: list[Any] = []  # else an address is given twice
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        alive.append(x)
        if storage.data_ptr() not in others and tuple(x.shape) not in shapes:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        alive += ttt_unroll(drafter, ids, aux, documents, K, Blocked())
    return sum(found.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", DESIGNS)
def test_activations_are_what_autograd_keeps(name: str, autocast: bool) -> None:
    drafter, B, T = drafter_of(DESIGNS[name]), 2, 40
    for K in (1, 4, 5):
        real = kept(drafter, B, T, K, autocast)
        got = activations(drafter.config, B, T, K, Precision(torch.float32, torch.bfloat16 if autocast else None))
        whole = drafter.config.attention_window == "full"
        biases = kept_bytes(B, T) * (1 if whole else K)  # the kernel holds these itself
        assert got - biases == pytest.approx(real, rel=0.3 if K == 1 else 0.1), K


EXPECTED = MemoryNeed(*(part * 10**6 for part in (20, 3000, 10, 4, 5, 6, 7)))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    box: list[int | None] = [None]
    monkeypatch.setattr(module, "free_memory", lambda device: box[0])
    return box


@pytest.mark.parametrize(("left", "warned"), [(3028 * MB, False), (3028 * MB - 1, True), (None, False)])
def test_a_warning_where_memory_is_short(
    left: int | None, warned: bool, free: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    free[0] = left
    with caplog.at_level(logging.INFO, logger=module.__name__):
        report_memory(EXPECTED, CPU)
    assert caplog.messages[0] == f"estimated memory: {EXPECTED!s}"
    assert [record.levelname for record in caplog.records[1:]] == ["WARNING"] * warned
    if warned:
        assert "about 3,028 MB more on cpu, which has 3,028 MB free" in caplog.messages[1]
