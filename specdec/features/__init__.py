"""The target's features for training: computed in the step, streamed from other processes, or read from a cache."""

from specdec.features.answered import Answered
from specdec.features.source import Cached, Features, FeatureSource, OnTheFly
from specdec.features.streamed import Streamed

__all__ = ["Answered", "Cached", "FeatureSource", "Features", "OnTheFly", "Streamed"]
