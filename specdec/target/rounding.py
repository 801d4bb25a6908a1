"""What a model differs from itself by when it runs in another way: the measure of whatever should equal it.

Kernels differ in rounding, and layers make more of it; by how much depends on model and dtype. Of massive activations
(https://arxiv.org/abs/2402.17762) the last layers leave small differences of large numbers, so the median over tokens
counts: such tokens are few.

Legend: B batch, T tokens, H hidden, L layers, V vocabulary. "States" are L + 3 tensors (B, T, ...): boundaries 0 to L,
the last one after the final norm, and the logits.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specdec.target.model_parts import OURS

if TYPE_CHECKING:
    from specdec.target.target import Target

log = logging.getLogger(__name__)

# tokens of a short text, and of its first part
LENGTH = 32
PREFIX = 17
TOLERANCE_FACTOR = 4  # what is allowed, in what the model differs from itself by
# of float32, in which norms and softmax run in most families, whatever the model's dtype
SUMS = 2e-5
# a model that differs more from itself proves nothing in that dtype, or is broken in one of its own ways
MOST = {torch.float64: 1e-3, torch.float32: 1e-2, torch.float16: 0.3, torch.bfloat16: 0.3}
MOST[torch.float8_e4m3fn] = 0.3  # in which states may be stored
# of other people's models
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError)


class ReferenceStates(NamedTuple):
    """The model's own states on a short text, and what may differ from them."""

    states: list[Tensor]
    # for each state, what the model differs from itself by: see :func:`median_error`
    spread: list[float]
    most: float
    sure_T: Tensor  # bool, where its most likely token leads by more than rounding takes
    why: str  # where ``spread`` comes from

    @property
    def allowed(self) -> list[float]:
        """The median error that is allowed of what should equal each state."""
        return [min(TOLERANCE_FACTOR * error, self.most) for error in self.spread]


class BoundaryError(NamedTuple):
    """How far states are from the boundary that they are said to be of, and from the nearest other one."""

    error: float
    nearest: int
    nearest_error: float  # infinite if they were held against no other

    @property
    def is_of_another(self) -> bool:
        """Whether the states are those of the other boundary."""
        return self.nearest_error < self.error / 2

    def fits(self, allowed: float) -> bool:
        """Whether the states are the boundary's own."""
        return self.error <= allowed and not self.is_of_another


def short_text(target: "Target") -> Tensor:
    """Return some token ids, (1, T)."""
    ids_T = torch.arange(LENGTH, device=target.device) * 7919 + 3
    return ids_T[None] % target.embedding_weight().shape[0]


def relative_error(ours_TH: Tensor, own_TH: Tensor) -> Tensor:
    """Return |difference| / |value| of each token, (T,) float64."""
    ours = ours_TH.to(own_TH.device).double()
    expected = own_TH.double()
    return (ours - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-12)


def median_error(ours_TH: Tensor, own_TH: Tensor) -> float:
    """Return the median over tokens of :func:`relative_error`."""
    return float(relative_error(ours_TH, own_TH).median())


def compare_boundary(
    boundary: int, states: Sequence[Tensor], own: Mapping[int, Sequence[Tensor]]
) -> BoundaryError:
    """Hold states against the model's own at the boundary that they are said to be of, and at others.

    Args:
        boundary: which it is.
        states: of each text, (T, H).
        own: by boundary, the model's own states of the same texts.

    Returns:
        The median errors, each of the text where it is largest.
    """
    errors = {}
    for other, own_states in own.items():
        pairs = zip(states, own_states, strict=True)
        errors[other] = max(median_error(ours_TH, own_TH) for ours_TH, own_TH in pairs)
    error = errors.pop(boundary)
    nearest = min(errors, key=errors.__getitem__, default=boundary)
    return BoundaryError(error, nearest, errors.get(nearest, math.inf))


def run_itself(target: "Target", ids_BT: Tensor, **options: Any) -> tuple[list[Tensor], Any]:
    """Run the model itself once, while the tape only listens; return its states, and what it returned."""
    boundaries = range(target.num_layers + 1)
    options = {"output_hidden_states": True, "use_cache": False, **options}
    with target._tape.running((), boundaries) as h:
        out = target.model(input_ids=ids_BT, **options)
    if out.hidden_states is None or len(out.hidden_states) != len(boundaries):
        raise ValueError(
            f"{target.source}: the model does not report its {len(boundaries)} hidden states"
        )
    states = (*(h[b] for b in boundaries), out.hidden_states[-1], out.logits)
    return [state.to(ids_BT.device) for state in states], out


