"""``.ci/environments``: what is checked already is not checked again, and the table says what was run."""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "environments"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="not a checkout")


@pytest.fixture
def environments() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("environments", str(SCRIPT))
    spec = importlib.util.spec_from_loader("environments", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_finished_check_is_not_run_again(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "build", lambda folder, wanted: Path(sys.executable))
    ran: list[Path] = []

    def run_tests(python: Path, log: Path, *selection: str) -> str:
        ran.append(log)
        return "9 passed"

    monkeypatch.setattr(environments, "tests", run_tests)
    monkeypatch.setattr(environments, "quick_start", lambda *words: "failed: no memory")
    out = tmp_path / "table.md"
    command = [str(tmp_path), "--environments", "3.11:2.13.0:5.20.2", "--tests", "tests/nn"]
    for checks, runs, status in ((["tests"], 1, 0), (["tests", "quick start"], 1, 1)):
        assert environments.main([*command, "--checks", *checks, "--out", str(out)]) == status
        assert len(ran) == runs
    (row,) = json.loads(out.with_suffix(".json").read_text()).values()
    assert row["tests"].startswith("9 passed") and row["quick start"].startswith(
        "failed: no memory"
    )
    text = out.read_text()
    assert (
        "Tests: of `tests/nn`" in text
        and "| 9 passed (0 s) | failed: no memory (0 s) | not run |" in text
    )


@pytest.mark.slow
def test_a_check_that_dies_has_failed_and_is_run_again(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    dying = f"*pytest*) echo run >> {tmp_path}/runs; kill -9 $$;;"
    python.write_text(f'#!/bin/sh\ncase "$*" in {dying} esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(environments, "build", lambda folder, wanted: python)
    out = tmp_path / "table.md"
    command = [str(tmp_path), "--environments", "3.11:2.13.0:5.20.2", "--checks", "tests"]
    for _ in range(2):
        assert environments.main([*command, "--out", str(out)]) == 1
    (row,) = json.loads(out.with_suffix(".json").read_text()).values()
    assert row["tests"].startswith("failed: no output, status -9")
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


@pytest.mark.slow
def test_of_failed_tests_the_files_alone_are_run_again(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "build", lambda folder, wanted: Path(sys.executable))
    ran: list[tuple[str, ...]] = []
    failure = "failed: 1 failed, 9 passed; tests/a/test_b.py::test_c[d-1]"
    said = iter([failure, failure, "3 passed"])

    def run_tests(python: Path, log: Path, *selection: str) -> str:
        ran.append(selection)
        return next(said)

    monkeypatch.setattr(environments, "tests", run_tests)
    out = tmp_path / "table.md"
    command = [str(tmp_path), "--environments", "3.11:2.13.0:5.20.2", "--checks", "tests"]
    statuses = [environments.main([*command, "--out", str(out)]) for _ in range(3)]
    assert statuses == [1, 1, 0]
    assert ran == [(), ("tests/a/test_b.py",), ("tests/a/test_b.py",)]
    (row,) = json.loads(out.with_suffix(".json").read_text()).values()
    assert row["tests"].startswith("3 passed (0 s) at ")
    assert row["tests"].count("1 failed, 9 passed") == 1 and failure in row["first"]


def test_other_tests_than_before_are_refused(environments: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    out.with_suffix(".json").write_text(json.dumps({"x": {"selection": "tests/nn"}}))
    with pytest.raises(SystemExit, match="other tests"):
        environments.main([str(tmp_path), "--tests", "tests/target", "--out", str(out)])


@pytest.mark.parametrize("text", ["3.11", "3.11:2.13.0", "a:b:c:d"])
def test_versions_that_are_none(environments: ModuleType, text: str) -> None:
    with pytest.raises(SystemExit, match="is no PYTHON:TORCH:TRANSFORMERS"):
        environments.Environment.parse(text)


def test_a_python_that_is_not_there(environments: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"there is no python9\.9 here"):
        environments.interpreter("9.9")
