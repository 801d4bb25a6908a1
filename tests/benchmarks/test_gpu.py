"""The GPU's benchmark: what was measured stays when a part fails or takes too long."""

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_parts.__main__ import PARTS

ABOUT = {
    "command": "python x", "cpu": "a CPU", "cores": 2, "threads": 1, "memory_gb": 1, "python": "3.12.1", "versions": {},
    "git_commit": "abc", "git_dirty": False, "date": "2026-11-29T00", "load_at_start": [0.0],
}  # fmt: skip


def test_every_part_has_a_table_and_is_there() -> None:
    options = gpu.parser().parse_args(["--peers", "python", "--vllm", "python"])
    runs = [run for group in gpu.groups_of(options) for run in group]
    assert {run.part for run in runs} == set(PARTS)
    assert {run.title for run in runs} == set(gpu.TABLES)
    # flex attention, and both sizes' training, come before all else
    assert [run.part for run in runs[:4]] == ["attention", "training", "training", "decoding"]


def test_lines_are_in_the_file_as_they_come(tmp_path: Path) -> None:
    report = gpu.Report(tmp_path / "r.md", ABOUT, "a GPU")
    report.add("Proofs of the target", ["1B", "bfloat16", "sound", "2.0"])
    assert "| 1B | bfloat16 | sound | 2.0 |" in (tmp_path / "r.md").read_text()
    report.fail("Decoding, 1B: out of memory")
    report.add("Decoding beside vLLM", ["| as it came |"])
    text = (tmp_path / "r.md").read_text()
    assert "**Failed**: Decoding, 1B: out of memory" in text
    assert "| 1B | bfloat16 | sound | 2.0 |" in text and "\n| as it came |\n" in text


@pytest.mark.slow
def test_a_part_that_fails_is_told_by_its_last_words(tmp_path: Path) -> None:
    run = gpu.Run("Proofs of the target", "no such part", {}, 60)
    with pytest.raises(ValueError, match="KeyError: 'no such part'"):
        list(gpu.lines_of(run, 120, tmp_path / "log"))


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    run = gpu.Run("Proofs of the target", "proofs", {"name": "8B", "device": "cpu"}, 60)
    with pytest.raises(ValueError, match="ended after 0 s"):
        list(gpu.lines_of(run, 0.2, tmp_path / "log"))


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no wheel lies there"):
        gpu.install(tmp_path, str(tmp_path / "site"))
