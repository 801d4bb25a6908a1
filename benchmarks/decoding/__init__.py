"""The parts of ``benchmarks/decode.py``; ``worker`` and ``of_vllm`` also run in vLLM's environment."""
