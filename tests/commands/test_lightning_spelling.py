"""LightningCLI's habits are answered with what specdec takes."""

import logging
import re
import shlex

import pytest

from specdec.cli import check_command_line
from specdec.commands.lightning_spelling import check_lightning_spelling, warn_of_variables

HABIT = (
    "--optimizer torch.optim.AdamW --optimizer.lr=1e-4 --trainer.max_steps 5 "
    "--lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR --lr_scheduler.T_max 100"
)
ANSWER = (
    "--model.optimizer torch.optim.AdamW --model.optimizer.lr=1e-4 "
    "--model.schedule=torch.optim.lr_scheduler.CosineAnnealingLR --model.schedule.T_max 100"
)


@pytest.mark.parametrize("command", ["fit", "plan", "doctor"])
def test_optimizer_and_scheduler_are_translated(command: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"write {ANSWER}; a scheduler advances")):
        check_command_line(command, HABIT.split())


def test_the_answer_is_a_command_line_that_specdec_takes() -> None:
    check_lightning_spelling(shlex.split(ANSWER))
    check_command_line("fit", shlex.split(ANSWER))


def test_a_variable_of_the_environment_is_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_STEPS", "3")
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")  # Lightning's, and no option
    with caplog.at_level(logging.WARNING, logger="specdec"):
        check_command_line("fit", [])
        check_command_line("presets", [])
    assert [record.getMessage() for record in caplog.records] == [
        "PL_FIT__TRAINER__MAX_STEPS has no effect: specdec reads no options from the environment: "
        "give --trainer.max_steps"
    ]


@pytest.mark.parametrize(
    ("variable", "option"),
    [("PL_CONFIG", "--config"), ("PL_TRAINER__DEVICES", "--trainer.devices")],
)
def test_variables_with_and_without_the_subcommand(
    variable: str, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="specdec"):
        warn_of_variables([variable, "PLAIN"])
    assert caplog.text.strip().endswith(f"give {option}") and len(caplog.records) == 1
