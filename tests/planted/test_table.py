"""The documentation's table of planted faults is that of the lists."""

import re
from pathlib import Path

from tests.planted.proofs import PROOFS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "proofs.md"
ROW = re.compile(r"\| ([^|]+) \| [^|]+ \| (\d+) \| (\d+) \| \[[^]]+\]\(\.\./([^)]+)\) \|")


def test_the_table_agrees_with_the_lists() -> None:
    """Each list's own test fails if its proof misses one, so that as many are found as are planted."""
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert rows == [
        (proof.name, str(len(proof.planted)), str(len(proof.planted)), proof.test)
        for proof in PROOFS
    ]


def test_no_fault_is_listed_twice() -> None:
    for proof in PROOFS:
        assert len(set(proof.planted)) == len(proof.planted) and (ROOT / proof.test).is_file()
