"""Memory and time of training steps and prompts by their length; see ``--help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of `benchmarks`, which is not installed

from benchmarks.length.command import main

if __name__ == "__main__":
    sys.exit(main())
