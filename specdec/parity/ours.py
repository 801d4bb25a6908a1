"""The drafter's own two ways: the unroll of training, and the cache of decoding.

Legend: B sequences, T tokens, N aux layers, H hidden, A anchors, K depths, D draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.decoding import Chain, Proposer
from specdec.drafter import Drafter
from specdec.nn.unroll import Blocked
from specdec.nn.view import View
from specdec.parity.said import Said, over_vocabulary, wide
from specdec.parity.texts import Text
from specdec.target import Target
from specdec.training.ttt import ttt_unroll


def unrolled(target: Target, drafter: Drafter, texts: Sequence[list[int]], anchors: Sequence[int], depth: int) -> Said:
    """Training: target and drafter run the texts packed into one row, every slot at once.

    Args:
        anchors: slots of the row.
    """
    config = drafter.config
    ids_1T = torch.tensor([[token for text in texts for token in text]], device=target.device)
    documents_1T = torch.tensor([[n for n, text in enumerate(texts) for _ in text]], device=target.device)
    view = View.packed(documents_1T)
    aux_1TNH = target.forward(ids_1T, view, config.aux_layers, config.aux_final_norm).aux_BTNH
    h_1TH, places = drafter.fuse(aux_1TNH), torch.tensor(anchors, device=target.device)
    features, laws = [], []
    for step in ttt_unroll(drafter, ids_1T, aux_1TNH, documents_1T, depth + 1, Blocked()):
        logits_AD = drafter.logits(step.normed_BTH[0, places])
        features.append(h_1TH[0, places])
        laws.append(logits_AD.log_softmax(-1, dtype=wide(logits_AD.dtype)))
        h_1TH = step.h_BTH
    return Said(torch.stack(features, 1), over_vocabulary(drafter, torch.stack(laws, 1)))


def cached(target: Target, drafter: Drafter, text: Text, anchors: Sequence[int], depth: int) -> Said:
    """Decoding: the prompt and then the answer enter the target's cache, the drafter's is extended from slot to slot.

    Slots before the answer are reached by extending over the prompt, those from its end on behind a prefill of it.
    """
    ids_1T = torch.tensor([text.ids], device=target.device)
    aux_1TNH = _aux(target, drafter, ids_1T, text.prompt)
    before = [anchor for anchor in anchors if anchor < text.prompt - 1]
    walks = [before, list(anchors[len(before) :])]
    found = [_walk(drafter, ids_1T, aux_1TNH, walk, depth) for walk in walks if walk]
    features, laws = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Said(features, over_vocabulary(drafter, laws))


def _aux(target: Target, drafter: Drafter, ids_1T: Tensor, prompt: int) -> Tensor:
    config, T = drafter.config, ids_1T.shape[1]
    cache = target.new_cache(T)

    def run(first: int, last: int) -> Tensor:
        view = View.chain(torch.tensor([first], device=target.device), last - first, T, cache)
        return target.forward(ids_1T[:, first:last], view, config.aux_layers, config.aux_final_norm).aux_BTNH

    return torch.cat([run(0, prompt), run(prompt, T)], 1)


def _walk(
    drafter: Drafter, ids_1T: Tensor, aux_1TNH: Tensor, anchors: Sequence[int], depth: int
) -> tuple[Tensor, Tensor]:
    """Features read (A, K, H) and log-probabilities (A, K, D), from one slot to the next in one cache."""
    proposer, row = Proposer(drafter, Chain(depth + 1), ids_1T.shape[1]), anchors[0]
    if row:
        proposer.prefill(0, ids_1T[:, 1 : row + 1], aux_1TNH[:, :row])
    one_B = torch.ones(1, dtype=torch.int64, device=ids_1T.device)
    features, laws = [], []
    for anchor in anchors:
        fresh = slice(row, anchor + 1)
        start = proposer.extend(
            row * one_B, ids_1T[:, row + 1 : anchor + 2], aux_1TNH[:, fresh], (anchor + 1 - row) * one_B
        )
        row = anchor + 1
        features.append(drafter.fuse(aux_1TNH[:, anchor:row])[0, 0])
        laws.append(start.log_probs_BKD[0, 0])
        for k in range(1, depth + 1):
            features.append(start.h_BKH[0, 0])
            seen_1Q = torch.ones(1, k, dtype=torch.bool, device=ids_1T.device)
            order_Q = torch.arange(k, device=ids_1T.device)
            start = proposer.expand(
                row * one_B, ids_1T[:, anchor + 1 + k : anchor + 2 + k], start.h_BKH, seen_1Q, order_Q
            )
            laws.append(start.log_probs_BKD[0, 0])
    shape = (len(anchors), depth + 1)
    return torch.stack(features).unflatten(0, shape), torch.stack(laws).unflatten(0, shape)
