"""``benchmarks/sweep.py``."""
