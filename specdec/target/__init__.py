"""The frozen target: its features, its verification, its cache."""

from specdec.target.attention import TargetCache
from specdec.target.loading import load_config
from specdec.target.target import EMBEDDED, Target, TargetOutput, TargetSource

__all__ = ["EMBEDDED", "Target", "TargetCache", "TargetOutput", "TargetSource", "load_config"]
