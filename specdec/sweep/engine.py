"""What runs a sweep's jobs: here, or on other machines."""

import abc
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from specdec.sweep.job import Job
from specdec.sweep.worker import Way


class Ended(NamedTuple):
    """A job whose worker has ended, for whatever reason; what became of the job stands in its folder."""

    key: str
    status: int | None
    """Of the worker; None where it is not known."""
    message: str = ""
    """Why there was no worker, if so."""


def last_line(error: BaseException) -> str:
    """What an error says last, or its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Engine(abc.ABC):
    """Starts a worker (:func:`specdec.sweep.worker.work`) for a job and says when it has ended.

    A context manager once it is opened: at its end no worker of it is left.
    """

    @abc.abstractmethod
    def open(self, study: Path, way: Way, retries: int) -> Self:
        """Get ready for the jobs of a study.

        Args:
            retries: how often a job whose worker was lost with its machine is begun anew by the engine itself, where it
                can do that.

        Raises:
            ValueError: it cannot be had here; the message says what to do.
        """

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for people."""

    @abc.abstractmethod
    def refuses(self, job: Job) -> str:
        """Why the job can never run here; nothing if it can."""

    @abc.abstractmethod
    def has_room(self, job: Job) -> bool:
        """Whether to start it now."""

    @abc.abstractmethod
    def start(self, folder: Path, job: Job) -> None:
        """Have a worker begin with the job in a folder."""

    @abc.abstractmethod
    def ended(self, seconds: float) -> list[Ended]:
        """The jobs whose workers have ended since the last call; waits for one, so long at most."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop what runs, so that it can be gone on with, and wait for that."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
