"""The frozen target: its features, its verification, its cache."""

from specdec.target.cache import TargetCache
from specdec.target.loading import load_config
from specdec.target.target import Target, TargetOutput

__all__ = ["Target", "TargetCache", "TargetOutput", "load_config"]
