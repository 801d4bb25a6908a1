"""One EAGLE-3 training step of specdec beside other trainers; see ``python benchmarks/train_step.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks.training_step.command import main

if __name__ == "__main__":
    sys.exit(main())
