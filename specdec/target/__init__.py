"""The frozen target: its features, its verification, its cache."""

from specdec.target.attention import TargetCache
from specdec.target.loading import load_config
from specdec.target.source import EMBEDDED, NotServable, TargetSource
from specdec.target.target import Target, TargetOutput

__all__ = [
    "EMBEDDED",
    "NotServable",
    "Target",
    "TargetCache",
    "TargetOutput",
    "TargetSource",
    "load_config",
]
