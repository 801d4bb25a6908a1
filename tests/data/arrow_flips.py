"""Reads a folder of ``save_to_disk``, or a Parquet file, again and again, each time with one flipped bit: what becomes
of it, as a line of JSON. Each reading is a process of its own, which damaged data may end."""

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

from specdec.data.rows import read_rows

OUTCOMES = ("same", "other rows", "refused", "traceback")


def outcome(source: Path, whole: list[object]) -> int:
    """A number of :data:`OUTCOMES`; what is refused is so in one line that names the source."""
    try:
        rows = [row.values for row in read_rows(str(source))]
    except ValueError as error:
        return 2 if str(source) in str(error) and "\n" not in str(error) else 3
    except Exception:  # noqa: BLE001  any other is a traceback
        return 3
    return int(rows != whole)


def main() -> None:
    """``arrow_flips.py SOURCE FLIPS SEED``."""
    source, flips = Path(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(int(sys.argv[3]))
    whole = [row.values for row in read_rows(str(source))]
    counts = Counter[str]()
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    for _ in range(flips):
        flipped = draw.choice(files)
        data = flipped.read_bytes()
        bit = draw.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(changed)
        if (child := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os._exit(outcome(source, whole))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        counts[OUTCOMES[code] if code >= 0 else "died"] += 1
        flipped.write_bytes(data)
    sys.stdout.write(f"{json.dumps(counts)}\n")


if __name__ == "__main__":
    main()
