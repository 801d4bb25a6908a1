"""The target's features for training: worked out in the step, or read from a cache."""

from specdec.features.cached import Cached
from specdec.features.source import Features, OnTheFly, Source

__all__ = ["Cached", "Features", "OnTheFly", "Source"]