def in_pieces(target: "Target", ids_1T: Tensor, sizes: int | list[int]) -> list[Tensor]:
    """Return the model's own states on a text, which it runs in pieces of these sizes, one after the other, with its
    cache."""
    parts = []
    cache = {target._parts.cache_argument: None}
    for piece in ids_1T.split(sizes, 1):
        states, out = run_itself(target, piece, use_cache=True, **cache)
        parts.append(states)
        cache = {name: out[name] for name in cache}
    return [torch.cat(part, 1) for part in zip(*parts, strict=True)]


@torch.no_grad()
def moved_logits(target: "Target", ids_1T: Tensor) -> Tensor:
    """Return by how much the model itself moves the logits of a text when it runs token by token with its cache: each
    token's greatest difference, (T,) float64."""
    ids_1T = ids_1T.to(target.device)
    whole_1TV = run_itself(target, ids_1T)[0][-1]
    stepped_1TV = in_pieces(target, ids_1T, 1)[-1]
    return (stepped_1TV[0].double() - whole_1TV[0].double()).abs().amax(-1)


@torch.no_grad()
def own_states(target: "Target", stored: torch.dtype | None = None) -> ReferenceStates:
    """Run the model on a short text, and again in other ways.

    Args:
        target: the target.
        stored: the dtype in which the compared states were stored, if any.
    """
    ids_1T = short_text(target)
    dtypes = (target.dtype, stored or target.dtype)
    states, _ = run_itself(target, ids_1T)
    unit = max(SUMS, *(torch.finfo(dtype).eps for dtype in dtypes))
    spread = [unit] * len(states)
    logits_TV = states[-1][0].double()
    ways = []
    jitter_T = unit * logits_TV.abs().amax(-1)
    for way, others in _other_ways(target, ids_1T):
        ways.append(way)
        errors = map(median_error, others, states)
        # in this order an error that is NaN, of padding in some families, does not count
        spread = [max(known, error) for known, error in zip(spread, errors, strict=True)]
        jitter_T = jitter_T.maximum((others[-1][0].double() - logits_TV).abs().amax(-1))
    most = max(MOST[dtype] for dtype in dtypes)
    first_T2 = logits_TV.topk(2).values
    sure_T = first_T2[:, 0] - first_T2[:, 1] > 2 * TOLERANCE_FACTOR * jitter_T
    why = "rounding: it runs in no other way"
    if ways:
        why = f"what the model differs from itself by ({', '.join(ways)})"
    why += f" in {str(target.dtype).removeprefix('torch.')}"
    return ReferenceStates(states, spread, most, sure_T, why)


def _other_ways(target: "Target", ids_1T: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the model's states on the same text, run in other ways; one that its family does not know is left out."""
    attention = target.config._attn_implementation

    def eager() -> list[Tensor]:
        target.model.set_attn_implementation("eager")
        try:
            return run_itself(target, ids_1T)[0]
        finally:
            target.model.set_attn_implementation(attention)

    def padded() -> list[Tensor]:
        more_13 = ids_1T[:, :3]
        backwards_1T = ids_1T.flip(1)
        ids_2S = torch.cat([torch.cat([more_13, ids_1T], 1), torch.cat([backwards_1T, more_13], 1)])
        seen_2S = torch.ones_like(ids_2S)
        seen_2S[0, :3] = 0
        positions_2S = (seen_2S.cumsum(1) - 1).clamp_min(0)
        states, _ = run_itself(target, ids_2S, attention_mask=seen_2S, position_ids=positions_2S)
        return [state_2S[:1, 3:] for state_2S in states]

    def cached() -> list[Tensor]:
        return in_pieces(target, ids_1T, [PREFIX, 1, 1, LENGTH - PREFIX - 2])

    ways: dict[str, Callable[[], list[Tensor]]] = {
        "padded in a batch": padded,
        "in pieces with its cache": cached,
    }
    if target.recurrent:  # which has another form for a single token, and verifies with it
        ways["token by token"] = lambda: in_pieces(target, ids_1T, 1)
    if attention == OURS:  # sdpa; a model that runs with eager attention may have no other
        ways = {"with eager attention": eager, **ways}
    for name, way in ways.items():
        try:
            states = way()
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            log.debug("%s does not run %s: %s", target.source, name, error)
        else:
            yield name, states
