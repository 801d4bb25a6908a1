"""How many drafts each level accepts at every place of the answers, and what decoding would make of that.

``docs/explain.md`` defines the levels. All but the first two come from one unroll of the drafter over the target's
states: its step 0 reads true states at every slot, step k its own states of k steps.

Legend: B texts side by side, T tokens, N aux layers, H hidden, S all slots, R slots asked for, K
drafts, A places.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specdec.drafter import Drafter
from specdec.explain.answers import Answered
from specdec.nn.unroll import Blocked
from specdec.nn.view import View
from specdec.target import Target
from specdec.training.kept import Kept, states
from specdec.training.ttt import ttt_unroll

PERFECT, VOCABULARY, TRUE_FEATURES, OWN_FEATURES = "perfect", "vocabulary", "true_features", "own_features"
RUNS = (PERFECT, VOCABULARY, TRUE_FEATURES, OWN_FEATURES)
TOKENS = 8192  # that run side by side, unless a single text has more
ROWS = 1024  # of logits that stand in memory together

Runs = dict[str, list[int]]
"""Drafts accepted at each place of one answer, by level."""


@torch.no_grad()
def measure(
    target: Target,
    drafter: Drafter,
    texts: Sequence[Answered],
    depth: int,
    on_text: Callable[[int], None] = lambda done: None,
) -> list[Runs]:
    """The levels of :data:`RUNS` for every text.

    Args:
        drafter: in the target's dtype, on its device.
        depth: drafts a pass.
    """
    found: list[Runs] = []
    for some in _side_by_side(texts):
        found += _measure(target, drafter, some, depth)
        on_text(len(some))
    return found


def passes(accepted: Sequence[int]) -> list[int]:
    """Where passes begin, from place 0 on, if each begins behind what the one before has committed.

    Args:
        accepted: drafts accepted at each place.
    """
    found, place = list[int](), 0
    while place < len(accepted):
        found.append(place)
        place += accepted[place] + 1
    return found


def _side_by_side(texts: Sequence[Answered]) -> Iterator[list[Answered]]:
    some, longest = list[Answered](), 0
    for text in texts:
        longest = max(longest, len(text.ids))
        if some and longest * (len(some) + 1) > TOKENS:
            yield some
            some, longest = [], len(text.ids)
        some.append(text)
    if some:
        yield some


def _measure(target: Target, drafter: Drafter, texts: list[Answered], depth: int) -> list[Runs]:
    T, device = max(len(text.ids) for text in texts), target.device
    ids_BT = torch.tensor([text.ids + [0] * (T - len(text.ids)) for text in texts], device=device)
    documents_BT = torch.tensor([[0] * len(text.ids) + [-1] * (T - len(text.ids)) for text in texts], device=device)
    rows = [text.slots(depth) for text in texts]
    slots_R = torch.tensor([b * T + slot for b, own in enumerate(rows) for slot in own], device=device)
    if not len(slots_R):
        return [{level: [] for level in RUNS} for _ in texts]
    right_KR = _right(target, drafter, ids_BT, documents_BT, slots_R, depth)
    found, start, order_K = list[Runs](), 0, torch.arange(depth, device=device)
    for text, ids_T, own in zip(texts, ids_BT, rows, strict=True):
        said_KS = right_KR[:, start : start + len(own)]
        start, A = start + len(own), len(text.anchors)
        draft_AK = torch.arange(A, device=device)[:, None] + order_K  # the k-th draft of place n, from the first on
        hits = {
            PERFECT: torch.ones_like(draft_AK, dtype=torch.bool),
            VOCABULARY: drafter.vocab.to_draft(ids_T[text.prompt + 1 :])[draft_AK] >= 0,
            TRUE_FEATURES: said_KS[0, draft_AK],
            OWN_FEATURES: said_KS[:, :A].T,
        }
        most_A = torch.tensor(text.most(depth), dtype=torch.int64, device=device)
        found.append({level: hit_AK.cumprod(1).sum(1).minimum(most_A).tolist() for level, hit_AK in hits.items()})
    return found


def _right(
    target: Target, drafter: Drafter, ids_BT: Tensor, documents_BT: Tensor, slots_R: Tensor, depth: int
) -> Tensor:
    """Whether the unroll's step k at a slot names the token 2 + k further on, bool (K, R)."""
    config = drafter.config
    aux_BTNH = target.forward(ids_BT, View.packed(documents_BT), config.aux_layers, config.aux_final_norm).aux_BTNH
    asked_S = torch.zeros(ids_BT.numel(), dtype=torch.bool, device=ids_BT.device).index_fill(0, slots_R, True)
    kept = Kept.of(asked_S.view(1, *ids_BT.shape))
    ahead = torch.nn.functional.pad(ids_BT, (0, depth + 1), value=-1)
    b_R, t_R = slots_R // ids_BT.shape[1], slots_R % ids_BT.shape[1]
    found = []
    for k, step in enumerate(ttt_unroll(drafter, ids_BT, aux_BTNH, documents_BT, depth, Blocked(), kept=kept)):
        normed_RH = step.normed_BTH.flatten(0, 1)[states(kept, slots_R)]
        said_R = torch.cat([drafter.logits(some).argmax(-1) for some in normed_RH.split(ROWS)])
        found.append(drafter.vocab.to_target(said_R) == ahead[b_R, t_R + 2 + k])
    return torch.stack(found)
