"""A sweep that is killed three times, and one under Ray, beside the sweep that nothing disturbs; see ``--help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks.sweeping.command import main

if __name__ == "__main__":
    sys.exit(main())
