"""Floating point operations of one training batch, and what a device could do of them in a second.

A multiply and an add are two operations. Counted are matrix products and attention, as the model asks for them: a
causal query meets the keys up to its own, whatever a kernel computes beside them, slots that no step trains give
their keys in the first step and no more, and what is recomputed is counted once. Norms, activations, softmaxes and
the optimizer are left out, as usual. Model FLOPs utilisation (MFU, https://arxiv.org/abs/2204.02311) is these per
second over the peak.

Legend: B rows, T tokens, K unroll steps, H hidden, D draft vocabulary, V vocabulary.
"""

import functools
import re
import time
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from specdec.data import Batch
from specdec.drafter import DrafterConfig
from specdec.drafter.entry import NarrowEntry
from specdec.training.ttt import supervised


@dataclass(frozen=True)
class Work:
    """Operations of one batch, forward and backward, by their place."""

    target: int  # the frozen model's layers
    teacher: int  # its logits
    fuse: int
    unroll: int  # entry and layers of all steps
    head: int
    backward: int  # of fuse, unroll and head

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(astuple(self))


class FrozenModel(NamedTuple):
    """What the target's forward costs.

    Experts that are no ``nn.Linear`` are not counted: of a mixture of experts this is a lower bound. Documents and
    sliding windows are ignored: every query meets every earlier key of its row.
    """

    weights: int  # elements of the linear layers, head excluded
    layers: int
    width: int  # of all query heads together

    @classmethod
    def of(cls, model: Any) -> Self:
        """Measure a transformers model."""
        decoder = model.get_decoder()
        config = decoder.config
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(linear_weights(decoder), config.num_hidden_layers, width)

    def forward(self, B: int, T: int) -> int:
        """Operations of one forward without the head."""
        return 2 * self.weights * B * T + self.layers * 4 * self.width * B * pairs(T)


