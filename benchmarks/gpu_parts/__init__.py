"""What ``benchmarks/gpu.py`` measures, a part a file, each in a process of its own."""
