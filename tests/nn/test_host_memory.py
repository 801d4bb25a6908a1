"""Freed memory stays with the process."""

import platform
import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from specdec.nn.host_memory import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
def touch():
    torch.ones(64 * 2**20, dtype=torch.uint8)
for _ in range(9):  # the allocator's own small change has to settle
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_pages_are_not_taken_anew() -> None:
    """Four times 64 MB are 65,536 pages of 4 kB; blocks so large are never kept unasked."""
    faults = {}
    for keep in (False, True):
        code = COUNT.format(keep=keep)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        faults[keep] = int(done.stdout)
    assert faults[False] > 60_000 and faults[True] < 100


def test_elsewhere_it_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.nn import host_memory

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not host_memory.keep_freed_memory()
