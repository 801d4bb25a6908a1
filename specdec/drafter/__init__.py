"""The drafter and its axes."""

from specdec.drafter.config import DrafterConfig, DrafterSpec
from specdec.drafter.drafter import Drafter, Step
from specdec.drafter.entry import Entry, Narrow, Wide
from specdec.drafter.fusion import Concat, Fusion, LastLayer
from specdec.drafter.io import load, save
from specdec.drafter.norms import Norms
from specdec.drafter.recurrence import PostNorm, PreNorm, Recurrence
from specdec.drafter.vocab import DraftVocab, choose

__all__ = [
    "Concat",
    "DraftVocab",
    "Drafter",
    "DrafterConfig",
    "DrafterSpec",
    "Entry",
    "Fusion",
    "LastLayer",
    "Narrow",
    "Norms",
    "PostNorm",
    "PreNorm",
    "Recurrence",
    "Step",
    "Wide",
    "choose",
    "load",
    "save",
]
