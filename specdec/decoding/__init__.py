"""Lossless speculative decoding. Read decoder, round, proposal, accept and session, in this order."""

from specdec.decoding.accept import DraftTree, Sampling
from specdec.decoding.decoder import (
    Generation,
    PlainDecoder,
    Request,
    SpeculativeDecoder,
    check_length,
    check_pair,
    warn_unless_made_for,
)
from specdec.decoding.proposal import Chain, ChildSampling, DraftShape, DynamicTree, Proposer
from specdec.decoding.shapes import StaticTree, parse_shape

__all__ = [
    "Chain",
    "ChildSampling",
    "DraftShape",
    "DraftTree",
    "DynamicTree",
    "Generation",
    "PlainDecoder",
    "Proposer",
    "Request",
    "Sampling",
    "SpeculativeDecoder",
    "StaticTree",
    "check_length",
    "check_pair",
    "parse_shape",
    "warn_unless_made_for",
]
