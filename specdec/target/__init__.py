"""The frozen target: its features, its verification, its cache."""

from specdec.target.cache import TargetCache
from specdec.target.target import Target, TargetOutput

__all__ = ["Target", "TargetCache", "TargetOutput"]
