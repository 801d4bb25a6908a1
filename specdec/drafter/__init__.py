"""The drafter and its axes."""

from specdec.drafter.attention import GQA, MLA, AttentionKind
from specdec.drafter.config import DrafterConfig, DrafterSpec
from specdec.drafter.dry_run import dry_run
from specdec.drafter.entry import Entered, Entry, EntryModule, KVInjection, Narrow, Wide
from specdec.drafter.fusion import Concat, Fusion, LastLayer, ScalarMix
from specdec.drafter.io import load_drafter, save_drafter
from specdec.drafter.model import Drafter
from specdec.drafter.norms import Norm, Norms
from specdec.drafter.target_layer import TargetLayer, TargetNorm
from specdec.drafter.vocab import DraftVocab, most_frequent_ids
from specdec.drafting import (
    FixedSize,
    Leaky,
    MarkovBlock,
    MaskBlock,
    MaskConstant,
    PostNorm,
    PreNorm,
    Recurrence,
    Step,
)

__all__ = [
    "GQA",
    "MLA",
    "AttentionKind",
    "Concat",
    "DraftVocab",
    "Drafter",
    "DrafterConfig",
    "DrafterSpec",
    "Entered",
    "Entry",
    "EntryModule",
    "FixedSize",
    "Fusion",
    "KVInjection",
    "LastLayer",
    "Leaky",
    "MarkovBlock",
    "MaskBlock",
    "MaskConstant",
    "Narrow",
    "Norm",
    "Norms",
    "PostNorm",
    "PreNorm",
    "Recurrence",
    "ScalarMix",
    "Step",
    "TargetLayer",
    "TargetNorm",
    "Wide",
    "dry_run",
    "load_drafter",
    "most_frequent_ids",
    "save_drafter",
]  # fmt: skip
