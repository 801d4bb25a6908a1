"""What training will need of memory, told before the first step.

Legend: B rows, T tokens, K unroll steps, H hidden, D draft vocabulary, V vocabulary.
"""

import logging
from dataclasses import dataclass, fields

import torch
from torch import nn

from specdec import host
from specdec.drafter import DrafterConfig, PreNorm
from specdec.drafter.entry import NarrowEntry
from specdec.nn.tiles import kept_bytes
from specdec.training.law import BLOCK
from specdec.training.work import learning

log = logging.getLogger(__name__)

FLOAT32 = 4  # bytes
MB = 10**6


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device when they are most, at the end of a forward; all parts stand at once.

    Not part of it: the forward of the target, which is over by then; the gradients of the unroll step that the backward
    pass is at, for which more is taken, up to a fifth as measured, and a third on long rows with recomputation; what
    Python, libraries and data take.
    """

    weights: int  # the drafter's; under autocast with their bfloat16 copies
    gradients: int
    optimizer: int
    target: int
    teacher: int  # the target's states that training reads
    activations: int  # what the unroll keeps for its backward pass
    loss: int
    exchange: int = 0  # what several processes gather from, and reduce with, each other

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def ahead(self) -> int:
        """What comes on top of weights and target, which stand before the first step."""
        return self.total - self.weights - self.target

    def describe(self) -> str:
        """One line, in megabytes (10^6 bytes)."""
        names = [part.name for part in fields(self) if part.name != "exchange" or self.exchange]
        parts = (f"{name} {getattr(self, name) / MB:,.0f}" for name in names)
        return f"{self.total / MB:,.0f} MB: {', '.join(parts)}"


def estimate(
    config: DrafterConfig,
    parameters: int,
    trainable_parameters: int,
    B: int,
    T: int,
    K: int,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    target_bytes: int = 0,
    target_dtype: torch.dtype = torch.float32,
    optimizer_state_bytes_per_parameter: float = 8,
    checkpointing: bool = False,
    piece_bytes: int,
    train_head: bool = True,
    world: int = 1,
    sharded: bool = False,
    frozen_embedding: int = 0,
) -> Estimate:
    """Add up what one device will hold.

    DDP keeps everything on every device, and beside each gradient its place in a bucket. With FSDP2 a device keeps its
    shard of weights, gradients and optimizer state; while a batch is computed, all weights but a frozen embedding's are
    gathered, and the gradients are whole until they are reduced.

    Args:
        parameters: of the drafter, trained or not.
        dtype: of the drafter's parameters.
        autocast: what the products run in, if not in ``dtype``.
        target_bytes: see :func:`module_bytes`.
        optimizer_state_bytes_per_parameter: 8 for AdamW's two float32 moments, 4 for momentum alone.
        checkpointing: the unroll's steps are recomputed in the backward pass.
        piece_bytes: memory that the recipe gives the logits of a piece.
        train_head: the head is trained.
        world: processes that train together.
        sharded: by FSDP2.
        frozen_embedding: its parameters.
    """
    each, shards = dtype.itemsize, world if sharded else 1
    exchange = trainable_parameters * each if world > 1 or sharded else 0
    if sharded:
        exchange += (parameters - frozen_embedding) * each
    states = len(config.aux_layers) * each + target_dtype.itemsize  # the fused ones, and the last for the logits
    return Estimate(
        weights=parameters * each // shards + (trainable_parameters * autocast.itemsize if autocast else 0),
        gradients=trainable_parameters * each // shards,
        optimizer=int(trainable_parameters * optimizer_state_bytes_per_parameter / shards),
        target=target_bytes,
        teacher=B * T * config.target_hidden_size * states,
        activations=activations(config, B, T, K, dtype, autocast, checkpointing),
        loss=loss_buffers(config, B, T, K, dtype, autocast, piece_bytes, train_head),
        exchange=exchange,
    )


def activations(
    config: DrafterConfig,
    B: int,
    T: int,
    K: int,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    checkpointing: bool = False,
) -> int:
    """Bytes that fusion and unroll keep for the backward pass; parameters and their copies are not among them.

    All slots are counted in every step; where few tokens are supervised, it is less. The kernels that keep no weights
    are meant: ``Blocked`` with the biases that it keeps of short rows, and ``Flex``, which has none; ``Dense`` keeps
    h (T + k) more per token.
    With checkpointing every step keeps its feature, keys and values, and one step at a time is whole again; what was
    read of the tokens stays.
    """
    step, read = _step_bytes(config, dtype, autocast), _read_bytes(config, dtype, autocast)
    unroll = K * step
    if checkpointing:
        kv = 2 * config.num_key_value_heads * config.head_dim
        kept = (config.hidden_size + config.num_layers * kv) * (autocast or dtype).itemsize
        unroll = K * min(kept, step) + step
        wide = config.num_attention_heads * config.head_dim + kv
        read += (config.hidden_size if _is_narrow(config) else wide) * (autocast or dtype).itemsize
    plans = 1 if config.attention_window == "full" else K  # a window moves with the steps
    biases = plans * kept_bytes(B, T)
    return B * (T * (_fuse_bytes(config, dtype, autocast) + unroll) + (T + K) * read) + biases


def _fuse_bytes(config: DrafterConfig, dtype: torch.dtype, autocast: torch.dtype | None) -> int:
    """Bytes per token that fusion keeps, the target's states left out, and the first feature.

    Where every step's feature is counted, the first is among them: too much where it is the target's own state.
    """
    with torch.device("meta"):
        fusion = config.fusion.build(config)
    linears = [part for part in learning(fusion) if isinstance(part, nn.Linear)]
    learns, normed = len(linears) < len(learning(fusion)), config.norms.aux != "none"
    read = sum(part.in_features for part in linears) if normed or learns or autocast else 0
    first = config.hidden_size * ((not _keeps_read(config)) - (not learning(fusion) and not autocast))
    weighed = len(config.aux_layers) * config.target_hidden_size * (learns and normed)
    return (read + first) * (autocast or dtype).itemsize + weighed * dtype.itemsize


def _step_bytes(config: DrafterConfig, dtype: torch.dtype, autocast: torch.dtype | None) -> int:
    """Bytes per token that one unroll step keeps. A tensor that two operations keep counts once.

    * The feature, where it is another tensor than the output norm's input, H.
    * What each norm reads: middle of each layer; inputs of the layers after the first; output; H each. With query_key
      norms the unrotated queries, keys and values.
    * What each linear layer reads: the normed feature, H, and after a narrow entry the block's input; the blocks'
      inputs; the attention's output, hd; the normed middle, H. The gated product, I, is made again.
    * Rotated queries and keys and the values, hd + 2gd; gate and up, 2I.
    * In float32 a log-sum-exp per head, and cosine and sine, 2d.
    """
    H, heads, d = config.hidden_size, config.num_attention_heads, config.head_dim
    q, kv, layers, norms = heads * d, config.num_key_value_heads * d, config.num_layers, config.norms
    narrow = _is_narrow(config)
    normed = H * (_keeps_read(config) + layers + (layers - 1) + norms.output)
    normed += layers * (q + 2 * kv) * norms.query_key + H * norms.input
    linear = H * (norms.hidden + narrow) + (layers - 1) * H + layers * (q + H)
    other = layers * (q + 2 * kv + 2 * config.intermediate_size)
    return (normed + linear + other) * (autocast or dtype).itemsize + (layers * heads + 2 * d) * FLOAT32


def _read_bytes(config: DrafterConfig, dtype: torch.dtype, autocast: torch.dtype | None) -> int:
    """Bytes per token that reading the tokens keeps, once for all steps: the embedding, and its normed self."""
    return config.hidden_size * (1 + config.norms.embed) * (autocast or dtype).itemsize


def _is_narrow(config: DrafterConfig) -> bool:
    """Whether the entry projects the feature before the first block."""
    with torch.device("meta"):
        return isinstance(config.entry.build(config), NarrowEntry)


def _keeps_read(config: DrafterConfig) -> bool:
    """Whether the unroll keeps the state that the head reads: the next step reads it too."""
    return not (isinstance(config.recurrence, PreNorm) and config.norms.output)


def loss_buffers(
    config: DrafterConfig,
    B: int,
    T: int,
    K: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    piece_bytes: int,
    train_head: bool,
) -> int:
    """Bytes of the loss, which takes its gradient on the way; see :mod:`specdec.training.head_loss`.

    The states that the head reads, at every slot of every step, where the unroll does not keep them anyway, which it
    never does with the last step's; their gradients; the head's gradient. For one piece in the products' dtype: draft
    logits, their gradients by step and joined; in float32: the law, its logarithm and its logits; three more of a
    step's size while it is graded; a block of the target's logits and its exponentials.
    """
    D, states = config.draft_vocab_size, B * T * K * config.hidden_size * (autocast or dtype).itemsize
    positions = min(max(16, piece_bytes // (FLOAT32 * K * D)), B * T)
    each = 3 * K * D * (autocast or dtype).itemsize + (6 * D + 2 * min(config.vocab_size, BLOCK)) * FLOAT32
    kept = states // K if _keeps_read(config) else states
    return kept + states + train_head * D * config.hidden_size * dtype.itemsize + positions * each


def module_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(x.numel() * x.element_size() for x in (*module.parameters(), *module.buffers()))


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process could still take on ``device``; None where the system does not say.

    On a host the least of what the kernel calls available and what the control group leaves.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return host.free_memory() if device.type == "cpu" else None


def report(expected: Estimate, device: torch.device) -> None:
    """Log the estimate, and warn if ``device`` has less than the first step will ask for.

    Call it when drafter and target stand on the device.
    """
    log.info("estimated memory: %s", expected.describe())
    free = free_memory(device)
    if free is not None and free < expected.ahead:
        log.warning(
            "the first step will need about %s MB more on %s, which has %s MB free: "
            "lower data.batch_size, data.seq_len or model.ttt_steps",
            f"{expected.ahead / MB:,.0f}", device, f"{free / MB:,.0f}",
        )  # fmt: skip
