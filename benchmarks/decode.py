"""Batch-1 decoding of specdec beside vLLM and transformers; see ``python benchmarks/decode.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks.decoding.command import main

if __name__ == "__main__":
    sys.exit(main())
