"""Which drafts the target takes, so that what comes out is the target's own."""

from specdec.decoding.rules.greedy import Greedy
from specdec.decoding.rules.one_hot import OneHot
from specdec.decoding.rules.rule import Drafts, Noise, Rule, Verdict, ancestors
from specdec.decoding.rules.with_replacement import WithReplacement
from specdec.decoding.rules.without_replacement import WithoutReplacement

__all__ = [
    "Drafts",
    "Greedy",
    "Noise",
    "OneHot",
    "Rule",
    "Verdict",
    "WithReplacement",
    "WithoutReplacement",
    "ancestors",
]
