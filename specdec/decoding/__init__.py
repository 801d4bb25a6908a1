"""Lossless speculative decoding. Read decoder, round, proposal, accept and session, in this order."""

from specdec.decoding.accept import DraftTree, Sampling
from specdec.decoding.adaptive_chain import AdaptiveChain
from specdec.decoding.checks import check_length, check_pair, warn_unless_made_for
from specdec.decoding.decoder import PlainDecoder, SpeculativeDecoder
from specdec.decoding.generation import Chunk, Generation, Request, continuation
from specdec.decoding.hugging_face import DraftedGenerate
from specdec.decoding.parse import parse_shape
from specdec.decoding.proposal import Proposer
from specdec.decoding.recording import RecordedText, RecordingDecoder
from specdec.decoding.shapes import Chain, ChildSampling, DraftShape, DynamicTree
from specdec.decoding.static_tree import StaticTree

__all__ = [
    "AdaptiveChain",
    "Chain",
    "ChildSampling",
    "Chunk",
    "DraftShape",
    "DraftTree",
    "DraftedGenerate",
    "DynamicTree",
    "Generation",
    "PlainDecoder",
    "Proposer",
    "RecordedText",
    "RecordingDecoder",
    "Request",
    "Sampling",
    "SpeculativeDecoder",
    "StaticTree",
    "check_length",
    "check_pair",
    "continuation",
    "parse_shape",
    "warn_unless_made_for",
]
