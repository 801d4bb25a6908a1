"""Training's own figures, as torchmetrics, so that they are right over batches and ranks.

None of them is an acceptance length: they are teacher-forced. Acceptance length is measured by decoding.

Legend: K unroll steps, N loss terms.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor
from torchmetrics import Metric

from specdec.training.losses import NamedTerm
from specdec.training.objective import Counts


class UnrollMetrics(Metric):
    """Accuracy and acceptance proxies of every unroll depth.

    * ``loss``: what is minimised: the mean over the rows of all steps, step k weighted by ``decay**k``; and of a sum
      of losses, each term by its name, unweighted.
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
    losses_KN: Tensor

    def __init__(self, steps: int, terms: list[NamedTerm], decay: float) -> None:
        super().__init__()
        self.names = [term.name for term in terms]
        self.weights = [term.weight for term in terms]
        self.decays = [decay**k for k in range(steps)]
        fields = len(Counts._fields) - 1
        self.add_state("sums", torch.zeros(fields, steps, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("losses_KN", torch.zeros(steps, len(terms), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable, exclude_state: Sequence[str] = "") -> Self:
        """Move the sums, and keep them in float64: Lightning turns a whole module to bfloat16, which loses rows."""
        super()._apply(fn, exclude_state)
        for name in ("sums", "losses_KN"):
            setattr(self, name, getattr(self, name).double())
            self._defaults[name] = self._defaults[name].double()  # type: ignore[union-attr]
        return self

    def update(self, counts: Counts) -> None:
        """Add one batch."""
        self.sums += torch.stack([value for name, value in counts._asdict().items() if name != "loss_KN"])
        self.losses_KN += counts.loss_KN

    def compute(self) -> dict[str, Tensor]:
        """Every figure as a scalar; a depth that was never reached reports zero."""
        names = [name for name in Counts._fields if name != "loss_KN"]
        c = Counts(**dict(zip(names, self.sums, strict=True)), loss_KN=self.losses_KN)
        weight_N, decay_K = c.rows_K.new_tensor(self.weights), c.rows_K.new_tensor(self.decays)

        def mean(top: Tensor, bottom: Tensor) -> Tensor:
            return (top / bottom.clamp(min=1)).float()

        rows = (c.rows_K * decay_K).sum().clamp(min=1e-30)
        term_N = (c.loss_KN * decay_K[:, None]).sum(0) / rows
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
