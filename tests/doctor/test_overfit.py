"""The overfitted sample: learnt, cut off by the time, or not worth it."""

import dataclasses
from pathlib import Path

from specdec.doctor.examine import made
from specdec.doctor.finding import Verdict
from specdec.doctor.report import curve
from specdec.optimizers import AdamW
from specdec.training.noise import GaussianNoise
from tests.doctor.made import chats, design, learner, subject


def test_every_draft_of_the_sample_is_accepted(tmp_path: Path) -> None:
    """Noise of the set-up is left out; the figure is drawn from what was looked at."""
    checked = subject(chats(tmp_path), learner(noise=GaussianNoise(5.0), ttt_steps=2))
    loss, accepted = made("overfit", checked)
    assert loss.verdict is accepted.verdict is Verdict.SOUND and accepted.figure == 1
    assert "0 refused" in accepted.said and "the set-up's optimizer" in accepted.said
    looks = checked.curve
    assert looks[-1]["right"] > 0.97 and looks[0]["right"] < 0.9 and looks[0]["loss"] > looks[-1]["loss"]
    curve(looks, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_a_rate_that_is_too_slow_is_helped(tmp_path: Path) -> None:
    """The set-up's own optimizer has a share of the time, and AdamW the rest; the time ends it."""
    checked = subject(chats(tmp_path), learner(optimizer=lambda p: AdamW(p, lr=1e-6), ttt_steps=1), seconds=1e-3)
    found = made("overfit", checked)
    assert found[-1].verdict is Verdict.UNCHECKED and "the time was over" in found[-1].said
    assert {look["optimizer"] for look in checked.curve} == {"the set-up's optimizer", "AdamW at 0.01"}


def test_what_the_drafter_cannot_say_tells_nothing(tmp_path: Path) -> None:
    (found,) = made(
        "overfit", subject(chats(tmp_path), learner(dataclasses.replace(design("eagle3"), draft_vocab_size=2)))
    )
    assert found.verdict is Verdict.UNCHECKED and "over and over" in found.said


def test_what_cannot_be_learnt_is_a_fault(tmp_path: Path) -> None:
    """Of all parts one norm's scale is trained."""
    checked = subject(chats(tmp_path), learner(train_head=False, ttt_steps=1))
    checked.drafter.requires_grad_(False).norms.embed.requires_grad_(True)
    _, accepted = made("overfit", checked)
    assert accepted.verdict is Verdict.FAULTY and "learning stopped by itself" in accepted.said
