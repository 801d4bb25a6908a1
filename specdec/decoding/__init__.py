"""Lossless speculative decoding. Read decoder, round, proposal, accept and session, in this order."""

from specdec.decoding.decoder import (
    Generation,
    PlainDecoder,
    Request,
    SpeculativeDecoder,
    check_length,
    check_pair,
    warn_unless_made_for,
)
from specdec.decoding.proposal import DraftShape, Proposer
from specdec.decoding.sampling import ChildSampling, LogitsProcessor, Sampling
from specdec.decoding.shapes import Chain, DynamicTree, StaticTree, parse_shape, read_static_tree
from specdec.decoding.tree import DraftTree

__all__ = [
    "Chain",
    "ChildSampling",
    "DraftShape",
    "DraftTree",
    "DynamicTree",
    "Generation",
    "LogitsProcessor",
    "PlainDecoder",
    "Proposer",
    "Request",
    "Sampling",
    "SpeculativeDecoder",
    "StaticTree",
    "check_length",
    "check_pair",
    "parse_shape",
    "read_static_tree",
    "warn_unless_made_for",
]
