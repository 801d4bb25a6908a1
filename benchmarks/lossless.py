"""Speculative decoding beside plain decoding, token for token and law for law; see ``--help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks.losslessness.command import main

if __name__ == "__main__":
    sys.exit(main())
