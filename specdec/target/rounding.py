"""What a model differs from itself by when it runs in another way: the measure of whatever should equal it.

Kernels differ in rounding, and layers make more of it; by how much depends on model and dtype. Of massive activations
(https://arxiv.org/abs/2402.17762) the last layers leave small differences of large numbers, so the median over tokens
counts: such tokens are few.

Legend: B batch, T tokens, H hidden, L layers, V vocabulary. "States" are L + 3 tensors (B, T, ...): boundaries 0 to L,
the last one after the final norm, and the logits.
"""

import logging
from collections.abc import Callable, Iterator
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
TIMES = 4  # what is allowed, in what the model differs from itself by
# of float32, in which norms and softmax run in most families, whatever the model's dtype
SUMS = 2e-5
# a model that differs more from itself proves nothing in that dtype, or is broken in one of its own ways
MOST = {torch.float64: 1e-3, torch.float32: 1e-2, torch.float16: 0.3, torch.bfloat16: 0.3}
MOST[torch.float8_e4m3fn] = 0.3  # in which states may be stored
# of other people's models
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError)


class Own(NamedTuple):
    """The model's own states on a short text, and what may differ from them."""

    states: list[Tensor]
    spread: list[
        float
    ]  # for each state, what the model differs from itself by: median over tokens of :func:`apart`
    most: float
    sure_T: Tensor  # bool, where its most likely token leads by more than rounding takes
    why: str  # where ``spread`` comes from

    @property
    def allowed(self) -> list[float]:
        """Of what should equal the states."""
        return [min(TIMES * s, self.most) for s in self.spread]


def short_text(target: "Target") -> Tensor:
    """Some token ids, (1, T)."""
    return (torch.arange(LENGTH, device=target.device) * 7919 + 3)[
        None
    ] % target.embedding_weight().shape[0]


def apart(ours_TH: Tensor, own_TH: Tensor) -> Tensor:
    """|difference| / |value| of each token, in float64."""
    ours = ours_TH.to(own_TH.device).double()
    own = own_TH.double()
    return (ours - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-12)


def run_itself(target: "Target", ids_BT: Tensor, **more: Any) -> tuple[list[Tensor], Any]:
    """One forward of the model itself, to which the tape only listens: its states, and what it returned."""
    boundaries = range(target.num_layers + 1)
    with target._tape.running((), boundaries) as h:
        out = target.model(
            input_ids=ids_BT, **{"output_hidden_states": True, "use_cache": False, **more}
        )
    if out.hidden_states is None or len(out.hidden_states) != len(boundaries):
        raise ValueError(
            f"{target.source}: the model does not report its {len(boundaries)} hidden states"
        )
    return [
        x.to(ids_BT.device)
        for x in (*(h[b] for b in boundaries), out.hidden_states[-1], out.logits)
    ], out


def in_pieces(target: "Target", ids_1T: Tensor, sizes: int | list[int]) -> list[Tensor]:
    """The model's own states on a text, of which it runs pieces of these sizes one after the other, with its cache."""
    parts = []
    cache = None
    for piece in ids_1T.split(sizes, 1):
        states, out = run_itself(target, piece, use_cache=True, past_key_values=cache)
        parts.append(states)
        cache = out.past_key_values
    return [torch.cat(part, 1) for part in zip(*parts, strict=True)]


@torch.no_grad()
def moved_logits(target: "Target", ids_1T: Tensor) -> Tensor:
    """By how much the model itself moves the logits of a text when it runs token by token with its cache: (T,) float64,
    each token's greatest difference."""
    ids_1T = ids_1T.to(target.device)
    whole_1TV = run_itself(target, ids_1T)[0][-1]
    stepped_1TV = in_pieces(target, ids_1T, 1)[-1]
    return (stepped_1TV[0].double() - whole_1TV[0].double()).abs().amax(-1)


@torch.no_grad()
def own_states(target: "Target", kept: torch.dtype | None = None) -> Own:
    """Run the model on a short text, and again in other ways.

    Args:
        kept: the dtype that what is held against its states was stored in, if any.
    """
    ids_1T = short_text(target)
    dtypes = (target.dtype, kept or target.dtype)
    states, _ = run_itself(target, ids_1T)
    unit = max(SUMS, *(torch.finfo(dtype).eps for dtype in dtypes))
    spread = [unit] * len(states)
    logits_TV = states[-1][0].double()
    ways = []
    jitter_T = unit * logits_TV.abs().amax(-1)
    for way, others in _other_ways(target, ids_1T):
        ways.append(way)
        spread = [
            max(s, float(apart(x, y).median()))
            for s, x, y in zip(spread, others, states, strict=True)
        ]
        jitter_T = jitter_T.maximum((others[-1][0].double() - logits_TV).abs().amax(-1))
    most = max(MOST[dtype] for dtype in dtypes)
    first_T2 = logits_TV.topk(2).values
    sure_T = first_T2[:, 0] - first_T2[:, 1] > 2 * TIMES * jitter_T
    by = (
        f"what the model differs from itself by ({', '.join(ways)})"
        if ways
        else "rounding: it runs in no other way"
    )
    return Own(states, spread, most, sure_T, f"{by} in {str(target.dtype).removeprefix('torch.')}")


def _other_ways(target: "Target", ids_1T: Tensor) -> Iterator[tuple[str, list[Tensor]]]:
    """The model's states on the same text, run in other ways; one that its family does not know is left out."""
    theirs = target.config._attn_implementation

    def eager() -> list[Tensor]:
        target.model.set_attn_implementation("eager")
        try:
            return run_itself(target, ids_1T)[0]
        finally:
            target.model.set_attn_implementation(theirs)

    def padded() -> list[Tensor]:
        more_13 = ids_1T[:, :3]
        backwards_1T = ids_1T.flip(1)
        ids_2S = torch.cat([torch.cat([more_13, ids_1T], 1), torch.cat([backwards_1T, more_13], 1)])
        seen_2S = torch.ones_like(ids_2S)
        seen_2S[0, :3] = 0
        positions_2S = (seen_2S.cumsum(1) - 1).clamp_min(0)
        return [
            x[:1, 3:]
            for x in run_itself(target, ids_2S, attention_mask=seen_2S, position_ids=positions_2S)[
                0
            ]
        ]

    def cached() -> list[Tensor]:
        return in_pieces(target, ids_1T, [PREFIX, 1, 1, LENGTH - PREFIX - 2])

    ways: dict[str, Callable[[], list[Tensor]]] = {
        "padded in a batch": padded,
        "in pieces with its cache": cached,
    }
    if theirs == OURS:  # sdpa; a model that runs with eager attention may have no other
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
