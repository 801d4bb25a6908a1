"""The campaign of faults: its judgements see what they should, on commands that are quickly run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.faults import flips, hostile, inputs, kills, links, rims, world
from benchmarks.faults.__main__ import report
from benchmarks.faults.command import TRACEBACK, Command, Ended

# of Python 3.12
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def ended(status: int | None, err: str = "", out: str = "") -> Ended:
    return Ended(status, out, err, 1.0, 1.0, None)


def test_a_forked_command_is_told_of_as_it_ended(tmp_path: Path) -> None:
    found = Command(["fitt"], cwd=tmp_path, inside=lambda: os.getcwd).wait()
    assert (found.status, found.told) == (2, str(tmp_path)) and "did you mean fit?" in found.last
    assert Command(["--version"], cwd=tmp_path).wait().out.startswith("specdec ")
    waits = Command(["--version"], cwd=tmp_path, inside=lambda: signal.pause())
    assert waits.runs() and waits.wait(0.1).status is None
    killed = Command(["--version"], cwd=tmp_path, inside=lambda: signal.pause())
    killed.kill()
    assert killed.wait().status == -signal.SIGKILL
    raises = Command(["--version"], cwd=tmp_path, inside=lambda: lambda: 1 / 0).wait()
    assert raises.status != 0 or TRACEBACK in raises.err


def test_flips_are_judged_by_what_was_told_and_made(tmp_path: Path) -> None:
    file, reference = tmp_path / "a.json", {"weights": "1"}

    def judged(found: Ended, made: str = "1") -> str:
        return flips._outcome(
            found, file, tmp_path, reference, lambda: {"weights": made}, "drafter"
        )

    assert judged(ended(0)) == "identical" and judged(ended(0), "2") == "silent"
    assert judged(ended(2, "specdec: error: x/a.json: no")) == "named"
    assert judged(ended(2, f"specdec: error: {tmp_path}: no")) == "folder"
    assert judged(ended(2, "specdec: error: no")) == "unnamed" and judged(ended(None)) == "hung"
    assert judged(ended(1, f"{TRACEBACK}: a.json")) == judged(ended(-7)) == "traceback"


@pytest.mark.parametrize("seed", range(12))
def test_what_changes_behind_a_link_is_seen(tmp_path: Path, seed: int) -> None:
    copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    (copy / "folder").mkdir(parents=True)
    (copy / "folder" / "file").write_text("a")
    (copy / "file").write_text("a")
    folder = links.Folder(1, copy, (".claimed",), lambda copy: [])
    link, behind = links._link(folder, copy, elsewhere, random.Random(seed))
    before = links._content(behind)
    assert before and links._content(behind) == before
    file = link / "file" if link.is_dir() else link
    file.write_text("another text")
    assert links._content(behind) != before
    (link / "new" if link.is_dir() else behind).write_text("a")
    assert links._content(behind) != before


def test_bad_inputs_are_judged_by_status_lines_and_memory() -> None:
    count = inputs.Count("x")
    inputs._judge(count, ended(2, "specdec fit: error: no\n"), "good refusal")
    assert count.findings == []
    for found in (ended(0), ended(None), ended(-11), ended(1, "a\nb\nc\nd\n"), ended(1, TRACEBACK)):
        inputs._judge(count, found, "bad")
    inputs._judge(count, ended(2)._replace(peak_mb=9e9), "bad")
    assert [count.accepted, count.hung, count.died, count.wordy, count.traceback, count.memory] == [
        1
    ] * 6
    assert count.inputs == 7 and len(count.findings) == 6


def test_a_killed_run_that_differs_is_counted(tmp_path: Path) -> None:
    run = tmp_path / "run" / "out"
    (run / "drafter").mkdir(parents=True)
    (run / "losses.txt").write_text("0 0 0x1p+0\n1 0 0x1p+1\n")
    (run / "drafter" / "model.safetensors").write_bytes(b"1")
    kind = kills.Kind(1, lambda out: [], world.of_fit, ())
    reference = world.of_fit(run)
    kills._judge(count := kills.Count("x"), ended(0), reference, kind, run)
    assert (count.losses, count.differing, count.parts, count.unequal, count.findings) == (
        2,
        0,
        1,
        0,
        [],
    )
    (run / "losses.txt").write_text("0 0 0x1p+0\n1 0 0x1p+2\n")
    (run / "drafter" / "model.safetensors").write_bytes(b"2")
    (run.parent / ".tmp-1").mkdir()
    kills._judge(count, ended(2, "no"), reference, kind, run)
    assert (count.differing, count.unequal, count.failed, count.left_over) == (1, 1, 1, 1)


def test_a_command_is_killed_before_the_rename_that_is_drawn(tmp_path: Path) -> None:
    def inside():  # type: ignore[no-untyped-def]
        behind = kills.renames_may_kill()
        while not kills._orders(os.getpid()).exists():
            time.sleep(0.01)
        time.sleep(0.05)  # until the number is written
        for number in range(kills.RENAMES):
            (tmp_path / "file").touch()
            (tmp_path / "file").rename(tmp_path / f"{number}")
        return behind

    draw = random.Random(0)
    renamed = draw.randint(1, kills.RENAMES) - 1
    command = Command(["--version"], cwd=tmp_path, inside=inside)
    assert kills.before_a_rename(command, tmp_path, random.Random(0), 1.0)
    assert not kills._orders(command.pid).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"file", *map(str, range(renamed))}


def test_the_watch_sees_what_a_hostile_file_does(tmp_path: Path) -> None:
    bad, room = hostile.planted(tmp_path / "bad"), tmp_path / "room"
    room.mkdir()

    def inside():  # type: ignore[no-untyped-def]
        sys.addaudithook(watch := hostile.Watch(bad, [room]))
        (room / "fine").write_text("x")
        (tmp_path / "elsewhere").write_text("x")
        sys.path.insert(0, str(bad))
        import modeling_evil  # type: ignore[import-not-found]  # noqa: F401

        subprocess.run([str(bad / "evil.sh")], check=True)
        return watch.found

    seen = {tuple(one) for one in Command(["--version"], cwd=bad, inside=inside).wait().told}
    assert ("written", f"open {tmp_path / 'elsewhere'}") in seen
    assert ("imported", str(bad / "modeling_evil.py")) in seen
    assert any(kind == "started" and "evil.sh" in text for kind, text in seen)
    assert not any("fine" in text for _, text in seen) and (bad / hostile.MARK).exists()


def test_a_full_disk_is_one(tmp_path: Path) -> None:
    with rims.disk(tmp_path / "disk", 4096) as (limit, enlarge):

        def write() -> bool:
            try:
                (tmp_path / "disk" / "file").write_bytes(bytes(100_000))
            except OSError:
                return False
            return True

        full = Command(
            ["--version"], cwd=tmp_path, inside=lambda: ((limit or (lambda: None))(), write)[1]
        ).wait()
        assert full.told is False
        enlarge()
        assert write()
    assert not (tmp_path / "disk").exists()


def test_the_report_has_figures_and_findings() -> None:
    about = {"command": "x", "cpu": "c", "cores": 2, "threads": 1, "memory_gb": 1, "python": "3", "versions": {},
             "git_commit": "a", "git_dirty": False, "date": "2000-01-01", "load_at_start": [0]}  # fmt: skip
    count = {"kind": "fit", "kills": 3, "runs": 1, "losses": 9, "differing": 1, "parts": 1, "unequal": 0, "failed": 0,
             "left_over": 0, "findings": ["a loss `differs`"]}  # fmt: skip
    text = "\n".join(report(about, {"kills: fit": [count]}, 1.0))
    assert "| fit | 3 | 1 | 1 of 9 | 0 of 1 | 0 | 0 |" in text and "- fit: `a loss differs`" in text
    assert "Hostile" not in text


def test_options_are_taken_out_of_a_command() -> None:
    argv = ["fit", "--data", "T", "--data.train", "x", "--out", "o"]
    assert world.without(argv, "data") == ["fit", "--out", "o"]
    assert world.without(argv, "data.train") == ["fit", "--data", "T", "--out", "o"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute on two idle cores
def test_a_quick_campaign_reports_all_parts(tmp_path: Path) -> None:
    out = tmp_path / "faults.md"
    words = [
        sys.executable,
        "-m",
        "benchmarks.faults",
        "--quick",
        "--times",
        "0.4",
        "--out",
        str(out),
    ]
    done = subprocess.run(words, cwd=harness.ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1) and "BROKEN" not in done.stderr, done.stderr[-3000:]
    parts = json.loads(out.with_suffix(".json").read_text())["parts"]
    for part in ("kills", "flips", "inputs", "rims", "hostile"):
        assert any(name.startswith(part) for name in parts), part
    killed = [
        count for name, counts in parts.items() if name.startswith("kills") for count in counts
    ]
    assert sum(one["kills"] for one in killed) >= 4 and not any(
        one["unequal"] or one["differing"] for one in killed
    )
    assert not out.with_suffix(".partial.json").exists()
