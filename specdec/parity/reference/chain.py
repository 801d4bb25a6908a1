"""Drafting: the committed text once over the target's features, then a chain from every place asked for.

Legend: T tokens, A anchors, K depths, M nodes, H width, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.parity.reference.checkpoint import Served
from specdec.parity.reference.eagle import step
from specdec.parity.reference.layers import cut, no_past, project


def draft(
    served: Served, ids_T: Tensor, features_TH: Tensor, anchors: Sequence[int], depth: int
) -> tuple[Tensor, Tensor]:
    """What is read and said at every anchor and depth.

    An anchor is a place whose feature is the target's own; at depth k its chain has read the text's next k tokens
    instead of drafts of its own. A chain's keys go when it ends.

    Returns:
        Features read (A, K, H), and log-probabilities (A, K, V) of the token after next, -inf where the drafter has
        no such token.
    """
    past = no_past(served)
    places_T = torch.arange(len(ids_T), device=ids_T.device)
    over = step(served, ids_T[1:], features_TH[:-1], places_T[:-1], past)
    read, said = [], []
    for anchor in anchors:
        own, feature_1H = cut(past, anchor + 1), over.feedback_MH[anchor : anchor + 1]
        read.append(features_TH[anchor])
        said.append(_laws(served, over.seen_MH[anchor]))
        for k in range(1, depth + 1):
            read.append(feature_1H[0])
            at = anchor + k
            out = step(served, ids_T[at + 1 : at + 2], feature_1H, places_T[at : at + 1], own)
            feature_1H = out.feedback_MH
            said.append(_laws(served, out.seen_MH[0]))
    shape = (len(anchors), depth + 1)
    return torch.stack(read).unflatten(0, shape), torch.stack(said).unflatten(0, shape)


def _laws(served: Served, seen_H: Tensor) -> Tensor:
    """Log-probabilities (V,), float32 at least."""
    logits_D = project(served, "lm_head", seen_H) * served.settings.logit_scale
    laws_D = logits_D.log_softmax(-1, dtype=torch.promote_types(logits_D.dtype, torch.float32))
    return laws_D.new_full((served.settings.vocab,), float("-inf")).index_copy(0, served.target_ids_D, laws_D)
