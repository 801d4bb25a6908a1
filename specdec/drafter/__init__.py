"""The drafter and its axes."""

from specdec.drafter.config import DrafterConfig, DrafterSpec
from specdec.drafter.drafter import Drafter, Step
from specdec.drafter.dry_run import dry_run
from specdec.drafter.entry import Entered, Entry, EntryModule, Narrow, Wide
from specdec.drafter.fusion import Concat, Fusion, LastLayer
from specdec.drafter.io import load, save
from specdec.drafter.norms import Norms
from specdec.drafter.recurrence import PostNorm, PreNorm, Recurrence
from specdec.drafter.vocab import DraftVocab, choose
from specdec.drafter.weighted_sum import WeightedSum
from specdec.drafter.well_read import tabled

__all__ = [
    "Concat",
    "DraftVocab",
    "Drafter",
    "DrafterConfig",
    "DrafterSpec",
    "Entered",
    "Entry",
    "EntryModule",
    "Fusion",
    "LastLayer",
    "Narrow",
    "Norms",
    "PostNorm",
    "PreNorm",
    "Recurrence",
    "Step",
    "WeightedSum",
    "Wide",
    "choose",
    "dry_run",
    "load",
    "save",
    "tabled",
]
