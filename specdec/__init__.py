"""specdec: train, ablate and trust EAGLE drafters for speculative decoding.

The names of the Python API. Each is imported when it is first asked for, so that ``import specdec`` takes no time.
"""

from typing import TYPE_CHECKING

from specdec.utils.lazily import imported_when_asked_for

__version__ = "0.1.0"

_NAMES = {
    "specdec.target": "Target TargetSource",
    "specdec.drafter": (
        "Drafter DrafterConfig DrafterSpec load_drafter save_drafter Concat LastLayer ScalarMix Narrow Wide Norms "
        "PostNorm PreNorm FixedSize Leaky MarkovBlock MaskConstant GQA MLA"
    ),
    "specdec.data": "Batch ChatData TextData TokenData TokenizedData UnansweredData",
    "specdec.embedded.corpus": "EmbeddedData held_out_prompts",
    "specdec.nn.view": "View",
    "specdec.nn.optimizers": "MuonAdamW",
    "specdec.features": "Answered Cached OnTheFly",
    "specdec.training.building": "FromDrafter FromTarget new_drafter",
    "specdec.training.transplant": "FromTargetLayer",
    "specdec.training.confidence": "ConfidenceLoss",
    "specdec.training.losses": "SmoothL1 SoftCrossEntropy Term WeightedSum",
    "specdec.training.divergences": (
        "ForwardKL HardCrossEntropy JensenShannon LKAlpha LKLambda ReverseKL TopKCrossEntropy TotalVariation"
    ),
    "specdec.training.noise": "UniformNoise",
    "specdec.training.step_weights": "AcceptUntilFail AcceptedLength DPACE Decay",
    "specdec.training.module": "DrafterModule",
    "specdec.training.schedule": "WarmupCosine",
    "specdec.decoding": (
        "AdaptiveChain Chain Chunk DraftedGenerate DynamicTree Generation PlainDecoder Request Sampling "
        "SpeculativeDecoder StaticTree"
    ),
    "specdec.evaluation.run": "EvaluationConfig evaluate",
    "specdec.export": "export_drafter import_drafter",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if TYPE_CHECKING:  # each as itself: type checkers take these for exported
    from specdec.data import Batch as Batch
    from specdec.data import ChatData as ChatData
    from specdec.data import TextData as TextData
    from specdec.data import TokenData as TokenData
    from specdec.data import TokenizedData as TokenizedData
    from specdec.data import UnansweredData as UnansweredData
    from specdec.decoding import AdaptiveChain as AdaptiveChain
    from specdec.decoding import Chain as Chain
    from specdec.decoding import Chunk as Chunk
    from specdec.decoding import DraftedGenerate as DraftedGenerate
    from specdec.decoding import DynamicTree as DynamicTree
    from specdec.decoding import Generation as Generation
    from specdec.decoding import PlainDecoder as PlainDecoder
    from specdec.decoding import Request as Request
    from specdec.decoding import Sampling as Sampling
    from specdec.decoding import SpeculativeDecoder as SpeculativeDecoder
    from specdec.decoding import StaticTree as StaticTree
    from specdec.drafter import GQA as GQA
    from specdec.drafter import MLA as MLA
    from specdec.drafter import Concat as Concat
    from specdec.drafter import Drafter as Drafter
    from specdec.drafter import DrafterConfig as DrafterConfig
    from specdec.drafter import DrafterSpec as DrafterSpec
    from specdec.drafter import FixedSize as FixedSize
    from specdec.drafter import LastLayer as LastLayer
    from specdec.drafter import Leaky as Leaky
    from specdec.drafter import MarkovBlock as MarkovBlock
    from specdec.drafter import MaskConstant as MaskConstant
    from specdec.drafter import Narrow as Narrow
    from specdec.drafter import Norms as Norms
    from specdec.drafter import PostNorm as PostNorm
    from specdec.drafter import PreNorm as PreNorm
    from specdec.drafter import ScalarMix as ScalarMix
    from specdec.drafter import Wide as Wide
    from specdec.drafter import load_drafter as load_drafter
    from specdec.drafter import save_drafter as save_drafter
    from specdec.embedded.corpus import EmbeddedData as EmbeddedData
    from specdec.embedded.corpus import held_out_prompts as held_out_prompts
    from specdec.evaluation.run import EvaluationConfig as EvaluationConfig
    from specdec.evaluation.run import evaluate as evaluate
    from specdec.export import export_drafter as export_drafter
    from specdec.export import import_drafter as import_drafter
    from specdec.features import Answered as Answered
    from specdec.features import Cached as Cached
    from specdec.features import OnTheFly as OnTheFly
    from specdec.nn.optimizers import MuonAdamW as MuonAdamW
    from specdec.nn.view import View as View
    from specdec.target import Target as Target
    from specdec.target import TargetSource as TargetSource
    from specdec.training.building import FromDrafter as FromDrafter
    from specdec.training.building import FromTarget as FromTarget
    from specdec.training.building import new_drafter as new_drafter
    from specdec.training.confidence import ConfidenceLoss as ConfidenceLoss
    from specdec.training.divergences import ForwardKL as ForwardKL
    from specdec.training.divergences import HardCrossEntropy as HardCrossEntropy
    from specdec.training.divergences import JensenShannon as JensenShannon
    from specdec.training.divergences import LKAlpha as LKAlpha
    from specdec.training.divergences import LKLambda as LKLambda
    from specdec.training.divergences import ReverseKL as ReverseKL
    from specdec.training.divergences import TopKCrossEntropy as TopKCrossEntropy
    from specdec.training.divergences import TotalVariation as TotalVariation
    from specdec.training.losses import SmoothL1 as SmoothL1
    from specdec.training.losses import SoftCrossEntropy as SoftCrossEntropy
    from specdec.training.losses import Term as Term
    from specdec.training.losses import WeightedSum as WeightedSum
    from specdec.training.module import DrafterModule as DrafterModule
    from specdec.training.noise import UniformNoise as UniformNoise
    from specdec.training.schedule import WarmupCosine as WarmupCosine
    from specdec.training.step_weights import DPACE as DPACE
    from specdec.training.step_weights import AcceptedLength as AcceptedLength
    from specdec.training.step_weights import AcceptUntilFail as AcceptUntilFail
    from specdec.training.step_weights import Decay as Decay
    from specdec.training.transplant import FromTargetLayer as FromTargetLayer
else:
    __getattr__ = imported_when_asked_for(__name__, _HOMES)
