"""specdec: train, ablate and trust EAGLE drafters for speculative decoding."""

__version__ = "0.1.0"
