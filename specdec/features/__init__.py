"""The target's features for training: worked out in the step, or read from a cache."""

from specdec.features.source import Cached, Features, FeatureSource, OnTheFly

__all__ = ["Cached", "FeatureSource", "Features", "OnTheFly"]
