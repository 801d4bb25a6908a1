"""What every system computes on: one set of weights and one batch, drawn from one seed in every process.

Needs torch alone, since it runs in the peers' environment too.

Legend: T tokens, H hidden, I feed-forward width, V vocabulary, D draft vocabulary, W width of queries, keys and values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MASKS = ("all", "half")


class Job(NamedTuple):
    """What a worker builds."""

    module: str  # of this package
    options: list[str]
    workload: str
    dtype: str  # float32, bfloat16 or float64
    mask: str
    threads: int
    seed: int
    device: str = "cpu"


class System(NamedTuple):
    """A trainer, ready for its first step."""

    step: Callable[[], Any]  # forward, backward, clipping, optimizer
    backward: Callable[
        [], Tensor
    ]  # forward and backward alone; the loss, as that trainer reduces it
    gradients: Callable[
        [], dict[str, Tensor]
    ]  # of what is trained, by the names of :func:`layer` without prefix
    losses: Callable[
        [], list[float]
    ]  # of the last step, by unroll step: cross entropy in nats per row that counts
    trainable: int  # parameters
    packages: tuple[str, ...]  # whose versions are recorded


class Workload(NamedTuple):
    """Sizes of a drafter and of its batch of one row."""

    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocab: int
    draft_vocab: int
    unroll: int = 7

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


WORKLOADS = {
    "T": Workload(64, 128, 4, 2, 256, 1000, 256),  # for tests, and for float64
    "S": Workload(512, 512, 8, 4, 1408, 32000, 8192),
    "M": Workload(1024, 1024, 16, 8, 2816, 32000, 16000),
    "1B": Workload(2048, 2048, 32, 8, 8192, 128256, 32000),  # for GPUs
    "8B": Workload(4096, 4096, 32, 8, 14336, 128256, 32000),
}


def llama_sizes(size: Workload) -> dict[str, Any]:
    """Arguments of transformers' ``LlamaConfig`` for one layer."""
    return {
        "hidden_size": size.hidden, "intermediate_size": size.feed_forward, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "vocab_size": size.vocab, "num_hidden_layers": 1,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    }  # fmt: skip


class Weights(NamedTuple):
    """The drafter's matrices and norm scales, and the target's head; float32. q, k, v read ``[embedding; feature]``."""

    embed_VH: Tensor
    fc_H3H: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate_IH: Tensor
    up_IH: Tensor
    down_HI: Tensor
    head_DH: Tensor
    embed_norm_H: Tensor
    feature_norm_H: Tensor
    middle_norm_H: Tensor
    output_norm_H: Tensor
    target_head_VH: Tensor


class Data(NamedTuple):
    """A text, and what a target says about it."""

    ids: Tensor  # (T + 1,) int64
    aux_T3H: Tensor  # three boundaries' states side by side
    last: Tensor  # (T + 1, H): the target's last state at each token before its final norm; its root mean square is 1
    final: Tensor  # the same after a final norm with one scale for all channels
    final_scale: float
    draft_ids_D: Tensor  # int64, ascending


def draw(size: Workload, seed: int) -> tuple[Weights, Data]:
    """Weights and data, the same in every process; on torch's default device."""
    device = torch.get_default_device()
    with torch.device("cpu"):  # whose numbers are the same everywhere
        drawn = _drawn(size, seed)
    weights, data = (
        type(one)(*(x.to(device) if isinstance(x, Tensor) else x for x in one)) for one in drawn
    )
    return weights, data  # type: ignore[return-value]


def _drawn(size: Workload, seed: int) -> tuple[Weights, Data]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    T, H, V, D, I = size.tokens, size.hidden, size.vocab, size.draft_vocab, size.feed_forward  # noqa: E741
    order_V = torch.randperm(V, generator=generator)
    draft_ids_D = order_V[:D].sort().values
    # away from one, so that a norm in a wrong place shows
    scales = [1 + normal(H, std=0.1) for _ in range(4)]
    embed_VH, target_head_VH = normal(V, H), normal(V, H)
    keys = size.kv_heads * size.head_dim
    weights = Weights(
        embed_VH,
        normal(H, 3 * H),
        *(normal(rows, 2 * H) for rows in (H, keys, keys)),
        normal(H, H),
        normal(I, H),
        normal(I, H),
        normal(H, I),
        target_head_VH[draft_ids_D] + normal(D, H, std=0.005),
        *scales,
        target_head_VH,
    )
    # tokens of the text that the draft vocabulary has
    known = torch.rand(T + 2, generator=generator) < 0.96
    inside = draft_ids_D[torch.randint(0, D, (T + 2,), generator=generator)]
    outside = order_V[D + torch.randint(0, V - D, (T + 2,), generator=generator)]
    text = torch.where(known, inside, outside)
    # its most likely next token is the text's
    last = target_head_VH[text[1:]] + normal(T + 1, H, std=0.006)
    last = last / last.pow(2).mean(-1, keepdim=True).sqrt()
    scale = 10 / (0.02 * H)  # that token's logit is about ten
    return weights, Data(
        text[:-1], normal(T, 3 * H, std=1.0), last, scale * last, scale, draft_ids_D
    )


