"""What is measured so far, so that a run that ends early goes on where it was."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.evaluation.record import Answer, answer_of
from specdec.files import read_json, write_json


class Partial:
    """A folder with a file for every condition and drafter, each whole or absent, that the last of them ends.

    A file is named by the hash of all that decides what is in it, so that a run with other settings finds none.

    Args:
        folder: made when there is something to keep.
        settings: what decides all results, JSON-ready.
        drafters: who they are, JSON-ready; the methods take their places.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], drafters: Sequence[Any]) -> None:
        self.folder, self.settings, self.drafters = folder, settings, drafters

    def find(self, condition: str, drafter: int) -> tuple[list[Answer], dict[str, str]] | None:
        """Answers, and prompts left out with reasons; None if they have to be measured.

        Raises:
            ValueError: the file is broken.
        """
        path = self._path(condition, drafter)
        if not path.exists():
            return None
        found = read_json(path)
        try:
            return [answer_of(one) for one in found["answers"]], dict(found["left_out"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not what specdec robustness keeps: remove it") from error

    def keep(self, condition: str, drafter: int, answers: list[Answer], left_out: dict[str, str]) -> None:
        """Write what was measured.

        Raises:
            ValueError: the disk is full.
        """
        found = {"condition": condition, "answers": [one._asdict() for one in answers], "left_out": left_out}
        write_json(self._path(condition, drafter), found)

    def end(self) -> None:
        """Remove the folder: the results are written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, condition: str, drafter: int) -> Path:
        text = json.dumps([self.settings, condition, self.drafters[drafter]], sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
