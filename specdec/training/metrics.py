"""Training's own figures, as torchmetrics, so that they are right over batches and ranks.

None of them is an acceptance length: they are teacher-forced. Acceptance length is measured by decoding.

Legend: K unroll steps.
"""

import torch
from torch import Tensor
from torchmetrics import Metric

from specdec.training.objective import Counts


class UnrollMetrics(Metric):
    """Accuracy and acceptance proxies of every unroll depth.

    * ``accuracy_k``: greedy draft equals the target's greedy token, on slots that decoding can reach at depth k.
    * ``expected_acceptance_k``: mean of ``Σ min(p, q)``, the chance that a sampled draft is accepted
      (https://arxiv.org/abs/2211.17192), with p the target's law over its whole vocabulary.
    * ``prefix_proxy``: ``1 + Σ_k P(depths 0..k all right)``: what a greedy chain would commit per target pass, were
      the text the target's own.
    * ``coverage``: supervised rows whose most likely token the draft vocabulary has, an upper bound of accuracy.
    * ``loss_k``: mean loss of step k.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(len(Counts._fields), steps, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, counts: Counts) -> None:
        """Add one batch."""
        self.sums += torch.stack(list(counts))

    def compute(self) -> dict[str, Tensor]:
        """Every figure as a scalar; a depth that was never reached reports zero."""
        c = Counts(*self.sums)

        def mean(top: Tensor, bottom: Tensor) -> Tensor:
            return (top / bottom.clamp(min=1)).float()

        out = {"prefix_proxy": 1 + mean(c.prefix_hits_K, c.reached_K).sum()}
        out["coverage"] = mean(c.covered_K.sum(), c.supervised_K.sum())
        per_depth = {
            "accuracy": mean(c.hits_K, c.reached_K),
            "expected_acceptance": mean(c.overlap_K, c.reached_K),
            "loss": mean(c.loss_K, c.rows_K),
        }
        for name, values_K in per_depth.items():
            out |= {f"{name}_{k}": value for k, value in enumerate(values_K)}
        return out
