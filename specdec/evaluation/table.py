"""Answers as whole numbers in columns: what metrics keep, send between processes and count in.

All are int64, times in nanoseconds: sums do not depend on the order, and no cast of a module rounds them.

Legend: Q target passes, A answers, F columns, P prompts.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.evaluation.record import Answer, fault

Column = npt.NDArray[np.int64]
UNKNOWN = -1


class Passes(NamedTuple):
    """Columns over target passes, (Q,) each; -1 is unknown, or no category."""

    prompt: Column
    category: Column
    context: Column
    drafted: Column
    accepted: Column
    draft_ns: Column
    verify_ns: Column

    def where(self, chosen_Q: npt.NDArray[np.bool_]) -> "Passes":
        """Some of the passes."""
        return Passes(*(column[chosen_Q] for column in self))


class Turns(NamedTuple):
    """Columns over answers, (A,) each; 0 is a time that was not measured."""

    prompt: Column
    category: Column
    tokens: Column
    nanoseconds: Column
    plain_tokens: Column
    plain_nanoseconds: Column

    def where(self, chosen_A: npt.NDArray[np.bool_]) -> "Turns":
        """Some of the answers."""
        return Turns(*(column[chosen_A] for column in self))


def tabulate(answers: Sequence[Answer], categories: Sequence[str] | None = None) -> tuple[Column, Column]:
    """The rows of :class:`Passes`, (Q, 7), and of :class:`Turns`, (A, 6).

    Args:
        categories: all that there are; a category is its place in it. None tells none apart.

    Raises:
        ValueError: an answer's category is not among them.
    """
    passes, turns = [], []
    for answer in answers:
        assert (wrong := fault(answer)) is None, f"{answer.prompt_id}: {wrong}"
        head = (_key(answer.prompt_id), _category(answer, categories))
        empty = (UNKNOWN,) * len(answer.accepted)
        draft_ns, verify_ns = (tuple(round(ms * 1e6) for ms in times) for times in (answer.draft_ms, answer.verify_ms))
        columns = (answer.context or empty, answer.drafted, answer.accepted, draft_ns or empty, verify_ns or empty)
        passes += [(*head, *row) for row in zip(*columns, strict=True)]
        times = (round(seconds * 1e9) for seconds in (answer.seconds, answer.plain_seconds))
        turns.append((*head, answer.tokens, next(times), answer.plain_tokens, next(times)))
    return _rows(passes, Passes), _rows(turns, Turns)


def per_prompt(prompt_N: Column, *columns_N: Column | int) -> npt.NDArray[np.float64]:
    """The columns' sums over each prompt, (P, F), in an order that depends on the prompts alone."""
    prompts, row_N = np.unique(prompt_N, return_inverse=True)
    weights = [np.broadcast_to(column, prompt_N.shape) for column in columns_N]
    return np.stack([np.bincount(row_N, weight, len(prompts)) for weight in weights], axis=1)


def _rows(rows: Sequence[tuple[int, ...]], kind: type[Passes] | type[Turns]) -> Column:
    return np.array(rows, dtype=np.int64).reshape(-1, len(kind._fields))


def _key(prompt_id: str) -> int:
    """A number that is the same on every process."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), signed=True)


def _category(answer: Answer, categories: Sequence[str] | None) -> int:
    if answer.category is None or categories is None:
        return UNKNOWN
    if answer.category not in categories:
        known = ", ".join(categories) or "the none that were given"
        raise ValueError(f"prompt {answer.prompt_id}: category {answer.category!r} is none of {known}")
    return categories.index(answer.category)
