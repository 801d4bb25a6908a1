"""The metrics of training, of validation, and of every validation source that has a name."""

from torch import nn

from specdec.training.losses import terms
from specdec.training.metrics import UnrollMetrics
from specdec.training.step import ObjectiveConfig

# figures of validation that are logged for every source
BY_SOURCE = ("loss", "prefix_proxy", "coverage")


class StageMetrics(nn.Module):
    """One :class:`UnrollMetrics` for training, one for validation, and one for each source of validation."""

    def __init__(self, objective: ObjectiveConfig) -> None:
        super().__init__()
        self._terms = terms(objective.loss)
        self._factors = objective.weights.factors(objective.steps)
        self.of_training = self._new()
        self.of_validation = self._new()
        self._of_sources = nn.ModuleDict()

    def _new(self) -> UnrollMetrics:
        return UnrollMetrics(self._terms, self._factors)

    def of_stage(self, stage: str) -> UnrollMetrics:
        """Return the metrics of ``train``, or of ``val`` and ``test``."""
        return self.of_training if stage == "train" else self.of_validation

    def of_source(self, position: int) -> UnrollMetrics:
        """Return the metrics of the validation source at this position.

        Metrics are summed over processes, so every process has to ask for the same ones in the same order.
        """
        key = str(position)  # a source's name may hold a dot
        if key not in self._of_sources:
            self._of_sources[key] = self._new().to(self.of_validation.sums.device)
        metrics = self._of_sources[key]
        assert isinstance(metrics, UnrollMetrics)
        return metrics
