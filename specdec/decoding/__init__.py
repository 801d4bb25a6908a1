"""Lossless speculative decoding."""

from specdec.decoding.acceptance import Accepted, accept_greedy
from specdec.decoding.decoder import Generation, PlainDecoder, SpeculativeDecoder, check_length, check_pair
from specdec.decoding.growth import Chain, DynamicTree, Growth, parse_growth
from specdec.decoding.proposer import Proposer
from specdec.decoding.tree import DraftTree

__all__ = [
    "Accepted",
    "Chain",
    "DraftTree",
    "DynamicTree",
    "Generation",
    "Growth",
    "PlainDecoder",
    "Proposer",
    "SpeculativeDecoder",
    "accept_greedy",
    "check_length",
    "check_pair",
    "parse_growth",
]
