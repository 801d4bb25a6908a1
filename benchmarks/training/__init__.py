"""The parts of ``benchmarks/train_step.py``; ``worker`` and what it loads also run in the peers' environment."""
