"""What tuning found, JSON-ready."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.evaluation.tuning.costs import Costs
from specdec.evaluation.tuning.model import REACH, BreakEven, Prediction
from specdec.evaluation.tuning.profile import Profile
from specdec.evaluation.tuning.shape import shapes
from specdec.evaluation.tuning.trial import Trial

SHOWN = 5
PLAIN = "plain decoding"


class Tuned(NamedTuple):
    """One batch size."""

    costs: Costs
    predictions: list[Prediction]
    """Of all candidates, the fastest first."""
    trial: Trial

    @property
    def recommended(self) -> str | None:
        """As ``--growth`` takes it, or None: no shape is predicted to be faster than plain decoding."""
        best = self.predictions[0]
        return best.shape.text if best.speedup > 1 else None

    def told(self) -> dict[str, Any]:
        """As JSON."""
        trial = self.trial
        return {
            "batch": self.costs.batch,
            "recommended": self.recommended,
            "costs": {
                "plain_pass_ms": self.costs.plain_ms,
                "verify": {str(nodes): value for nodes, value in self.costs.verify.items()},
                "draft_step": {str(top_k): value for top_k, value in self.costs.step.items()},
                "rest": self.costs.rest,
                "largest_misfit_of_drafting": self.costs.misfit,
            },
            "trial": {"growth": self.predictions[0].shape.text, **trial._asdict(), "error_percent": trial.error},
            "predictions": [_prediction(one) for one in self.predictions],
        }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {
        "growth": one.shape.text,
        "top_k": one.shape.top_k,
        "depth": one.shape.depth,
        "nodes": one.shape.nodes,
        "acceptance_length": one.acceptance_length,
        "verify": one.verify,
        "drafting": one.drafting,
        "rest": one.rest,
        "speedup": one.speedup,
    }


def told_profile(profile: Profile, most: int) -> list[dict[str, Any]]:
    """Acceptance of every candidate."""
    rows = []
    for shape in shapes(profile.widths, most):
        found = profile.acceptance(shape)
        rows.append({"growth": shape.text, "acceptance_length": found.length, **found._asdict()})
    return rows


def told_break_even(found: BreakEven | None, batches: Sequence[int]) -> str:
    """In words."""
    if found is None:
        reach = f"none up to {max(batches)}"
        return reach if len(batches) < 2 else f"{reach}, nor to be expected up to {REACH * max(batches)}"
    return f"{found.batch} ({found.how})"
