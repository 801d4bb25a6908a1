"""Pairs on disk, and what makes the doctor's tests short."""

from pathlib import Path

import pytest

from specdec.diagnostics import doctor_overfit, doctor_setup
from specdec.drafter import DrafterSpec, save_drafter
from specdec.export import export_drafter
from specdec.target import Target
from tests.diagnostics.parity_made import sharp
from tests.engines.conftest import fake_proposals
from tests.export.made import made_drafter

__all__ = ["fake_proposals"]
SMALL = ["--max_new_tokens", "8", "--depth", "2"]


@pytest.fixture
def line(target_directory: Path, tmp_path: Path) -> list[str]:
    """The command for a drafter saved in ``tmp_path / "drafter"``, which is exported in ``tmp_path / "served"``."""
    target = Target.load(target_directory)
    drafter = sharp(made_drafter(DrafterSpec(draft_vocab_size=200), target))
    save_drafter(drafter, tmp_path / "drafter")
    export_drafter(drafter, target, tmp_path / "served")
    return [
        "parity",
        "--target",
        str(target_directory),
        "--drafter",
        str(tmp_path / "drafter"),
        *SMALL,
    ]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less text, and less patience."""
    monkeypatch.setattr(doctor_overfit, "PATIENCE", 50)
    monkeypatch.setattr(doctor_overfit, "ANSWER", 24)
    monkeypatch.setattr(doctor_overfit, "PROMPTS", 2)
    monkeypatch.setattr(doctor_setup, "SAMPLE", 48)
