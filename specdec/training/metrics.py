"""What a training step counts, and the metrics made of the counts.

Legend: K unroll steps, N loss terms, S slots of the batch, R rows of a step in a piece, C positions of a piece, D draft
vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torchmetrics import Metric

from specdec.training.head_loss import Index
from specdec.training.losses import NamedTerm
from specdec.training.target_head import TargetProbs


class StepCounts(NamedTuple):
    """Sums over a batch, per unroll step, float64; each (K,) but ``loss_KN``."""

    rows_K: Tensor  # rows that the loss is the mean of, each by its weight, the step's factor aside
    covered_K: Tensor  # supervised rows whose most likely token the draft vocabulary has
    supervised_K: Tensor  # supervised rows
    reached_K: Tensor  # slots that decoding can reach at this depth
    hits_K: Tensor  # of these, greedy draft equal to greedy target
    prefix_hits_K: Tensor  # of these, equal at this and every earlier depth
    overlap_K: Tensor  # summed Σ min(p, q) on the reached slots
    loss_KN: Tensor  # losses by term, summed likewise


def overlap(logits_RD: Tensor, probs: TargetProbs) -> Tensor:
    """Return ``Σ min(p, q)``, (R,), the chance that a draft sampled from q is accepted
    (https://arxiv.org/abs/2211.17192), with p over the target's whole vocabulary."""
    q_RD = logits_RD.softmax(-1, dtype=probs.p_CD.dtype)
    p_RD = probs.p_CD * probs.log_mass_C.exp()[:, None]
    return torch.minimum(p_RD, q_RD).sum(-1)


class StepCounter:
    """Counts what the metrics need while a piece's logits are in memory."""

    def __init__(self, reached_KS: Tensor) -> None:
        self.reached_KS = reached_KS
        self.hits_KS = torch.zeros_like(reached_KS)
        self.covered_K = torch.zeros(len(reached_KS), dtype=torch.float64, device=reached_KS.device)
        self.overlap_K = torch.zeros_like(self.covered_K)

    def __call__(self, k: int, slots: Index, logits_RD: Tensor, probs: TargetProbs) -> None:
        reached_R = self.reached_KS[k, slots]
        self.hits_KS[k, slots] = (
            (logits_RD.argmax(-1) == probs.token_C) & probs.covered_C & reached_R
        )
        self.covered_K[k] += probs.covered_C.sum()
        self.overlap_K[k] += (overlap(logits_RD, probs) * reached_R).sum()

    @torch.no_grad()
    def counts(self, rows_K: Tensor, loss_KN: Tensor, trained_KBT: Tensor) -> StepCounts:
        """Return the sums, with the rows and losses of :func:`specdec.training.head_loss.head_loss`."""
        return StepCounts(
            rows_K=rows_K.double(),
            covered_K=self.covered_K,
            supervised_K=trained_KBT.sum((1, 2)).double(),
            reached_K=self.reached_KS.sum(1).double(),
            hits_K=self.hits_KS.sum(1).double(),
            prefix_hits_K=self.hits_KS.cumprod(0).sum(1).double(),
            overlap_K=self.overlap_K,
            loss_KN=loss_KN.double(),
        )


class UnrollMetrics(Metric):
    """Accuracy and acceptance proxies of every unroll depth, right over batches and ranks. None of them is an
    acceptance length: they are teacher-forced.

    * ``loss``: what is minimized; and of a sum of losses, each term by its name, unweighted.
    * ``accuracy_k``: greedy draft equals the target's greedy token, on slots that decoding can reach at depth k.
    * ``expected_acceptance_k``: mean of ``Σ min(p, q)``, the chance that a sampled draft is accepted
      (https://arxiv.org/abs/2211.17192), with p over its whole vocabulary.
    * ``prefix_proxy``: ``1 + Σ_k P(depths 0..k all right)``: what a greedy chain would commit per target pass, were
      the text the target's own.
    * ``coverage``: supervised rows whose most likely token the draft vocabulary has, an upper bound of accuracy.
    * ``loss_k``: mean loss of step k, of weighted slots by their weights.
    """

    full_state_update = False
    sums: Tensor  # (7 + N, K), float64: the counts, then the losses by term

    def __init__(self, terms: list[NamedTerm], factors: Sequence[float]) -> None:
        super().__init__()
        self.names = [term.name for term in terms]
        self.weights = [term.weight for term in terms]
        self.factors = list(factors)
        size = len(StepCounts._fields) - 1 + len(terms)
        self.add_state(
            "sums", torch.zeros(size, len(factors), dtype=torch.float64), dist_reduce_fx="sum"
        )

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> Self:
        """Move the sums, and keep them in float64: Lightning turns a whole module to bfloat16, which loses rows."""
        super()._apply(fn, exclude_state)
        self.sums = self.sums.double()
        self._defaults["sums"] = self._defaults["sums"].double()  # type: ignore[union-attr]
        return self

    def update(self, counts: StepCounts) -> None:
        """Add one batch."""
        *others, loss_KN = counts
        # not in place: what inference mode has made may not be changed outside of it
        self.sums = self.sums + torch.cat([torch.stack(others), loss_KN.T])

    def compute(self) -> dict[str, Tensor]:
        """Every figure as a scalar; a depth that was never reached reports zero."""
        others = len(StepCounts._fields) - 1
        c = StepCounts._make([*self.sums[:others], self.sums[others:].T])
        weight_N = c.rows_K.new_tensor(self.weights)
        factor_K = c.rows_K.new_tensor(self.factors)

        def mean(top: Tensor, bottom: Tensor) -> Tensor:
            return (top / bottom.clamp(min=1e-30)).float()  # weights may sum up to less than a row

        rows = (c.rows_K * factor_K).sum().clamp(min=1e-30)
        term_N = (c.loss_KN * factor_K[:, None]).sum(0) / rows
        out = {"loss": (term_N * weight_N).sum().float()}
        if len(self.names) > 1:
            out |= {name: value.float() for name, value in zip(self.names, term_N, strict=True)}
        out["prefix_proxy"] = 1 + mean(c.prefix_hits_K, c.reached_K).sum()
        out["coverage"] = mean(c.covered_K.sum(), c.supervised_K.sum())
        per_depth = {
            "accuracy": mean(c.hits_K, c.reached_K),
            "expected_acceptance": mean(c.overlap_K, c.reached_K),
            "loss": mean((c.loss_KN * weight_N).sum(1), c.rows_K),
        }
        for name, values_K in per_depth.items():
            out |= {f"{name}_{k}": value for k, value in enumerate(values_K)}
        return out
