"""Lossless speculative decoding."""

from specdec.decoding.acceptance import Accepted, accept_greedy
from specdec.decoding.decoder import Generation, PlainDecoder, SpeculativeDecoder, check_length, check_pair
from specdec.decoding.growth import Chain, DynamicTree, Growth
from specdec.decoding.parse import parse_growth
from specdec.decoding.proposer import Proposer
from specdec.decoding.static_tree import StaticTree, read_static_tree
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
    "StaticTree",
    "accept_greedy",
    "check_length",
    "check_pair",
    "parse_growth",
    "read_static_tree",
]
