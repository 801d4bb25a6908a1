"""How far an unrolled training step and a cached draft chain are apart."""

import torch
from torch import Tensor

from specdec.decoding import Chain
from specdec.drafter import Drafter, DrafterSpec
from tests.decoding.drafting import Drafting
from tests.tiny import HIDDEN, VOCAB, tiny_drafter

STEPS = 3


def text(drafter: Drafter, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens (1, length) and features (1, length, N, H)."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (1, length), generator=generator)
    shape = (1, length, len(drafter.config.aux_layers), HIDDEN)
    return ids, torch.randn(shape, dtype=torch.float64, generator=generator)


def unrolled_logits(drafter: Drafter, documents: list[int], steps: int) -> list[Tensor]:
    """Logits (T, D) of every unroll step over :func:`text`."""
    ids, aux = text(drafter, len(documents))
    made = drafter.unroll(ids, aux, torch.tensor([documents]), steps)
    return [drafter.logits(step.normed_BTH)[0] for step in made]


def worst_gap(made: DrafterSpec | Drafter, documents: list[int], steps: int = STEPS) -> float:
    """Largest difference between unrolled and cached logits, over every anchor and depth, of a drafter, or of a random
    one of a design."""
    drafter, length = made if isinstance(made, Drafter) else tiny_drafter(made), len(documents)
    ids, aux = text(drafter, length)
    unrolled = unrolled_logits(drafter, documents, steps)
    gap = 0.0
    for anchor in range(length - 1):
        first = documents.index(documents[anchor])
        proposer = Drafting(drafter, Chain(steps), length)
        start = proposer.commit(ids[:, first + 1 : anchor + 2], aux[:, first : anchor + 1])
        expand = drafter.config.drafting.expand(proposer.memory, start, proposer.length_B)
        frontier = start
        for k in range(steps):
            want = unrolled[k][anchor].log_softmax(-1)
            gap = max(gap, float((frontier.logits_BKD[0, 0].log_softmax(-1) - want).abs().max()))
            token = anchor + 2 + k
            if k + 1 == steps or token >= length or documents[token] != documents[anchor]:
                break
            seen = torch.ones(1, k + 1, dtype=torch.bool)
            ids_11 = ids[:, token : token + 1]
            frontier = expand(ids_11, frontier.h_BKH[:, :1], seen, torch.arange(k + 1))
    return gap
