"""The study card: what a study found, with intervals, corrections and what it takes to run it again."""

from specdec.card.write import write

__all__ = ["write"]
