"""A cache that tests read, and copies that they damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.target import Target
from tests.features.made import Texts, fill, target_of


@pytest.fixture
def target(target_directory: Path) -> Target:
    return target_of(target_directory)


@pytest.fixture(scope="session")
def whole(target_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never to be changed."""
    return fill(tmp_path_factory.mktemp("cache") / "whole", target_of(target_directory), Texts())


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Callable[[], Path]:
    """Copies of it."""
    made = []

    def copy() -> Path:
        made.append(tmp_path / f"copy{len(made)}")
        return Path(shutil.copytree(whole, made[-1]))

    return copy
