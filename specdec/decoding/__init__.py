"""Lossless speculative decoding."""

from specdec.decoding.children import Children
from specdec.decoding.confident_chain import ConfidentChain
from specdec.decoding.decoder import PlainDecoder, SpeculativeDecoder
from specdec.decoding.growth import Chain, DynamicTree, Growth
from specdec.decoding.pair import check_made_for, check_pair, warn_unless_made_for
from specdec.decoding.parse import parse_growth
from specdec.decoding.proposer import Proposer
from specdec.decoding.request import Generation, Request, check_length
from specdec.decoding.sampling import Sampling
from specdec.decoding.static_tree import StaticTree, read_static_tree
from specdec.decoding.tree import DraftTree
from specdec.decoding.warp import Warp

__all__ = [
    "Chain",
    "Children",
    "ConfidentChain",
    "DraftTree",
    "DynamicTree",
    "Generation",
    "Growth",
    "PlainDecoder",
    "Proposer",
    "Request",
    "Sampling",
    "SpeculativeDecoder",
    "StaticTree",
    "Warp",
    "check_length",
    "check_made_for",
    "check_pair",
    "parse_growth",
    "read_static_tree",
    "warn_unless_made_for",
]
