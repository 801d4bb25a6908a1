"""The one way in which this reference says no."""


class Misread(ValueError):  # noqa: N818  a verdict
    """The engine would refuse the directory, or take it for something else without a word."""
