"""One stored piece is worked out again: a wrong tap shows before the first step.

Legend: M tokens of the piece, N boundaries 0 to L, H hidden, V vocabulary.
"""

import torch
from torch import Tensor

from specdec.features.contract import DTYPES
from specdec.features.store import Store
from specdec.nn.view import View
from specdec.target import Target
from specdec.target.proof import TOLERANCE

MOST = 512  # tokens of the piece that is tried
TRIED = 64  # pieces that it is the longest of


@torch.no_grad()
def spot_check(store: Store, target: Target) -> None:
    """Compare a stored piece with the target, boundary by boundary, and the head's logits with the model's own.

    Raises:
        ValueError: they differ by more than rounding, or another boundary is nearer than the one that is named.
    """
    contents, contract = store.shard(0), store.contract
    spans = [(int(start), int(start) + min(int(tokens), MOST)) for start, tokens in contents.spans[:TRIED]]
    starts = [start for start, _ in spans]
    pieces = [span for at, span in enumerate(spans) if starts.index(span[0]) == at]  # a row starts with a piece
    start, end = max(pieces, key=lambda span: span[1] - span[0])
    ids_1M = contents.ids_P[start:end][None].to(target.device)
    own = target.forward(ids_1M, View.packed(torch.zeros_like(ids_1M)), range(target.num_layers + 1))
    allowed = max(TOLERANCE[DTYPES[contract.dtype]], TOLERANCE[target.dtype])
    where = f"{store.directory / store.index.shards[0].file}"
    for n, boundary in enumerate(contract.layers):
        stored_MH = contents.aux_PNH[start:end, n]
        distances = [_distance(stored_MH, state_MH) for state_MH in own.aux_BTNH[0].unbind(1)]
        nearest = min(range(len(distances)), key=distances.__getitem__)
        if distances[boundary] > allowed or distances[nearest] < distances[boundary]:
            raise ValueError(
                f"{where}: what is stored for boundary {boundary} is not the target's (off by "
                f"{distances[boundary]:.1e}; nearest is boundary {nearest}, off by {distances[nearest]:.1e}): "
                "run specdec cache again"
            )
    final_1MH = contents.final_PH[None, start:end].to(target.device, target.dtype)
    for name, stored, true in (
        ("the final state", final_1MH, own.final_BTH),
        ("the head's logits of the final state", target.logits(final_1MH), target.model(input_ids=ids_1M).logits),
    ):
        if (off := _distance(stored, true)) > allowed:
            raise ValueError(f"{where}: {name}: not the target's (off by {off:.1e}): run specdec cache again")


def _distance(stored: Tensor, true: Tensor) -> float:
    stored, true = stored.to(true.device).double(), true.double()
    return float((stored - true).norm() / true.norm().clamp(min=1e-30))
