"""What an evaluation has decoded so far, in specdec's cache, so that it continues where it was interrupted."""

import json
import logging
from pathlib import Path
from typing import Any, Self

from specdec.utils.files import cache_place
from specdec.utils.journal import Journal, JournalBusyError
from specdec.utils.machine import allowed_modules, code_version

log = logging.getLogger(__name__)

OF_THE_MACHINE = ("cpu", "cores", "gpus", "versions")  # of its provenance


class PartialResults:
    """Waves of prompts that are decoded; of another evaluation, other code or another machine there are others.

    A cache that cannot be written costs a warning, not the evaluation. ``entries`` are the waves of earlier processes.

    Args:
        context: of the evaluation: its target, drafter, settings and provenance.
        out: the directory of its results, if one was named.
        is_kept: False keeps nothing, where not all that decides the results is known.
    """

    def __init__(self, context: dict[str, Any], out: Path | None, is_kept: bool = True) -> None:
        settings = {
            "out": str(out.resolve()) if out else None,
            "code": [code_version(), allowed_modules()],
            "machine": {name: context["provenance"][name] for name in OF_THE_MACHINE},
            **{name: context[name] for name in ("target", "drafter", "settings")},
        }
        self.path = cache_place("evaluations", settings).with_suffix(".journal")
        self.entries: list[dict[str, Any]] = []
        self._journal: Journal | None = None
        if is_kept:
            journal_settings = json.loads(json.dumps(settings))
            self._journal = Journal(self.path, "specdec.evaluate", journal_settings)
        self._is_empty = True

    def __enter__(self) -> Self:
        if self._journal is not None:
            try:
                self.entries = self._journal.__enter__().entries
            except ValueError as error:
                self._journal = None
                self._warn(error)
            self._is_empty = not self.entries
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._journal is None:
            return
        self._journal.__exit__(kind, *raised)
        # what was refused would be refused again
        if self._is_empty or (kind is not None and issubclass(kind, ValueError)):
            self.discard()

    def append(self, entry: dict[str, Any]) -> None:
        """Keep a wave."""
        if self._journal is None:
            return
        try:
            self._journal.append(entry)
            self._is_empty = False
        except ValueError as error:
            self._journal.__exit__()
            self._journal = None
            self._warn(error)

    def discard(self) -> None:
        """Remove what is kept."""
        self.path.unlink(missing_ok=True)

    @property
    def continued_after(self) -> list[int]:
        """The numbers of prompts after which another process continued the evaluation."""
        points = {entry["begun_at"] for entry in self.entries}
        points.add(sum(len(entry["prompts"]) for entry in self.entries))
        return sorted(points - {0})

    def _warn(self, error: ValueError) -> None:
        """Say that nothing is kept; a damaged journal is an error."""
        if not isinstance(error, JournalBusyError) and not isinstance(error.__cause__, OSError):
            raise error
        log.warning("if this evaluation is interrupted, it starts again: %s", error)
