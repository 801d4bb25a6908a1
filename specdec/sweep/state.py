"""A job's folder in a study: the job, its state, every attempt at it, and the lock of who works on it.

``job.json`` is the job, ``state.json`` what became of it last, ``log.txt`` what its processes said. ``attempts.jsonl``
has a line when an attempt begins and one when it ends. Who works on a job holds the lock of the file ``lock``, touched
every second, so that it is known until when a killed attempt lived.
"""

import contextlib
import dataclasses
import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self, get_args

from specdec.files import explain, read_json, write_json
from specdec.shared import lock_now
from specdec.sweep.job import Job

Name = Literal["running", "done", "failed", "stopped"]
End = Literal["done", "failed", "stopped", "died", "killed"]
LOST: tuple[End, ...] = ("died", "killed")  # by a signal that was not ours: the command, or the attempt with it
JOBS = "jobs"


@dataclass(frozen=True, kw_only=True)
class State:
    """What became of a job last.

    Args:
        state: ``running`` also where the attempt was killed: whether somebody works on it, the lock says.
        attempt: its number, from 1.
        begun: and ``ended``, in UTC, ISO 8601; None before the end.
        seconds: that the command ran, in all attempts together, up to the end of this one.
        status: exit status of the command, 128 and the signal's number if one ended it.
        message: why it failed, one line.
        peak_memory_bytes: of the command's largest process, of any attempt so far.
    """

    state: Name
    attempt: int
    begun: str
    host: str
    pid: int
    ended: str | None = None
    seconds: float | None = None
    status: int | None = None
    message: str | None = None
    peak_memory_bytes: int | None = None

    @classmethod
    def from_json(cls, data: Any, where: Path) -> Self:
        """Of ``state.json``.

        Raises:
            ValueError: it is none.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, dict) or set(data) != fields or data["state"] not in get_args(Name):
            raise ValueError(f"{where}: not the state of a job; remove it")
        return cls(**data)


class Attempt(NamedTuple):
    """One attempt at a job, of two lines of ``attempts.jsonl``."""

    number: int
    begun: str
    host: str
    pid: int
    end: End | None = None
    """None: it runs, or was killed."""
    seconds: float | None = None
    """That the command ran; of a killed one until it last touched its lock."""
    status: int | None = None


class Folder:
    """``jobs/KEY`` of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study = path.parent.parent

    @classmethod
    def of(cls, study: Path, job: Job) -> Self:
        """The folder of a job, with ``job.json`` in it; needs, which a study that is partly done lacks, stay there."""
        out = cls(study / JOBS / job.key)
        if not out._job.exists() or dataclasses.replace(out.job(), needs=job.needs) != job:
            write_json(out._job, job.to_json())
        return out

    @property
    def _job(self) -> Path:
        return self.path / "job.json"

    @property
    def log(self) -> Path:
        """What its processes say."""
        return self.path / "log.txt"

    def job(self) -> Job:
        """Read it.

        Raises:
            ValueError: there is none.
        """
        return Job.from_json(read_json(self._job), str(self._job))

    def output(self, job: Job) -> Path:
        """What the job makes.

        Raises:
            ValueError: it does not lie in the study.
        """
        out = self.study / job.directory
        if out.resolve() == self.study.resolve() or self.study.resolve() not in out.resolve().parents:
            raise ValueError(f"{self._job}: directory {job.directory} does not lie in the study")
        return out

    def is_done(self, job: Job) -> bool:
        """Whether its work is there."""
        return (self.output(job) / job.done).exists()

    def state(self) -> State | None:
        """What became of it last; None if nobody has begun it.

        Raises:
            ValueError: the file is none of ours.
        """
        path = self.path / "state.json"
        return State.from_json(read_json(path), path) if path.exists() else None

    def write(self, state: State) -> None:
        """For who holds the lock."""
        write_json(self.path / "state.json", dataclasses.asdict(state))

    def attempts(self) -> list[Attempt]:
        """All of them in order; a line that a kill cut short counts for nothing."""
        found: dict[int, Attempt] = {}
        for line in self._lines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                data = json.loads(line)
                number = data.pop("attempt")
                found[number] = found[number]._replace(**data) if number in found else Attempt(number, **data)
        return [found[number] for number in sorted(found)]

    def _lines(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self.path / "attempts.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        return []

    def note(self, number: int, **known: Any) -> None:
        """Append a line on an attempt; for who holds the lock."""
        line = json.dumps({"attempt": number, **known}, allow_nan=False) + "\n"
        with (self.path / "attempts.jsonl").open("ab+") as stream:
            if stream.tell() and os.pread(stream.fileno(), 1, stream.tell() - 1) != b"\n":
                line = "\n" + line  # a kill has cut the last one short
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())

    @contextlib.contextmanager
    def locked(self) -> Iterator[IO | None]:
        """Hold the lock, or None: somebody has it. It lasts as long as any process that inherits the open file.

        Raises:
            ValueError: the file system has no locks, or may not be written.
        """
        with self._opened() as stream:
            yield stream if self._lock(stream) else None

    def is_held(self) -> bool:
        """Whether somebody works on it, or what is left of a killed attempt still lives."""
        if not (self.path / "lock").exists():
            return False
        with self._opened() as stream:
            return not self._lock(stream, shared=True)

    def _opened(self) -> IO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return (self.path / "lock").open("a+b")
        except OSError as error:
            raise explain(error, self.path / "lock") from error

    def _lock(self, stream: IO, shared: bool = False) -> bool:
        try:
            return lock_now(stream, shared)
        except OSError as error:
            raise ValueError(
                f"{self.path}: this file system has no locks ({error.strerror}), so that two workers could run one "
                "job: put the study elsewhere"
            ) from error

    def last_alive(self) -> datetime.datetime:
        """When the lock was last touched."""
        return datetime.datetime.fromtimestamp((self.path / "lock").stat().st_mtime, datetime.UTC)


def now() -> str:
    """UTC, ISO 8601, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
