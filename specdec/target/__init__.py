"""The frozen target: its features, its verification, its cache."""

from specdec.target.attention import TargetCache
from specdec.target.loading import load_config
from specdec.target.target import EMBEDDED, NotServable, Target, TargetOutput, TargetSource

__all__ = [
    "EMBEDDED",
    "NotServable",
    "Target",
    "TargetCache",
    "TargetOutput",
    "TargetSource",
    "load_config",
]