def layer(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The drafter's layer, under the names that both peers have for it behind ``prefix``."""
    inside = {
        "input_layernorm": weights.embed_norm_H,
        "hidden_norm": weights.feature_norm_H,
        "post_attention_layernorm": weights.middle_norm_H,
        "self_attn.q_proj": weights.q,
        "self_attn.k_proj": weights.k,
        "self_attn.v_proj": weights.v,
        "self_attn.o_proj": weights.o,
        "mlp.gate_proj": weights.gate_IH,
        "mlp.up_proj": weights.up_IH,
        "mlp.down_proj": weights.down_HI,
    }
    return {f"{prefix}.{name}": value for name, value in inside.items()}


@torch.no_grad()
def fill(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy a value into every parameter, by its name without ``.weight``; none may lack one, none may be left over."""
    left = dict(values)
    for name, parameter in module.named_parameters():
        parameter.copy_(left.pop(name.removesuffix(".weight")))
    assert not left, sorted(left)


def gradients(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Of a peer's drafter, by the names that :func:`fill` takes, without the layer's prefix."""
    found = {
        name.removeprefix(f"{prefix}.").removesuffix(".weight"): p.grad
        for name, p in module.named_parameters()
    }
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def answers(size: Workload, mask: str) -> Tensor:
    """Which tokens are an answer's, (T,) bool: all, or the second half."""
    out_T = torch.ones(size.tokens, dtype=torch.bool)
    if mask == "half":
        out_T[: size.tokens // 2 - 1] = False  # one more than half: n + 1 tokens are n rows
    return out_T


def taught(size: Workload, mask: str) -> Tensor:
    """Positions j of the target that are learnt from, ascending: tokens j and j + 1 are an answer's, j at least 1.

    Step k of the unroll learns from them at slot ``j - 1 - k``, where there is one. All systems train exactly these
    rows: each gets the mask that means them by its own rule.
    """
    answer_T = answers(size, mask)
    at = (answer_T[:-1] & answer_T[1:]).nonzero()[:, 0]
    return at[at >= 1]


def slot_mask(size: Workload, mask: str) -> Tensor:
    """:func:`taught` as the peers have it, (T,) bool: slot ``j - 1`` of the first step learns from position j."""
    out_T = torch.zeros(size.tokens, dtype=torch.bool)
    out_T[taught(size, mask) - 1] = True
    return out_T


def per_step(size: Workload, values: Tensor, positions: Tensor) -> list[float]:
    """Sums over the rows of each unroll step of a value that belongs to the rows' positions."""
    return [float(values[positions >= 1 + k].double().sum()) for k in range(size.unroll)]


def over_positions(
    data: Data, weights: Weights, positions: Tensor, value: Callable[[Tensor], Tensor]
) -> Tensor:
    """``value`` of the target's logits over its whole vocabulary, a few positions at a time."""
    return torch.cat(
        [value(data.final[at] @ weights.target_head_VH.T) for at in positions.split(32)]
    )


def entropies(data: Data, weights: Weights, positions: Tensor) -> Tensor:
    """Entropy of the target's distribution over the draft vocabulary, in nats: what cross entropy has more than KL."""

    def entropy(logits: Tensor) -> Tensor:
        log_p = logits[:, data.draft_ids_D].log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    return over_positions(data, weights, positions, entropy)


def known(data: Data, weights: Weights, positions: Tensor) -> Tensor:
    """Whether the draft vocabulary has the target's most likely token, bool."""
    return torch.isin(
        over_positions(data, weights, positions, lambda logits: logits.argmax(-1)), data.draft_ids_D
    )
