"""A stand-in for a Python with vLLM, of the standard library: it answers jobs as ``proposals.py`` does.

``$FAKE_PROPOSALS`` is a directory. Jobs are written there as ``jobs.json``; ``answer.json`` in it is every answer, and
without one the process ends.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Answer until standard input ends."""
    folder = Path(os.environ["FAKE_PROPOSALS"])
    sys.stdout.write(json.dumps({"version": "0.0.fake"}) + "\n")
    sys.stdout.flush()
    jobs = []
    for line in sys.stdin:
        jobs.append(json.loads(line))
        (folder / "jobs.json").write_text(json.dumps(jobs))
        if not (folder / "answer.json").exists():
            sys.exit("RuntimeError: the engine did not start")
        sys.stdout.write((folder / "answer.json").read_text().replace("\n", " ") + "\n")
        sys.stdout.flush()
