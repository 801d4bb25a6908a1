"""Before anything is trained on a target, it proves that its features and its verification are the model's own.

What no layer lies between is equal except for the order of a sum. What other kernels make of the same text differs from
the model's own states by no more than the model does itself (:mod:`specdec.target.rounding`), boundary by boundary: a
token that sees too much, too little or from elsewhere shows after the first layer, where rounding has not grown yet.

Legend: T tokens, L layers, V vocabulary, D some rows of it, Q tree nodes, P path nodes; states as in ``rounding``.
"""

import math
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.nn.view import View
from specdec.target.rounding import (
    FAILURES,
    LENGTH,
    PREFIX,
    TOLERANCE_FACTOR,
    ReferenceStates,
    compare_boundary,
    own_states,
    relative_error,
    run_itself,
    short_text,
)

if TYPE_CHECKING:
    from specdec.target.attention import TargetCache
    from specdec.target.target import Target

DEPTH = 6
WINDOW = 4
# allowed over all boundaries, by geometric mean, in what the model differs from itself by
MEAN_TOLERANCE = 2


@torch.no_grad()
def prove(target: "Target") -> None:
    """See :meth:`specdec.target.target.Target.prove`."""
    config = target.config
    window = getattr(config, "sliding_window", None)
    if window is not None:  # a short text reaches beyond it, the model's own masks included
        config.sliding_window = min(window, WINDOW)
    ids_1T = short_text(target)
    try:
        _check_parts(target, ids_1T)
        expected = own_states(target)
        ours = _ours(target, ids_1T, View.packed(torch.zeros_like(ids_1T)))
        _check_close(target, "a plain text", ours, expected, slice(None))
        _check_packed(target, ids_1T, expected)
        check = _check_chains if target.recurrent else _check_cached
        check(target, ids_1T, expected)
    except (torch.OutOfMemoryError, ValueError):
        raise
    except FAILURES as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{target.source}: {type(target.model).__name__} fails on a short text: {reason}"
        ) from error
    finally:
        if window is not None:
            config.sliding_window = window


def _check_parts(target: "Target", ids_1T: Tensor) -> None:
    """Taps, final norm and head, fed with what the model itself makes."""
    states, out = run_itself(target, ids_1T)
    for name, values in zip(_names(target), states, strict=True):
        if not values.isfinite().all():  # else no comparison says anything
            bad = float(values[~values.isfinite()][0])
            raise ValueError(f"{target.source}: {bad} in {name}, on a short text: {remedy(target)}")
    *hidden, last_1TH = out.hidden_states
    for name, state_1TH, own_1TH in zip(_names(target), states, hidden, strict=False):
        _check_exact(target, name, state_1TH, own_1TH)
    L = target.num_layers
    _check_exact(
        target,
        f"the final norm of the state at boundary {L}",
        target.final_norm(states[L]),
        last_1TH,
    )
    _check_exact(target, "the logits", target.logits(last_1TH), out.logits)
    rows_D = torch.arange(0, target.vocab_size, 3, device=target.device)
    _check_exact(
        target, "the logits of some rows", target.logits(last_1TH, rows_D), out.logits[..., rows_D]
    )


def remedy(target: "Target") -> str:
    """Return why a target yields NaN or infinities, and what to do."""
    dtype = str(target.dtype).removeprefix("torch.")
    bad = None
    for name, weight in target.model.named_parameters():
        if not weight.is_meta and not weight.isfinite().all():
            bad = name
            break
    cause = f"its weight {bad} is not finite in {dtype}" if bad else f"{dtype} overflows in it"
    if target.dtype in (torch.float16, torch.bfloat16):
        others = "bfloat16 or float32" if target.dtype == torch.float16 else "float32"
        return f"{cause}; load it in {others} (model.target.dtype)"
    return f"{cause}; check the checkpoint, or download it again"


@torch.no_grad()
def check_weights_finite(target: "Target") -> None:
    """Refuse a target with a weight that is NaN or infinite, which a short text need not meet; reads each weight once.

    Raises:
        ValueError: the weight's name, and what to do.
    """
    for weight in target.model.parameters():
        if (
            not weight.is_floating_point()
            or weight.element_size() == 1
            or weight.is_meta
            or not weight.numel()
        ):
            continue
        # one pass without a copy; of NaN both are NaN
        if not torch.stack(torch.aminmax(weight)).isfinite().all():
            raise ValueError(f"{target.source}: {remedy(target)}")


