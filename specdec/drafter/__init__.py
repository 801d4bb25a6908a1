"""The drafter and its axes."""

from specdec.drafter.axes import (
    Concat,
    Entered,
    Entry,
    EntryModule,
    Fusion,
    LastLayer,
    Narrow,
    Norm,
    Norms,
    PostNorm,
    PreNorm,
    Recurrence,
    ScalarMix,
    Wide,
)  # fmt: skip
from specdec.drafter.config import DrafterConfig, DrafterSpec
from specdec.drafter.io import load, save
from specdec.drafter.model import Drafter, DraftVocab, Step, choose
from specdec.drafter.parts import dry_run

__all__ = [
    "Concat", "DraftVocab", "Drafter", "DrafterConfig", "DrafterSpec", "Entered", "Entry", "EntryModule", "Fusion",
    "LastLayer", "Narrow", "Norm", "Norms", "PostNorm", "PreNorm", "Recurrence", "ScalarMix", "Step", "Wide", "choose",
    "dry_run", "load", "save",
]  # fmt: skip
