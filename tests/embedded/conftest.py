"""A small standard library: files copied from the real one, so that a training takes a second."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec.embedded.corpus import SEED, corpus


@pytest.fixture(scope="session")
def small_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About forty files of a few thousand characters."""
    real, root = Path(sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("library")
    files = [path for path in sorted(real.glob("*.py")) if 3_000 < path.stat().st_size < 9_000][:40]
    assert len(files) > 20
    for file in files:
        (root / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    return root


def use_library(patch: pytest.MonkeyPatch, root: Path) -> None:
    """The corpus reads the library at ``root``."""
    patch.setattr(
        "specdec.embedded.corpus.sysconfig", SimpleNamespace(get_path=lambda name: str(root))
    )


@pytest.fixture
def library(small_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The corpus reads the small library."""
    use_library(monkeypatch, small_library)
    parts = corpus(SEED)
    assert parts.train and parts.held_out
    return small_library


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