def _check_packed(target: "Target", ids_1T: Tensor, own: ReferenceStates) -> None:
    """Two documents in one row do not see each other."""
    document_1T = (torch.arange(LENGTH, device=target.device) >= PREFIX).long()[None]
    ours = _ours(target, ids_1T, View.packed(document_1T))
    alone, _ = run_itself(target, ids_1T[:, PREFIX:])
    _check_close(
        target, "packing, the first document", [x[:, :PREFIX] for x in ours], own, slice(PREFIX)
    )
    second = own._replace(states=alone, sure_T=torch.zeros_like(own.sure_T[PREFIX:]))
    _check_close(
        target, "packing, the second document", [x[:, PREFIX:] for x in ours], second, slice(None)
    )


def _check_cached(target: "Target", ids_1T: Tensor, own: ReferenceStates) -> None:
    """Prefill, verify a tree whose true path is its even nodes, commit that path, continue."""
    cache = target.new_cache(LENGTH + 2 * DEPTH)
    device = target.device

    def chain(first: int, last: int) -> list[Tensor]:
        view = View.chain(torch.tensor(first, device=device), last - first, cache.capacity, cache)
        return _ours(target, ids_1T[:, first:last], view)

    _check_close(target, "prefill in the cache", chain(0, PREFIX), own, slice(PREFIX))
    _check_tree(target, ids_1T, own, cache)
    accepted = PREFIX + DEPTH
    pieces = zip(chain(accepted, accepted + 1), chain(accepted + 1, LENGTH), strict=True)
    after = [torch.cat(states, 1) for states in pieces]
    _check_close(target, "continuing after a commit", after, own, slice(accepted, None))


def _check_chains(target: "Target", ids_1T: Tensor, own: ReferenceStates) -> None:
    """Of two sequences side by side: prefill, one of them after another text; verify chains of which each keeps another
    number; continue with a token, and with more than can be taken back."""
    cache = target.new_cache(LENGTH, 2, DEPTH)
    decoys_1T = (ids_1T + 1) % target.vocab_size

    def begin(b: int, prompt_1T: Tensor) -> list[Tensor]:
        zero = torch.tensor(0, device=target.device)
        with cache.begin(b) as text:
            return _ours(target, prompt_1T, View.chain(zero, prompt_1T.shape[1], LENGTH, text))

    def read(first_B: list[int], count: int, true_B: list[int]) -> list[list[Tensor]]:
        """Read ``count`` tokens, decoys after the true ones; returns the true ones' states of each text."""
        true = list(zip(first_B, true_B, strict=True))
        rows = [
            torch.cat([ids_1T[:, first : first + n], decoys_1T[:, first + n : first + count]], 1)
            for first, n in true
        ]
        view = View.chain(torch.tensor(first_B, device=target.device), count, LENGTH, cache)
        ours = _ours(target, torch.cat(rows), view)
        return [[state[b : b + 1, :n] for state in ours] for b, n in enumerate(true_B)]

    def check(where: str, of_both: list[list[Tensor]], first_B: list[int]) -> None:
        for b, (states, first) in enumerate(zip(of_both, first_B, strict=True)):
            at = slice(first, first + states[0].shape[1])
            _check_close(target, f"{where}, text {b + 1} of 2", states, own, at)

    lengths_B = [PREFIX, PREFIX - 5]
    counts_B = [DEPTH - 2, 2]
    begin(1, decoys_1T[:, :PREFIX])
    begun = [begin(b, ids_1T[:, :length]) for b, length in enumerate(lengths_B)]
    check("prefill in the cache", begun, [0, 0])
    check("verifying a chain", read(lengths_B, DEPTH, counts_B), lengths_B)
    cache.rewind(torch.tensor(counts_B, device=target.device))
    after_B = [length + count for length, count in zip(lengths_B, counts_B, strict=True)]
    next_B = [first + 1 for first in after_B]
    rest = LENGTH - max(next_B)
    pieces = zip(read(after_B, 1, [1, 1]), read(next_B, rest, [rest, rest]), strict=True)
    after = [[torch.cat(states, 1) for states in zip(*piece, strict=True)] for piece in pieces]
    check("continuing after refused drafts", after, after_B)


