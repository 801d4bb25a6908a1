"""What an evaluation has decoded so far, in specdec's cache, so that it continues where it was interrupted."""

import contextlib
import json
import logging
from typing import Any, Self

from specdec.utils.files import cache_place
from specdec.utils.journal import Journal, JournalBusyError
from specdec.utils.machine import allowed_modules, loaded_code

log = logging.getLogger(__name__)

OF_THE_MACHINE = ("cpu", "cores", "gpus", "versions")  # of its provenance


class PartialResults:
    """Waves of prompts that are decoded; of another evaluation, other code or another machine there are others.

    A cache that cannot be written costs a warning, not the evaluation. ``entries`` are the waves of earlier processes.

    Args:
        context: of the evaluation: its target, drafter, settings and provenance.
        is_kept: False keeps nothing, where not all that decides the results is known.
    """

    def __init__(self, context: dict[str, Any], is_kept: bool = True) -> None:
        settings = {
            "code": [loaded_code(), allowed_modules()],
            "machine": {name: context["provenance"][name] for name in OF_THE_MACHINE},
            **{name: context[name] for name in ("target", "drafter", "settings")},
        }
        self.path = cache_place("evaluations", settings).with_suffix(".journal")
        self.entries: list[dict[str, Any]] = []
        # while it is open, no other process has it
        self._journal: Journal | None = None
        self._unopened: Journal | None = None
        if is_kept:
            journal_settings = json.loads(json.dumps(settings))
            self._unopened = Journal(self.path, "specdec.evaluate", journal_settings)
        self._is_empty = True

    def __enter__(self) -> Self:
        if self._unopened is not None:
            try:
                self._journal = self._unopened.__enter__()
                self.entries = self._journal.entries
            except ValueError as error:
                if not isinstance(error, JournalBusyError) and not isinstance(
                    error.__cause__, OSError
                ):
                    raise ValueError(
                        f"{error}: remove {self.path}, and the evaluation starts again"
                    ) from error
                log.warning("if this evaluation is interrupted, it starts again: %s", error)
            self._is_empty = not self.entries
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._is_empty:
            self.discard()
        elif kind is not None and self._journal is not None:
            log.warning("what was decoded is stored: the same command continues")
        self._close()

    def append(self, entry: dict[str, Any]) -> None:
        """Keep a wave."""
        if self._journal is None:
            return
        try:
            self._journal.append(entry)
            self._is_empty &= not any(prompt["turns"] for prompt in entry["prompts"])
        except ValueError as error:
            log.warning(
                "if this evaluation is interrupted, what follows is decoded again: %s", error
            )
            self._close()

    def discard(self) -> None:
        """Remove what is kept, unless it is another process's."""
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    @property
    def continued_after(self) -> list[int]:
        """The numbers of prompts after which another process continued the evaluation."""
        points = {entry["begun_at"] for entry in self.entries}
        points.add(sum(len(entry["prompts"]) for entry in self.entries))
        return sorted(points - {0})

    def _close(self) -> None:
        journal = self._journal
        self._journal = None
        if journal is not None:
            with contextlib.suppress(OSError):
                journal.__exit__()
