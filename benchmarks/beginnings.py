"""Beginnings of the embedded target's training text, for ``specdec regenerate``: ``--out FILE.jsonl``.

The drafter that ``decode.py`` is run with learns from what the target writes after them. Held-out files give none: that
benchmark's prompts come from there, and with ``--held_out`` they are written, for ``specdec tune``. See
``benchmarks/README.md``.
"""

import argparse
import json
import sys
from pathlib import Path

from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.corpus import corpus
from specdec.embedded.data import cut_prompts
from specdec.embedded.source import TargetSource
from specdec.files import write_text


def main() -> int:
    """Write them; 2 after a wrong argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held_out", action="store_true", help="of the files held out, as prompts")
    parser.add_argument("--count", type=int, default=3600)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    seed = EmbeddedConfig().seed
    try:
        files = corpus(seed)
        some = files.held_out if args.held_out else files.train
        rows = cut_prompts(some, args.count, args.tokens, seed, TargetSource().load_tokenizer())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not args.held_out:
        rows = [{"id": row["prompt_id"], "text": row["prompt"]} for row in rows]
    write_text(args.out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} beginnings of {args.tokens} tokens: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
