"""What makes the doctor's tests short."""

import pytest

from specdec.diagnostics.doctor import model_checks, setup


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less text, and less patience."""
    monkeypatch.setattr(model_checks, "PATIENCE", 10)
    monkeypatch.setattr(model_checks, "ANSWER", 24)
    monkeypatch.setattr(model_checks, "PROMPTS", 2)
    monkeypatch.setattr(setup, "SAMPLE", 48)
