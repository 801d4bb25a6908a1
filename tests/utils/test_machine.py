import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec.utils import machine
from specdec.utils import machine as module
from specdec.utils.machine import provenance

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "a.txt").write_text("a")
    git(folder, "add", "a.txt")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "command_line", ["specdec", "evaluate", "two words"])
    facts = provenance(seed=3)
    assert facts["command"] == "specdec evaluate 'two words'"
    assert facts["seed"] == 3
    assert provenance()["seed"] is None
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(facts["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=1)
    assert facts["python"] == platform.python_version()
    assert facts["platform"] == platform.platform()
    assert facts["cores"] >= 1
    assert facts["versions"]["specdec"] == specdec.__version__
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


def test_versions_are_those_installed() -> None:
    import torch

    versions = provenance()["versions"]
    # the index's CUDA builds say +cu130 themselves, but not in their metadata
    assert torch.__version__.partition("+")[0] == versions["torch"].partition("+")[0]
    assert {"lightning", "transformers", "tokenizers", "safetensors"} <= set(versions)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, json; from specdec.utils.machine import provenance; facts = provenance();"
        "heavy = {'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules);"
        "print(json.dumps([sorted(heavy), facts['torch_threads'], facts['gpus']]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [[], None, None]


def test_torch_is_asked_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert provenance()["torch_threads"] == torch.get_num_threads()
    if not torch.cuda.is_initialized():
        assert provenance()["gpus"] is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    assert provenance()["gpus"] == ["card 0", "card 1"]


def test_the_cpu_has_its_models_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2: fast\nmodel name\t: other\n")
    assert module._cpu(listing) == "Some CPU @ 2: fast"
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert module._cpu(tmp_path / "none") == "arm"
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert module._cpu(tmp_path / "none") is None


@needs_git
def test_a_clean_and_a_dirty_tree(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    # as inside a hook of another repository
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert module._git(checkout) == (head, False)
    (checkout / "new.txt").write_text("untracked")
    assert module._git(checkout) == (head, True)
    (checkout / "new.txt").unlink()
    (checkout / "a.txt").write_text("changed")
    assert module._git(checkout) == (head, True)


@needs_git
def test_a_repository_around_the_package_is_not_its_own(checkout: Path) -> None:
    inner = checkout / "venv" / "site-packages"
    inner.mkdir(parents=True)
    assert module._git(inner) == (None, None)


@needs_git
def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert module._git(tmp_path) == (None, None)


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("git"), PermissionError("git"), subprocess.TimeoutExpired("git", 20)],
)
def test_git_may_be_missing_or_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (tmp_path / ".git").mkdir()

    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert module._git(tmp_path) == (None, None)
    module._loaded_code.cache_clear()
    facts = provenance()
    module._loaded_code.cache_clear()
    assert (facts["git_commit"], facts["git_dirty"]) == (None, None)


def test_cores_where_affinity_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert module.cores() == os.cpu_count()
