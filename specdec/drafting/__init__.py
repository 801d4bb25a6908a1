"""How the drafts of a pass are made: one file for each way, its training half and its decoding half side by side.

Read mode, then chained; slots says which tokens learn at which step.
"""

from specdec.drafting.block import BlockDrafting, MaskBlock
from specdec.drafting.chained import Chained, PostNorm, PreNorm, Recurrence
from specdec.drafting.markov import MarkovBlock, MarkovDrafting, MarkovHead
from specdec.drafting.mode import DrafterMemory, DraftingMode, Expand, Frontier, Step
from specdec.drafting.parallel import MaskConstant, Parallel
from specdec.drafting.scaled import FixedSize, Leaky

__all__ = [
    "BlockDrafting",
    "Chained",
    "DrafterMemory",
    "DraftingMode",
    "Expand",
    "FixedSize",
    "Frontier",
    "Leaky",
    "MarkovBlock",
    "MarkovDrafting",
    "MarkovHead",
    "MaskBlock",
    "MaskConstant",
    "Parallel",
    "PostNorm",
    "PreNorm",
    "Recurrence",
    "Step",
]