def _check_tree(
    target: "Target", ids_1T: Tensor, own: ReferenceStates, cache: "TargetCache"
) -> None:
    """Verify a tree behind the first tokens, in a cache that has them, and commit its true path."""
    device = target.device
    # the root has two children, the second of them has two, and so on: each true node has a decoy for a sibling
    depths = [(node + 1) // 2 for node in range(2 * DEPTH - 1)]
    seen_QQ = torch.eye(len(depths), dtype=torch.bool)
    for node, depth in enumerate(depths[1:], 1):
        seen_QQ[node] |= seen_QQ[2 * (depth - 1)]
    true_1Q = ids_1T[:, [PREFIX + depth for depth in depths]]
    path_P = torch.arange(0, len(depths), 2, device=device)
    decoys_1Q = (true_1Q + 1) % target.embedding_weight().shape[0]
    nodes_1Q = decoys_1Q.index_copy(1, path_P, true_1Q[:, path_P])
    start = torch.tensor(PREFIX, device=device)
    view = View.append(
        start, seen_QQ.to(device), torch.tensor(depths, device=device), cache.capacity, cache
    )
    on_path = [x[:, path_P] for x in _ours(target, nodes_1Q, view)]
    _check_close(target, "verifying a tree", on_path, own, slice(PREFIX, PREFIX + DEPTH))
    cache.commit(start[None], path_P[None])


def _names(target: "Target") -> list[str]:
    L = target.num_layers
    return [
        *(f"its state at boundary {b}" for b in range(L + 1)),
        f"its state at boundary {L}, normed",
        "its logits",
    ]


def _ours(target: "Target", ids_1T: Tensor, view: View) -> list[Tensor]:
    """States by way of :meth:`specdec.target.target.Target.forward`."""
    out = target(ids_1T, view, range(target.num_layers + 1))
    states = [*out.aux_BTNH.unbind(2), out.final_BTH, target.logits(out.final_BTH)]
    _check_exact(
        target, "the final state", out.final_BTH, target.final_norm(states[target.num_layers])
    )
    return states


def _check_exact(target: "Target", what: str, ours: Tensor, own: Tensor) -> None:
    """Raise ValueError unless the same operation on the same input gave the same."""
    if ours.shape != own.shape:
        raise ValueError(
            f"{target.source}: {what}: shape {tuple(ours.shape)}, the model's own {tuple(own.shape)}"
        )
    allowed = max(4 * torch.finfo(own.dtype).eps, 1e-5)  # float32's sums in another order
    if not (worst := float(relative_error(ours, own).max())) <= allowed:
        raise ValueError(
            f"{target.source}: {what} is not the model's own: relative difference {worst:.2g}, allowed {allowed:.2g}, "
            f"since no layer lies between; specdec cannot use {type(target.model).__name__} as it is"
        )


def _check_close(
    target: "Target", where: str, ours: list[Tensor], own: ReferenceStates, at: slice
) -> None:
    """Raise ValueError unless the same text through the same layers by other kernels gave nearly the same."""
    own_states_at = [state[:, at] for state in own.states]
    boundaries = own_states_at[: target.num_layers + 1]
    use = f"{own.why}; specdec cannot use {type(target.model).__name__} as it is"
    times = []  # what the model differs from itself by
    for n, (name, state, allowed) in enumerate(zip(_names(target), ours, own.allowed, strict=True)):
        neighbors = {b: [boundaries[b]] for b in (n - 1, n + 1) if 0 <= b < len(boundaries)}
        difference = compare_boundary(n, [state], {n: [own_states_at[n]], **neighbors})
        times.append(difference.error / own.spread[n])
        if not difference.fits(allowed):
            rather = ""
            if difference.is_of_another:
                rather = f" but that of boundary {difference.nearest}"
            raise ValueError(
                f"{target.source}: {where}: {name} is not the model's own{rather}: "
                f"relative difference {difference.error:.2g} (median over tokens), allowed {allowed:.2g}: "
                f"{own.most:g} at most, or {TOLERANCE_FACTOR} times {use}"
            )
    mean = math.exp(fmean(math.log(max(ratio, 1e-3)) for ratio in times[1:]))
    if mean > MEAN_TOLERANCE:
        raise ValueError(
            f"{target.source}: {where}: its states are not the model's own: over all boundaries {mean:.2g} times off, "
            f"allowed {MEAN_TOLERANCE:g} times, {use}"
        )
    is_other_1T = ours[-1].argmax(-1) != own_states_at[-1].argmax(-1)
    differ = own.sure_T[at] & is_other_1T[0]
    if differ.any():
        raise ValueError(
            f"{target.source}: {where}: at {int(differ.sum())} of {len(differ)} places the most likely token is not "
            f"the model's own, which leads by more than {use}"
        )
