"""How queries meet keys, and where decoding keeps its keys and values.

Legend: B batch, h query heads, g key heads, T new nodes, S key slots, d head width; R rows and K keys of a piece.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.nn.backend import wide
from specdec.nn.view import Spans, Visibility

# Up to so many queries of a head, plain products beat torch's kernels: in bfloat16 on a CPU many times over; on a GPU,
# kernels that take a mask copy the keys for every query head first.
FEW_QUERIES = 64
# Up to so many pairs of nodes and keys in a sequence, one mask of all is made.
MAX_MASK_PAIRS = 2048**2
# Up to so many pairs in a batch's pieces, a byte each, their masks are made once for all layers.
MAX_KEPT_MASK_PAIRS = 2**27
# Nodes of a piece; a document as long is a piece by itself.
PIECE_NODES = 512


def additive(allowed_B1TS: Tensor, dtype: torch.dtype) -> Tensor:
    """Zero where the mask allows, the least finite number elsewhere: -inf would make NaN of a row without keys."""
    return torch.zeros_like(allowed_B1TS, dtype=dtype).masked_fill(
        ~allowed_B1TS, torch.finfo(dtype).min
    )


def attend_few(
    q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, bias_B1TS: Tensor, scale: float
) -> Tensor:
    """Scaled dot-product attention by plain products, (B, h, T, d); values may be narrower than keys.

    The bias, as :func:`additive` makes it, is added to the scaled products.
    """
    B, h, T, d = q_BhTd.shape
    g = k_BgSd.shape[1]
    # the heads of a group share their keys' pass
    grouped = (q_BhTd * scale).reshape(B, g, h // g * T, d)
    products = grouped @ k_BgSd.transpose(-1, -2)
    scores = products.view(B, g, h // g, T, -1) + bias_B1TS[:, :, None]
    weights = scores.softmax(-1, dtype=wide(scores.dtype)).to(v_BgSd.dtype)
    return (weights.flatten(2, 3) @ v_BgSd).reshape(B, h, T, -1)


def attend(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, visibility: Visibility) -> Tensor:
    """Scaled dot-product attention to the visible keys, (B, h, T, d); grouped query heads."""
    if (pieces := Pieces.of(visibility)) is not None:
        return attend_pieces(_sdpa, q_BhTd, k_BgSd, v_BgSd, pieces)
    return _sdpa(q_BhTd, k_BgSd, v_BgSd, visibility.mask_B1TS)


def _sdpa(q_BhTd: Tensor, k_BgSd: Tensor, v_BgSd: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q_BhTd, k_BgSd, v_BgSd, attn_mask=mask_B1TS, is_causal=mask_B1TS is None, enable_gqa=True
    )


class AttentionPiece(NamedTuple):
    """Some nodes of one sequence, and the keys that any of them sees."""

    sequence: int
    rows: slice
    keys: slice | Tensor  # int64 (K,) where sinks are among them
    causal: bool  # node i sees exactly the first i + 1 of the keys, which are as many as the nodes
    kept_11RK: Tensor | None = None  # its mask, where that is made once for all layers

    def mask(self, spans: Spans) -> Tensor | None:
        """bool (1, 1, R, K); None where it is causal."""
        if self.causal or self.kept_11RK is not None:
            return self.kept_11RK
        return spans.part(self.rows, self.keys, slice(self.sequence, self.sequence + 1))

    @property
    def pairs(self) -> int:
        """Elements of its mask."""
        keys = self.keys.stop - self.keys.start if isinstance(self.keys, slice) else len(self.keys)
        return 0 if self.causal else (self.rows.stop - self.rows.start) * keys


def _reach(first_R: Tensor, last_R: Tensor) -> tuple[int, int] | None:
    """Return the first key that any of the nodes sees and the end of the last; None if no node sees a key."""
    sees_R = first_R <= last_R
    if not sees_R.any():
        return None
    return int(first_R[sees_R].min()), int(last_R[sees_R].max()) + 1


class Pieces(NamedTuple):
    """A long visibility in pieces, handed on in place of its mask: no tensor of all pairs of nodes and keys is made.

    A document, or a prompt from its first token on, needs no mask at all: it is plain causal attention. What is left
    (windows, short documents, what is appended to a long prefix) goes by tiles of nodes, each with a mask of its keys.
    """

    spans: Spans
    pieces: list[AttentionPiece]

    @classmethod
    def of(cls, visibility: Visibility) -> Self | None:
        """Return pieces where attention needs them: many nodes, too many pairs, keys in runs, no compiled graph."""
        if not isinstance(visibility, Spans) or torch.compiler.is_compiling():
            return None
        T = visibility.first_BT.shape[1]
        return (
            cls.cut(visibility)
            if T > FEW_QUERIES and T * visibility.columns > MAX_MASK_PAIRS
            else None
        )

    @classmethod
    def cut(cls, spans: Spans, causal: bool = True) -> Self:
        """Return pieces such that every node that sees a key is in one, with all keys that it sees.

        Args:
            causal: whether there may be causal pieces.
        """
        pieces: list[AttentionPiece] = []
        # The only wait for a device.
        runs = [spans] if spans.sinks is None else [spans, spans.sinks]
        runs_RBT = [(run.first_BT.cpu(), run.last_BT.cpu()) for run in runs]
        T = spans.first_BT.shape[1]
        for b in range(len(spans.first_BT)):
            seen = [(first_BT[b], last_BT[b]) for first_BT, last_BT in runs_RBT]
            documents = _causal_documents(seen) if causal else []
            done = 0
            for document in [*documents, _CausalDocument(T, T, 0)]:
                for start in range(done, document.start, PIECE_NODES):
                    rows = slice(start, min(start + PIECE_NODES, document.start))
                    keys = _keys_seen([(x[rows], y[rows]) for x, y in seen], spans.first_BT.device)
                    if keys is not None:
                        pieces.append(AttentionPiece(b, rows, keys, causal=False))
                if document.start < document.end:
                    rows = slice(document.start, document.end)
                    length = document.end - document.start
                    keys = slice(document.first_key, document.first_key + length)
                    pieces.append(AttentionPiece(b, rows, keys, causal=True))
                done = document.end
        if sum(piece.pairs for piece in pieces) <= MAX_KEPT_MASK_PAIRS:
            pieces = [piece._replace(kept_11RK=piece.mask(spans)) for piece in pieces]
        return cls(spans, pieces)


class _CausalDocument(NamedTuple):
    """Nodes ``start`` to ``end - 1``, of which each sees one key more than the one before, from ``first_key`` on."""

    start: int
    end: int
    first_key: int


def _causal_documents(seen: list[tuple[Tensor, Tensor]]) -> list[_CausalDocument]:
    """Return the documents of one sequence that are long enough for plain causal attention.

    Args:
        seen: the first and last key that each node sees, (T,) each; and likewise of its sinks, where there are any.
    """
    (first_T, last_T), *sinks = seen
    T = len(first_T)
    continues_T = torch.zeros(T, dtype=torch.bool)  # sees one key more than the node before
    same_first = first_T[1:] == first_T[:-1]
    next_last = last_T[1:] == last_T[:-1] + 1
    continues_T[1:] = same_first & next_last
    sees_itself_T = first_T == last_T  # as the first node of a document does
    for first_sink_T, last_sink_T in sinks:
        without_sinks_T = last_sink_T < first_sink_T
        sees_itself_T &= without_sinks_T
        continues_T &= without_sinks_T
    starts = (~continues_T).nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([T])])
    is_long = (ends - starts >= PIECE_NODES) & sees_itself_T[starts]
    return [
        _CausalDocument(start, end, int(first_T[start]))
        for start, end in zip(starts[is_long].tolist(), ends[is_long].tolist(), strict=True)
    ]


def _keys_seen(seen: list[tuple[Tensor, Tensor]], device: torch.device) -> slice | Tensor | None:
    """Return the keys that any of some nodes sees: a run, or int64 (K,) with their sinks; None if there is none."""
    runs = [run for first_R, last_R in seen if (run := _reach(first_R, last_R))]
    if not runs:
        return None
    if len(runs) == 1:
        return slice(*runs[0])
    # Some nodes' sinks may lie in the run of others.
    return torch.cat([torch.arange(*run) for run in runs]).unique().to(device)


def attend_pieces(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    q_BhTd: Tensor,
    k_BgSd: Tensor,
    v_BgSd: Tensor,
    pieces: Pieces,
) -> Tensor:
    """Attention to the visible keys, (B, h, T, d); zero for a node that sees nothing.

    Args:
        attend: of one piece: queries, keys, values, and a boolean mask, or None for causal attention.
    """
    d = q_BhTd.shape[-1]
    narrow = v_BgSd.shape[-1]
    if narrow < d:  # the kernels that make no weights of all pairs want one width
        v_BgSd = F.pad(v_BgSd, (0, d - narrow))
    out = q_BhTd.new_zeros(*q_BhTd.shape[:3], narrow)
    for piece in pieces.pieces:
        sequence = slice(piece.sequence, piece.sequence + 1)
        rows = piece.rows
        keys = piece.keys
        got = attend(
            q_BhTd[sequence, :, rows],
            k_BgSd[sequence, :, keys],
            v_BgSd[sequence, :, keys],
            piece.mask(pieces.spans),
        )
        out[sequence, :, rows] = got[..., :narrow]
    return out


def write(buffer_BgSd: Tensor, new_BgTd: Tensor, slots_BT: Tensor) -> None:
    """Put new keys or values into their slots, in place: in compiled code too, which would copy all for a scatter."""
    sequences_B, heads_g = (
        torch.arange(size, device=buffer_BgSd.device) for size in buffer_BgSd.shape[:2]
    )
    buffer_BgSd.index_put_(
        (sequences_B[:, None, None], heads_g[:, None], slots_BT[:, None]), new_BgTd
    )


class StaticCache:
    """Fixed slots, written in place: the cache of decoding.

    ``keys_BgSd`` and ``values_BgSd`` hold a tensor for each attention layer, of ``capacity`` slots.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch: int = 1,
    ) -> None:
        self.capacity = capacity
        # a tensor for each layer: compiled code would copy a common one whole at every write
        shape = (batch, heads, capacity, head_dim)
        self.keys_BgSd = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values_BgSd = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def row(self, b: int) -> "StaticCache":
        """The cache of one sequence, in the same memory."""
        # without a slice: compiled code would copy the buffer at every write
        if len(self.keys_BgSd[0]) == 1:
            return self
        sequence = copy.copy(self)
        sequence.keys_BgSd = [x_BgSd[b : b + 1] for x_BgSd in self.keys_BgSd]
        sequence.values_BgSd = [x_BgSd[b : b + 1] for x_BgSd in self.values_BgSd]
        return sequence

    def attend(
        self,
        layer: int,
        q_BhTd: Tensor,
        k_BgTd: Tensor,
        v_BgTd: Tensor,
        visible: Visibility,
        slots_BT: Tensor | None,
    ) -> Tensor:
        """Write the new keys into ``slots_BT`` and attend to every visible slot."""
        assert slots_BT is not None, "a static cache needs slots: make the view with View.append"
        write(self.keys_BgSd[layer], k_BgTd, slots_BT)
        write(self.values_BgSd[layer], v_BgTd, slots_BT)
        columns = visible.columns
        keys_BgSd, values_BgSd = (
            x[layer].narrow(2, 0, columns) for x in (self.keys_BgSd, self.values_BgSd)
        )
        if q_BhTd.shape[2] > FEW_QUERIES or q_BhTd.requires_grad:
            return attend(q_BhTd, keys_BgSd, values_BgSd, visible)
        bias_B1TS = additive(visible.mask_B1TS, q_BhTd.dtype)
        return attend_few(q_BhTd, keys_BgSd, values_BgSd, bias_B1TS, q_BhTd.shape[-1] ** -0.5)
