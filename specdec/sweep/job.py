"""One command of a study: what it makes, how that is known to be done, and what must be done before."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

Kind = Literal["cache", "fit", "evaluate", "drift", "robustness"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command, addressed by what decides its result.

    Args:
        key: content address, also the name of its folder in ``jobs/``.
        label: for people, as ``fc_norm=on K=4 seed=1: fit``.
        command: arguments of ``python -m specdec``, run in the folder where ``specdec sweep`` was; its paths are
            relative to that folder, or absolute.
        directory: what it makes, relative to the study's directory: ``fits/KEY``.
        done: file below ``directory`` that is there only when the work is done.
        needs: keys of the jobs that must be done before.
        resumes: the same command goes on with what a killed one has left; otherwise that is removed first.
        threads: CPU threads that it asks of the machine.
        memory_bytes: memory that it is expected to need, where that is known.
    """

    key: str
    kind: Kind
    label: str
    command: tuple[str, ...]
    directory: str
    done: str
    needs: tuple[str, ...] = ()
    resumes: bool = False
    threads: int = 1
    memory_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Lossless JSON-able data."""
        data = dataclasses.asdict(self)
        return data | {"command": list(self.command), "needs": list(self.needs)}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: it is no job: a key is missing, unknown or of another type.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, Mapping) or set(data) != fields:
            found = sorted(set(data) ^ fields) if isinstance(data, Mapping) else data
            raise ValueError(f"{where}: not a job of a study ({found})")
        if data["kind"] not in KINDS:
            raise ValueError(f"{where}: kind is {data['kind']!r}; one of {', '.join(KINDS)}")
        for name, good in _CHECKS.items():
            if not good(data[name]):
                raise ValueError(f"{where}: {name} is {data[name]!r}")
        return cls(**{**data, "command": tuple(data["command"]), "needs": tuple(data["needs"])})


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


_CHECKS = {
    **dict.fromkeys(("key", "label", "directory", "done"), lambda value: isinstance(value, str) and value != ""),
    **dict.fromkeys(("command", "needs"), _texts),
    "resumes": lambda value: isinstance(value, bool),
    "threads": lambda value: type(value) is int and value > 0,
    "memory_bytes": lambda value: value is None or (type(value) is int and value >= 0),
}
