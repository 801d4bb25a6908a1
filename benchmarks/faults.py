"""SIGKILLs of training at every moment, and flipped bits, beside the run that nothing disturbs; see ``--help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks.faulting.command import main

if __name__ == "__main__":
    sys.exit(main())