def linear_weights(module: nn.Module) -> int:
    """Elements of the matrices of all linear layers; biases are not among them."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def pairs(T: int, window: int | None = None) -> int:
    """Query-key pairs of T queries that see the keys up to their own, at most the last ``window`` of them."""
    seen = T if window is None else max(0, min(window, T))
    return seen * (seen + 1) // 2 + (T - seen) * seen


def step_work(
    config: DrafterConfig,
    target: FrozenModel,
    B: int,
    T: int,
    K: int,
    *,
    kept: int,
    rows: int,
    teacher_rows: int,
    whole_vocabulary: bool = True,
    train_embed: bool = False,
    train_head: bool = True,
) -> Work:
    """Operations of one batch; linear in ``kept``, ``rows`` and ``teacher_rows``.

    Args:
        kept: slots that some step trains; each is taken to see as much as an average slot. The others give their
            keys in the first step.
        rows: rows that go through the drafter's head, over all unroll steps; see :func:`row_counts`.
        teacher_rows: rows that go through the target's head.
        whole_vocabulary: the target's head is read whole, not only at the draft vocabulary.
        train_embed: the token embedding is trained.
        train_head: the head is trained; a frozen one passes the gradient on and needs none itself.
    """
    H, tokens = config.hidden_size, B * T
    with torch.device("meta"):
        fusion, entry = config.fusion.build(config), config.entry.build(config)
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layers = config.num_layers * (H * (2 * q + 2 * kv) + 3 * H * config.intermediate_size)
    window = None if config.attention_window == "full" else config.attention_window
    sights = [pairs(T, None if window is None else window - k) + k * T for k in range(K)]  # own columns: one a step
    fuse = 2 * linear_weights(fusion) * tokens
    token, feature = linear_weights(entry), 0  # read once for all steps; and in each
    if isinstance(entry, NarrowEntry):
        token, feature = linear_weights(entry.token_fc), linear_weights(entry.feature_fc)
    reading = 2 * token * B * (T + K)
    below = layers // config.num_layers * (config.num_layers - 1)  # and the keys of the last, with its queries
    first = (tokens - kept) * (2 * (feature + below + H * (q + 2 * kv)))
    seen = config.num_layers * kept * sum(sights) / T + (config.num_layers - 1) * (B - kept / T) * sights[0]
    unroll = reading + first + 2 * (feature + layers) * K * kept + round(4 * q * seen)
    head = 2 * H * config.draft_vocab_size * rows

    # A product's backward is two of its size, by its weight and by its input; less where one is not asked for.
    backward = 2 * (fuse + unroll) + head * (2 if train_head else 1)
    if config.norms.aux == "none" and all(isinstance(part, nn.Linear) for part in learning(fusion)):
        backward -= fuse  # nothing is learnt before it
    if not (train_embed or config.norms.embed):
        backward -= reading  # nor before the embedding
    if not (config.norms.hidden or fuse):
        backward -= 2 * (feature or H * (q + 2 * kv)) * tokens  # nor before the first step's first product
    width = config.vocab_size if whole_vocabulary else config.draft_vocab_size
    teacher = 2 * config.target_hidden_size * width * teacher_rows
    return Work(target.forward(B, T), teacher, fuse, unroll, head, backward)


def learning(module: nn.Module) -> list[nn.Module]:
    """The parts with parameters of their own."""
    return [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]


def row_counts(batch: Batch, K: int) -> Tensor:
    """Slots that some step trains, rows of the drafter's head over all K steps, and rows of the target's
    head; (3,) int64 on the batch's device.

    Two neighbouring answer tokens j and j + 1 of a document are a row of step k if its slot, j - 1 - k, lies in it.
    The target is asked once for all steps.
    """
    documents_BT, mask_BT = batch.documents_BT, batch.loss_mask_BT
    order_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    same_BT = documents_BT[:, 1:] == documents_BT[:, :-1]
    starts_BT = torch.where(nn.functional.pad(same_BT, (1, 0)), 0, order_T).cummax(dim=1).values
    answers_BT = same_BT & mask_BT[:, 1:] & mask_BT[:, :-1] & (documents_BT[:, 1:] >= 0)
    slots_BT = (order_T - starts_BT)[:, :-1] * answers_BT
    kept_BT = torch.stack([supervised(mask_BT, documents_BT, k) for k in range(K)]).any(0)
    return torch.stack([kept_BT.sum(), slots_BT.clamp(max=K).sum(), slots_BT.clamp(max=1).sum()])


class Peak(NamedTuple):
    """Operations per second that a device could do at most, and who says so."""

    flops: float
    source: str


# Dense TFLOP/s in bfloat16 and float16 (sums in float32), TF32 and float32, by what CUDA calls the device.
# NVIDIA's sheets of Hopper and Blackwell list the tensor cores with sparsity: halved. Lightning 2.6 has a table too,
# but it does not know an H200 or B200 by CUDA's name, and gives some chips' sparse figures.
DATASHEETS: dict[str, tuple[float, float, float]] = {
    r"\bGB200\b": (2500, 1250, 80),  # NVIDIA GB200 NVL72 datasheet, a GPU's share
    r"\bB200\b": (2250, 1125, 75),  # NVIDIA HGX B200 datasheet, a GPU's share
    r"\bH[12]00 NVL\b": (835.5, 417.5, 60),  # NVIDIA H100 and H200 datasheets
    r"\bH100 PCIe\b": (756.5, 378, 51),  # NVIDIA H100 datasheet
    r"\bH[12]00\b": (989.5, 494.5, 67),  # NVIDIA H100 and H200 datasheets, SXM
    r"\bA100\b": (312, 156, 19.5),  # NVIDIA A100 datasheet
    r"\bL40S\b": (362, 183, 91.6),  # NVIDIA L40S datasheet
    r"\bRTX 4090$": (165.2, 82.6, 82.6),  # NVIDIA Ada GPU architecture whitepaper
}
PROBE_SIZE, PROBE_SECONDS = 1024, 0.2


def peak(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Of ``device`` in products of ``dtype``: from its datasheet, or measured on a CPU; None where nobody knows."""
    if device.type == "cpu":
        return Peak(_measured(dtype), f"measured matmul peak, {str(dtype).removeprefix('torch.')}")
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    figures = next((figures for chip, figures in DATASHEETS.items() if re.search(chip, name)), None)
    tensor_cores = torch.get_float32_matmul_precision() != "highest"
    column = {torch.bfloat16: 0, torch.float16: 0, torch.float32: 1 if tensor_cores else 2}.get(dtype)
    if figures is None or column is None:
        return None
    return Peak(figures[column] * 1e12, f"{name} datasheet, dense {('bfloat16', 'TF32', 'float32')[column]}")


@functools.cache
def _measured(dtype: torch.dtype) -> float:
    """The best of the square products of size 1024 that fit into 0.2 seconds; draws no random number."""
    a = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype)
    torch.mm(a[:128], a)  # wake the threads and the library
    best, end = float("inf"), time.perf_counter() + PROBE_SECONDS
    while (started := time.perf_counter()) < end:
        torch.mm(a, a)
        best = min(best, time.perf_counter() - started)
    return 2 * PROBE_SIZE**3 / best
