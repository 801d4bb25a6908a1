"""How queries meet keys, and where decoding keeps its keys and values.

Legend: B batch, h query heads, g key heads, T new nodes, S key slots, d head width; R rows and K keys of a piece.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.nn.view import Spans, Visibility

# queries of a head up to which plain products beat torch's kernels: in bfloat16 on a CPU many times over, and
FEW = 64
# on a GPU those that take a mask first copy the keys for every query head
PAIRS = 2048**2  # of nodes and keys in a sequence, up to which a mask of all is made
# pairs of a batch's pieces, up to which their masks are made once for all layers, a byte each
KEPT = 2**27
ROWS = 512  # nodes of a piece; a document as long is a piece by itself


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
    scores = (grouped @ k_BgSd.transpose(-1, -2)).view(B, g, h // g, T, -1) + bias_B1TS[:, :, None]
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(
        v_BgSd.dtype
    )
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
    """Where the keys begin and end that any of the nodes sees; None where none sees one."""
    sees_R = first_R <= last_R
    return (int(first_R[sees_R].min()), int(last_R[sees_R].max()) + 1) if sees_R.any() else None


class Pieces(NamedTuple):
    """A long visibility in pieces, handed on in place of its mask: no tensor of all pairs of nodes and keys is made.

    A document, or a prompt from its first token on, needs no mask at all: it is plain causal attention. What is left
    (windows, short documents, what is appended to a long prefix) goes by tiles of nodes, each with a mask of its keys.
    """

    spans: Spans
    pieces: list[AttentionPiece]

    @classmethod
    def of(cls, visibility: Visibility) -> Self | None:
        """What attention goes by where nodes are many, pairs too many, and keys in runs; never in a compiled graph."""
        if not isinstance(visibility, Spans) or torch.compiler.is_compiling():
            return None
        T = visibility.first_BT.shape[1]
        return cls.cut(visibility) if T > FEW and T * visibility.columns > PAIRS else None

    @classmethod
    def cut(cls, spans: Spans, causal: bool = True) -> Self:
        """Every node that sees a key is in one piece, and every key that it sees among the piece's.

        Args:
            causal: whether there may be causal pieces.
        """
        found = []
        device = spans.first_BT.device
        both = [spans] if spans.sinks is None else [spans, spans.sinks]
        # waits for a device here alone
        runs_RBT = [(one.first_BT.cpu(), one.last_BT.cpu()) for one in both]
        for b in range(len(spans.first_BT)):
            (first_T, last_T), *sinks = seen = [
                (first_BT[b], last_BT[b]) for first_BT, last_BT in runs_RBT
            ]
            T = len(first_T)
            goes_on_T = torch.zeros(T, dtype=torch.bool)  # sees one key more than the node before
            goes_on_T[1:] = (first_T[1:] == first_T[:-1]) & (last_T[1:] == last_T[:-1] + 1)
            whole_T = first_T == last_T  # of a first node: sees itself alone
            for first_sink_T, last_sink_T in sinks:
                whole_T &= (none_T := last_sink_T < first_sink_T)
                goes_on_T &= none_T
            starts = (~goes_on_T).nonzero()[:, 0]
            lengths = torch.cat([starts[1:], starts.new_tensor([T])]) - starts
            long = (lengths >= ROWS) & whole_T[starts] & causal
            done = 0
            for start, length in [
                *zip(starts[long].tolist(), lengths[long].tolist(), strict=True),
                (T, 0),
            ]:
                for a in range(done, start, ROWS):
                    rows = slice(a, min(a + ROWS, start))
                    if runs := [
                        run for one in seen if (run := _reach(*(x_T[rows] for x_T in one)))
                    ]:
                        keys: slice | Tensor = slice(*runs[0])
                        if len(runs) > 1:  # some nodes' sinks may lie in the run of others
                            keys = (
                                torch.cat([torch.arange(*run) for run in runs]).unique().to(device)
                            )
                        found.append(AttentionPiece(b, rows, keys, causal=False))
                if length:
                    first = int(first_T[start])
                    done = start + length
                    found.append(
                        AttentionPiece(
                            b, slice(start, done), slice(first, first + length), causal=True
                        )
                    )
        if sum(piece.pairs for piece in found) <= KEPT:
            found = [piece._replace(kept_11RK=piece.mask(spans)) for piece in found]
        return cls(spans, found)


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
        one = slice(piece.sequence, piece.sequence + 1)
        rows = piece.rows
        keys = piece.keys
        got = attend(
            q_BhTd[one, :, rows],
            k_BgSd[one, :, keys],
            v_BgSd[one, :, keys],
            piece.mask(pieces.spans),
        )
        out[one, :, rows] = got[..., :narrow]
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
        self.keys_BgSd, self.values_BgSd = (
            [
                torch.zeros(batch, heads, capacity, head_dim, dtype=dtype, device=device)
                for _ in range(layers)
            ]
            for _ in range(2)
        )

    def row(self, b: int) -> "StaticCache":
        """The cache of one sequence, in the same memory."""
        # without a slice: compiled code would copy the buffer at every write
        if len(self.keys_BgSd[0]) == 1:
            return self
        one = copy.copy(self)
        one.keys_BgSd = [x_BgSd[b : b + 1] for x_BgSd in self.keys_BgSd]
        one.values_BgSd = [x_BgSd[b : b + 1] for x_BgSd in self.values_BgSd]
        return one

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
        if q_BhTd.shape[2] > FEW or q_BhTd.requires_grad:
            return attend(q_BhTd, keys_BgSd, values_BgSd, visible)
        bias_B1TS = additive(visible.mask_B1TS, q_BhTd.dtype)
        return attend_few(q_BhTd, keys_BgSd, values_BgSd, bias_B1TS, q_BhTd.shape[-1] ** -0.5)
