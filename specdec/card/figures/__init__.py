"""The card's figures: numbers of ``card.json`` as PNG files."""

from specdec.card.figures.draw import draw

__all__ = ["draw"]
