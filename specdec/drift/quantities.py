"""What is measured of the chains' steps, beside the target's own states and laws; see docs/drift.md.

Legend: A chains, L layers, F quantities, H hidden, V vocabulary, D draft vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.drift import series
from specdec.drift.chains import DraftStep, Roots, Trunk
from specdec.target import TargetOutput


def by_depth(
    trunk: Trunk, roots: Roots, steps: Sequence[DraftStep], looks_LAF: Sequence[Tensor], said: Sequence[TargetOutput]
) -> Iterator[Tensor]:
    """For every depth the sums over chains of all rows of :func:`series.rows`, and over how many, (F, 2) float64.

    Args:
        looks_LAF: what every layer attends to at each step.
        said: by the target, of the token that each step reads.
    """
    before_AH, law_before_AD = roots.feature_AH, None
    all_A = torch.ones_like(steps[0].tokens_A, dtype=torch.float64)
    accepted_A = all_A
    for step, look_LAF, true in zip(steps, looks_LAF, said, strict=True):
        logits_AV = trunk.target.logits(true.final_BTH)[0]
        log_p_AD, covered_A = _on_draft_vocabulary(logits_AV, trunk.drafter.vocab.target_ids_D)
        log_q_AD = step.log_probs_AD
        reached_A, accepted_A = accepted_A, accepted_A * (logits_AV.argmax(-1) == step.tokens_A)
        first = law_before_AD is None
        found = {
            "state_rms": (rms(step.state_AH), all_A),
            "out_rms": (rms(step.out_AH), all_A),
            "cosine": (_cosine(step.state_AH, before_AH), all_A),
            "feature_cosine": (_cosine(step.state_AH, trunk.drafter.fuse(true.aux_BTNH)[0]), all_A),
            "kl": (_kl(log_p_AD, log_q_AD), all_A),
            "kl_between_steps": (
                _kl(log_q_AD, log_q_AD if law_before_AD is None else law_before_AD),
                all_A * (not first),
            ),
            "covered_mass": (covered_A, all_A),
            "joint_acceptance": (accepted_A, all_A),
            "conditional_acceptance": (accepted_A, reached_A),
        }
        attention = zip(series.ATTENTION, look_LAF.mean(0).unbind(1), strict=True)
        found |= {name: (x_A, all_A) for name, x_A in attention}
        rows = [found[name] for name in series.SERIES]
        if len(look_LAF) > 1:
            rows += [(x_A, all_A) for x_A in look_LAF.movedim(1, 2).flatten(0, 1)]
        yield torch.stack([torch.stack([(x_A * weight_A).sum(), weight_A.sum()]) for x_A, weight_A in rows])
        before_AH, law_before_AD = step.state_AH, log_q_AD


def of_sources(roots: Roots) -> Tensor:
    """The sums of :func:`series.source_rows` over chains, and over how many, (G, 2) float64."""
    found = [*rms(roots.aux_ANH).unbind(1), *rms(roots.normed_aux_ANH).unbind(1), rms(roots.feature_AH)]
    return torch.stack([torch.stack([x_A.sum(), torch.ones_like(x_A).sum()]) for x_A in found])


def rms(x: Tensor) -> Tensor:
    """``||x|| / sqrt(H)`` over the last dimension, float64."""
    return x.double().square().mean(-1).sqrt()


def _cosine(x_AH: Tensor, y_AH: Tensor) -> Tensor:
    return F.cosine_similarity(x_AH.double(), y_AH.double(), dim=-1)


def _on_draft_vocabulary(logits_AV: Tensor, ids_D: Tensor) -> tuple[Tensor, Tensor]:
    """The target's law given that its token is in the draft vocabulary, as logarithms, and how likely that is."""
    wide_AV = logits_AV.to(torch.promote_types(logits_AV.dtype, torch.float32))
    inside_AD = wide_AV[:, ids_D]
    total_A = inside_AD.logsumexp(-1)
    return inside_AD - total_A[:, None], (total_A - wide_AV.logsumexp(-1)).exp().double()


def _kl(log_p_AD: Tensor, log_q_AD: Tensor) -> Tensor:
    log_p_AD, log_q_AD = log_p_AD.double(), log_q_AD.double()  # laws that are alike: terms cancel
    p_AD = log_p_AD.exp()
    return torch.where(p_AD > 0, p_AD * (log_p_AD - log_q_AD), 0).sum(-1)
