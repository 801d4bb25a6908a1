"""What makes the doctor's tests short."""

import pytest

from specdec.doctor import lesson, sample, subject


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less text, and less patience."""
    monkeypatch.setattr(lesson, "EVERY", 5)
    monkeypatch.setattr(lesson, "PATIENCE", 5)
    monkeypatch.setattr(sample, "ANSWER", 24)
    monkeypatch.setattr(sample, "PROMPTS", 2)
    monkeypatch.setattr(subject, "SAMPLE", 48)
