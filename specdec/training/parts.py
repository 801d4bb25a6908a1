"""The parts of a training run as a module is given them, and as a checkpoint names those that it was trained with."""

from collections.abc import Mapping
from typing import Any

from specdec.features import Features, OnTheFly
from specdec.features.producing import ProducedFeatures
from specdec.training.building import FromTarget, Start
from specdec.training.losses import DistributionLoss, FeatureLoss, Loss
from specdec.training.noise import FeatureNoise, NoNoise
from specdec.training.step import ObjectiveConfig
from specdec.training.step_weights import PrefixWeights, StepWeights
from specdec.utils.config import to_text

OBJECTIVE = ObjectiveConfig()  # has the defaults of the arguments that it shares with DrafterModule
EXAMPLES = {
    "loss": OBJECTIVE.loss,
    "step_weights": OBJECTIVE.weights,
    "features": OnTheFly(),
    "noise": NoNoise(),
    "start": FromTarget(),
}
BASES = (
    Loss,
    DistributionLoss,
    FeatureLoss,
    StepWeights,
    PrefixWeights,
    Features,
    ProducedFeatures,
    FeatureNoise,
    Start,
)
MEASURED_WITH = ("loss", "ttt_steps", "step_weights", "in_vocab")
"""The settings that decide what a validation measures."""


def check_parts(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for a part that is no object of its kind, or an abstract base class, which a config can name."""
    for name, example in EXAMPLES.items():
        part = arguments[name]
        if not isinstance(part, BASES):
            raise ValueError(
                f"model.{name} must be an object, such as {type(example).__name__}(), not {part!r:.60}"
            )
        if type(part) in BASES:
            raise ValueError(
                f"model.{name}={type(part).__name__} is an abstract base class: choose one of its subclasses"
            )


def other_objective(checkpoint: Mapping[str, Any], hparams: Mapping[str, Any]) -> list[str]:
    """Return what a checkpoint was trained with, where a module's hyperparameters are different: as ``name=value``."""
    trained = checkpoint.get("hyper_parameters", {}).get("model", {})
    return [
        f"{name}={to_text(trained[name])}"
        for name in MEASURED_WITH
        if name in trained and trained[name] != hparams["model"][name]
    ]
