"""The tensors that vLLM 0.32.0 has a place for, of a config, by name and shape."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from specdec.parity.reference.misread import Misread
from specdec.parity.reference.settings import Settings

EMBEDDING, HEAD, MAP = "embed_tokens.weight", "lm_head.weight", "d2t"


def compare(found: Mapping[str, Tensor], read: Settings) -> None:
    """Check that a file has all tensors of its config and no other.

    The engine itself does not miss a tensor: a norm stays at ones, a matrix is whatever lay in memory, and without
    ``d2t`` the draft tokens are the first of the vocabulary.

    Raises:
        Misread: one lacks, has another shape, is not known, or not all of it is numbers.
    """
    wanted, free = dict(_wanted(read)), dict(_free(read))
    for name, value in found.items():
        if name not in wanted | free:
            raise Misread(f"{name}: the engine has no such tensor for this config and fails")
        if tuple(value.shape) != (shape := (wanted | free)[name]):
            raise Misread(f"{name} is {list(value.shape)}, the config says {list(shape)}")
        if not bool(value.isfinite().all()):
            raise Misread(f"{name} holds NaN or infinities")
    for name in wanted:
        if name not in found:
            left = "at the first tokens" if name == MAP else "at ones" if "norm" in name else "uninitialised"
            raise Misread(f"it lacks {name}, which the engine leaves {left} without a word")


def _wanted(read: Settings) -> Iterator[tuple[str, tuple[int, ...]]]:
    H, n, fused = read.width, len(read.aux_ids), read.method == "eagle3"
    for i in range(read.layers):
        yield from _layer(read, f"layers.{i}.", 2 * H if fused and i == 0 else H)
        if i or fused:
            yield f"layers.{i}.input_layernorm.weight", (H,)
    yield "fc.weight", (H, n * read.target_width if fused else 2 * H)
    if not fused:
        return
    yield from (("layers.0.hidden_norm.weight", (H,)), ("norm.weight", (H,)))
    if read.fc_norm:
        yield from ((f"fc_norm.{index}.weight", (read.target_width,)) for index in range(n))
    if read.norm_before_fc:
        yield "input_norm.weight", (n * read.target_width,)
    if read.drafts != read.vocab:
        yield MAP, (read.drafts,)


def _layer(read: Settings, at: str, into: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    H, queries, keys = read.width, read.heads * read.head, read.groups * read.head
    for name, shape in {"q": (queries, into), "k": (keys, into), "v": (keys, into), "o": (H, queries)}.items():
        yield f"{at}self_attn.{name}_proj.weight", shape
        if read.biases:
            yield f"{at}self_attn.{name}_proj.bias", shape[:1]
    if read.head_norms:
        yield from ((f"{at}self_attn.{name}_norm.weight", (read.head,)) for name in "qk")
    for name, shape in {"gate": (read.inner, H), "up": (read.inner, H), "down": (H, read.inner)}.items():
        yield f"{at}mlp.{name}_proj.weight", shape
    yield f"{at}post_attention_layernorm.weight", (H,)


def _free(read: Settings) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What may be there and need not: the target's stand in for it, or nothing reads it."""
    yield EMBEDDING, (read.vocab, read.width)
    if read.method == "eagle3":
        yield HEAD, (read.drafts, read.width)
        yield from ((f"layers.{i}.hidden_norm.weight", (read.width,)) for i in range(1, read.layers))
