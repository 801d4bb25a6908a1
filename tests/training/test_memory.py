"""Estimated memory against what autograd keeps.

Legend: B rows, T tokens, K unroll steps.
"""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, MarkovBlock, MaskBlock
from specdec.nn.blocked import Blocked, kept_bytes
from specdec.training import memory
from specdec.training.memory import MB, Precision, activations, report_memory
from tests.tiny import LAYERS, llama_config, presets, variants

DESIGNS = presets() | variants()
WIDE_VOCAB = 400
CPU = torch.device("cpu")
SIZES = {"vocab_size": WIDE_VOCAB, "hidden_size": 96, "intermediate_size": 256, "head_dim": 24}


def config_of(spec: DrafterSpec) -> DrafterConfig:
    return DrafterConfig.for_target(
        spec,
        llama_config(**SIZES),
        vocab_size=WIDE_VOCAB,
        num_target_layers=LAYERS,
        identity={"source": "tiny"},
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
    shapes = {
        shape for p in drafter.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])
    }
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
        alive += drafter.unroll(ids, aux, documents, K, Blocked())
    return sum(found.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", DESIGNS)
def test_activations_are_what_autograd_keeps(name: str, autocast: bool) -> None:
    B, T = 2, 41
    # transformers' norms make float32 copies there
    slack = 0.15 if name == "mtp" and autocast else 0
    for K in (1, 4, 5):
        blocks = {
            "dflash": MaskBlock(masks=K),
            "dspark": MarkovBlock(masks=K, rank=6, root_drafts=False),
        }
        spec = DESIGNS[name]
        drafter = drafter_of(replace(spec, recurrence=blocks.get(name, spec.recurrence)))
        real = kept(drafter, B, T, K, autocast)
        products = torch.bfloat16 if autocast else torch.float32
        got = activations(drafter.config, B, T, [1.0] * K, Precision(torch.float32, products))
        whole = drafter.config.attention_window == "full"
        biases = kept_bytes(B, T) * (1 if whole else K)  # the kernel holds these itself
        assert got - biases == pytest.approx(real, rel=(0.3 if K == 1 else 0.1) + slack), K


EXPECTED = dict(
    zip(
        ("weights", "activations", "target", "loss"),
        (20 * MB, 3000 * MB, 4 * MB, 28 * MB),
        strict=True,
    )
)


def test_the_estimate_is_logged_part_by_part(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=memory.__name__):
        report_memory(EXPECTED)
    assert caplog.messages == [
        "estimated memory: 3,052 MB: weights 20, activations 3,000, target 4, loss 28"
    ]
