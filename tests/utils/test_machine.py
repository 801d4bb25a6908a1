import os
from pathlib import Path

import pytest

from specdec.utils import machine as host


def test_memory_is_the_least_of_kernel_and_group(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "group"
    proc.mkdir()
    group.mkdir()
    assert host.free_memory(proc, group) is None and host.memory(proc, group) is None
    (proc / "meminfo").write_text("MemTotal:       9000 kB\nMemAvailable:       5000 kB\n")
    (group / "memory.max").write_text("max\n")
    assert host.free_memory(proc, group) == 5000 * 1024 and host.memory(proc, group) == 9000 * 1024
    (group / "memory.max").write_text("3000\n")
    (group / "memory.current").write_text("1000\n")
    assert host.free_memory(proc, group) == 2000 and host.memory(proc, group) == 3000
    (group / "memory.stat").write_text("anon 400\ninactive_file 600\n")
    assert host.free_memory(proc, group) == 2600


def test_cores_where_affinity_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert host.cores() == os.cpu_count()
