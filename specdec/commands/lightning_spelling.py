"""LightningCLI's spellings that specdec does not take, answered with specdec's before anything slow is imported."""

import logging
import re
import shlex
from collections.abc import Iterable, Sequence

log = logging.getLogger(__name__)

NAMES = {"optimizer": "model.optimizer", "lr_scheduler": "model.schedule"}
VARIABLE = re.compile(r"PL_(?:FIT__)?((?:TRAINER|MODEL|DATA|CHECKPOINT|ACCEPTANCE)__\w+|CONFIG)")


def check_lightning_spelling(words: Sequence[str]) -> None:
    """Raise ValueError, with what to write instead, for LightningCLI's ``--optimizer`` and ``--lr_scheduler``."""
    translated: list[str] = []
    is_translating = False
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.removeprefix("--").partition("=")
            name, dot, rest = option.partition(".")
            is_translating = name in NAMES
            word = f"--{NAMES.get(name, name)}{dot}{rest}{equals}{value}"
        if is_translating:
            translated.append(word)
    if translated:
        raise ValueError(
            "LightningCLI's --optimizer and --lr_scheduler are --model.optimizer and --model.schedule here: write "
            f"{shlex.join(translated)}; a scheduler advances after every optimizer step, not after every epoch"
        )


def warn_of_variables(names: Iterable[str]) -> None:
    """Log what LightningCLI could read from variables of the environment, which specdec does not: a study's arms would
    inherit them unseen."""
    for name in sorted(names):
        if match := VARIABLE.fullmatch(name):
            option = match[1].lower().replace("__", ".")
            log.warning(
                "%s has no effect: specdec reads no options from the environment: give --%s",
                name,
                option,
            )
