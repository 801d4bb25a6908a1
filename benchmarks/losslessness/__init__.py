"""The parts of ``benchmarks/lossless.py``."""
