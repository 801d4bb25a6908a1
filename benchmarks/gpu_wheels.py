"""Download the wheels that ``benchmarks/gpu.py`` needs on a machine with torch, transformers and lightning alone.

Their list is what is printed: name and size of each, and the sum, which must stay under ``--most`` MiB.

``python benchmarks/gpu_wheels.py FOLDER``
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# what the parts import, and what these need
IMPORTED = ("jsonargparse>=4.53", "typeshed-client", "docstring-parser", "omegaconf>=2.4")
# for the tests that need CUDA
TESTS = (
    "pytest>=8.4", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "execnet", "pluggy", "iniconfig", "hypothesis>=6.130",
    "sortedcontainers",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Download them, and print the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the GPU machine's")
    parser.add_argument("--most", type=float, default=16.0, help="MiB that all may take")
    options = parser.parse_args(argv)
    if any(options.folder.glob("*.whl")):
        raise SystemExit(f"{options.folder} holds wheels already: name an empty or a new folder")
    # of the GPU machine, whatever runs here
    platforms = [f"--platform=manylinux{n}_x86_64" for n in ("_2_28", "_2_17", "2014")]
    flags = ["-q", "--no-deps", "--only-binary=:all:", "--implementation=cp", *platforms]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        f"--python-version={options.python}",
        *flags,
    ]
    subprocess.run([*command, "-d", str(options.folder), *IMPORTED, *TESTS], check=True)
    total = 0.0
    for wheel in sorted(options.folder.glob("*.whl")):
        size = wheel.stat().st_size / 2**20
        total += size
        print(f"{size:8.2f} MiB  {wheel.name}")
    print(f"{total:8.2f} MiB  in all")
    return 0 if total <= options.most else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
