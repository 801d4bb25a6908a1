"""Filling a cache of the target's features: ``specdec cache``."""
