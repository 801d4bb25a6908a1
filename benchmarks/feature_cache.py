"""How long cached training waits for its features; see ``python benchmarks/feature_cache.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks.features.command import main

if __name__ == "__main__":
    sys.exit(main())
