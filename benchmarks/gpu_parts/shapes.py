"""Random targets and drafters of given sizes, and how a device is waited for and timed."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.commands.plan_costs import DEVICES
from specdec.data import Batch
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec
from specdec.features import FeatureSource
from specdec.target import Target, TargetOutput

Row = Sequence[str]


class Shape(NamedTuple):
    """Sizes of a target, and of a training step."""

    hidden: int
    intermediate: int
    heads: int
    groups: int
    layers: int
    vocab: int
    draft_vocab: int
    rows: int
    tokens: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 1, 4, 512, 256, 2, 64),
    "S": Shape(512, 1408, 8, 4, 8, 32_000, 8192, 2, 512),
    "M": Shape(1024, 2816, 16, 8, 8, 32_000, 16_000, 2, 1024),
    "1B": Shape(2048, 8192, 32, 8, 16, 128_256, 32_000, 8, 2048),
    "8B": Shape(4096, 14_336, 32, 8, 32, 128_256, 32_000, 8, 4096),
}


def llama(shape: Shape, layers: int, dtype: torch.dtype, device: str) -> Target:
    """Make a random target on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=layers, num_attention_heads=shape.heads, num_key_value_heads=shape.groups,
        max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Target(LlamaForCausalLM(config).to(dtype))


def drafter_of(target: Target, shape: Shape, dtype: torch.dtype) -> Drafter:
    """Make EAGLE-3.1's drafter, random, with as many boundaries of the target as it is deep enough for."""
    layers = target.num_layers
    boundaries = sorted({1, layers // 2, layers})
    spec = DrafterSpec(draft_vocab_size=shape.draft_vocab, aux_layers=boundaries)
    config = DrafterConfig.for_target(
        spec, target.config, vocab_size=target.vocab_size, num_target_layers=layers, identity={}
    )
    return Drafter(config, torch.arange(shape.draft_vocab)).to(device=target.device, dtype=dtype)


class Random(FeatureSource):
    """Features that no target made, drawn once."""

    def __init__(self) -> None:
        self.made: TargetOutput | None = None

    def __call__(
        self, target: Target, batch: Batch, layers: Sequence[int], final_norm: bool
    ) -> TargetOutput:
        """Return them in the batch's shape."""
        if self.made is None:
            weight = target.embedding_weight()
            like = {"device": weight.device, "dtype": weight.dtype}
            aux_BTNH = torch.randn(*batch.ids_BT.shape, len(layers), target.hidden_size, **like)
            final_BTH = torch.randn(*batch.ids_BT.shape, target.hidden_size, **like)
            self.made = TargetOutput(aux_BTNH, final_BTH)
        return self.made


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(act: Callable[[], object], device: str, times: int) -> float:
    """Return what an act takes on average, after a first one that compiles."""
    act()
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(times):
        act()
    synchronize(device)
    return (time.perf_counter() - begin) / times


def peak_gigabytes(device: str) -> str:
    """Return the most memory that tensors took since :func:`seconds` began to count."""
    return f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device == "cuda" else "-"


def product_flops(device: str) -> float:
    """Measure the operations a second of one large product in bfloat16."""
    width = 8192 if device == "cuda" else 512
    left, right = torch.randn(2, width, width, device=device, dtype=torch.bfloat16)
    return 2 * width**3 / seconds(lambda: left @ right, device, 10)


def vendors_flops(device: str) -> float | None:
    """Return the data sheet's operations a second in 16 bits, if ``plan`` knows the device."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name().lower()
    return next((known.flops for key, known in DEVICES.items() if key in name), None)
