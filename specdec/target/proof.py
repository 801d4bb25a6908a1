"""Before anything is trained on a target, it proves that its features and its verification are the model's own.

Legend: T tokens, N boundaries, H hidden, V vocabulary, D some rows of it, Q tree nodes.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.nn.view import View

if TYPE_CHECKING:
    from specdec.target.target import Target

LENGTH, PREFIX, WINDOW = 16, 9, 4
# mean over tokens of |difference| / |value|; kernels differ with the mask's form, so this is their noise, with room.
# Norms and softmax run in float32 in most families, whatever the model's dtype.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@torch.no_grad()
def prove(target: "Target") -> None:
    """See :meth:`specdec.target.target.Target.prove`."""
    config = target.config
    window = getattr(config, "sliding_window", None)
    if window is not None:  # a short text reaches beyond it, the model's own masks included
        config.sliding_window = min(window, WINDOW)
    ids_1T = (torch.arange(LENGTH, device=target.device) * 7919 + 3)[None] % target.embedding_weight().shape[0]
    try:
        expected_1TV = _plain(target, ids_1T)
        _packed(target, ids_1T, expected_1TV)
        _cached(target, ids_1T, expected_1TV)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{target.source}: {type(target.model).__name__} fails on a short text: {reason}") from error
    finally:
        if window is not None:
            config.sliding_window = window


def _plain(target: "Target", ids_1T: Tensor) -> Tensor:
    """Taps and head on one plain text; returns the model's own logits."""
    own = target.model(input_ids=ids_1T, output_hidden_states=True, use_cache=False)
    L = target.num_layers
    if own.hidden_states is None or len(own.hidden_states) != L + 1:
        raise ValueError(f"{target.source}: the model does not report its {L + 1} hidden states, nothing to prove with")
    names = [*(f"its state at boundary {b}" for b in range(L)), f"its state at boundary {L}, normed", "its logits"]
    for name, values in zip(names, (*own.hidden_states, own.logits), strict=True):
        if not values.isfinite().all():  # else no comparison says anything
            bad = float(values[~values.isfinite()][0])
            raise ValueError(f"{target.source}: {bad} in {name}, on a short text: {remedy(target)}")
    document_1T = torch.zeros_like(ids_1T)
    aux_1TNH, final_1TH = target(ids_1T, View.packed(document_1T), range(L + 1))
    *states, last_1TH = own.hidden_states
    for boundary, state_1TH in enumerate(states):
        _same(target, f"the state at boundary {boundary}", aux_1TNH[:, :, boundary], state_1TH)
    _same(target, f"the final norm of the state at boundary {L}", target.final_norm(aux_1TNH[:, :, L]), last_1TH)
    _same(target, "the final state", final_1TH, last_1TH)
    _same(target, "the logits", target.logits(final_1TH), own.logits)
    rows_D = torch.arange(0, target.vocab_size, 3, device=target.device)
    _same(target, "the logits of some rows", target.logits(final_1TH, rows_D), own.logits[..., rows_D])
    return own.logits


def remedy(target: "Target") -> str:
    """Why a target yields NaN or infinities, and what to do."""
    dtype = str(target.dtype).removeprefix("torch.")
    bad = next((name for name, weight in target.model.named_parameters() if not weight.isfinite().all()), None)
    cause = f"its weight {bad} is not finite in {dtype}" if bad else f"{dtype} overflows in it"
    if target.dtype in (torch.float16, torch.bfloat16):
        others = "bfloat16 or float32" if target.dtype == torch.float16 else "float32"
        return f"{cause}; load it in {others} (model.target.dtype)"
    return f"{cause}; check the checkpoint, or download it again"


@torch.no_grad()
def check_finite(target: "Target") -> None:
    """Refuse a target with a weight that is NaN or infinite, which a short text need not meet; reads each weight once.

    Raises:
        ValueError: the weight's name, and what to do.
    """
    for weight in target.model.parameters():
        if not weight.is_floating_point() or weight.element_size() == 1 or weight.is_meta or not weight.numel():
            continue
        if not torch.stack(torch.aminmax(weight)).isfinite().all():  # one pass without a copy; of NaN both are NaN
            raise ValueError(f"{target.source}: {remedy(target)}")


def _packed(target: "Target", ids_1T: Tensor, expected_1TV: Tensor) -> None:
    """Two documents in one row do not see each other."""
    document_1T = (torch.arange(LENGTH, device=target.device) >= PREFIX).long()[None]
    logits_1TV = target.logits(target(ids_1T, View.packed(document_1T), ()).final_BTH)
    alone_1TV = target.model(input_ids=ids_1T[:, PREFIX:], use_cache=False).logits
    _same(target, "packing: the first document", logits_1TV[:, :PREFIX], expected_1TV[:, :PREFIX])
    _same(target, "packing: the second document", logits_1TV[:, PREFIX:], alone_1TV)


def _cached(target: "Target", ids_1T: Tensor, expected_1TV: Tensor) -> None:
    """Prefill, verify a tree whose true path is nodes 0, 2, 4, commit that path, go on."""
    cache = target.new_cache(LENGTH + 8)
    device = target.device

    def run(ids_1T: Tensor, view: View) -> Tensor:
        return target.logits(target(ids_1T, view, ()).final_BTH)

    def chain(first: int, last: int) -> Tensor:
        start = torch.tensor(first, device=device)
        return run(ids_1T[:, first:last], View.chain(start, last - first, cache.capacity, cache))

    _same(target, "prefill in the cache", chain(0, PREFIX), expected_1TV[:, :PREFIX])
    parents = (0, 0, 0, 2, 2)
    depths = (0, 1, 1, 2, 2)
    seen_QQ = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        seen_QQ[node] |= seen_QQ[parent]
    true_1Q = ids_1T[:, [PREFIX + depth for depth in depths]]
    path_P = torch.tensor([0, 2, 4], device=device)
    decoys_1Q = (true_1Q + 1) % target.embedding_weight().shape[0]
    nodes_1Q = decoys_1Q.index_copy(1, path_P, true_1Q[:, path_P])
    start = torch.tensor(PREFIX, device=device)
    view = View.append(start, seen_QQ.to(device), torch.tensor(depths, device=device), cache.capacity, cache)
    accepted = PREFIX + len(path_P)
    _same(target, "verifying a tree", run(nodes_1Q, view)[:, path_P], expected_1TV[:, PREFIX:accepted])
    cache.commit(start[None], path_P[None])
    _same(target, "going on after a commit", chain(accepted, accepted + 1), expected_1TV[:, accepted : accepted + 1])
    _same(target, "and further", chain(accepted + 1, LENGTH), expected_1TV[:, accepted + 1 :])


def _same(target: "Target", what: str, ours: Tensor, own: Tensor) -> None:
    tolerance = TOLERANCE[own.dtype]
    if ours.shape != own.shape:
        raise ValueError(f"{target.source}: {what}: shape {tuple(ours.shape)}, the model's own {tuple(own.shape)}")
    ours, own = ours.double(), own.double()
    gap = ((ours - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-12)).mean().item()
    if not gap <= tolerance:
        raise ValueError(
            f"{target.source}: {what} is not the model's own: relative difference {gap:.2g}, allowed {tolerance:g}; "
            f"specdec cannot use {type(target.model).__name__} as it is"
        )
