"""Decoded answers: what one leaves behind for statistics, its file, and the target's own greedy answers."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.data.rows import read_text
from specdec.decoding import PlainDecoder, Request
from specdec.target import Target
from specdec.utils.files import write_text


class Answer(NamedTuple):
    """One turn of one prompt, decoded with one draft shape and, for comparison, plainly.

    Each target pass commits ``accepted + 1`` tokens: the accepted drafts and the target's own (bonus) token. The
    last pass may commit more than was kept, so ``tokens`` can be smaller than the sum over the passes.
    """

    prompt_id: str
    category: str | None
    tokens: int
    """New tokens kept."""
    accepted: tuple[int, ...]
    """Accepted drafts per target pass, the bonus token excluded."""
    drafted: tuple[int, ...]
    """Longest path of what was proposed, per target pass; same length."""
    seconds: float
    plain_seconds: float
    """0 where plain decoding was not measured."""
    plain_tokens: int
    identical: bool | None
    """Whether both outputs are the same tokens; None where that was not compared."""
    draft_ms: tuple[float, ...] = ()
    """Milliseconds of drafting for each target pass; as the next, empty where not recorded."""
    verify_ms: tuple[float, ...] = ()
    """Milliseconds of each target pass with its acceptance."""


def write_answers(path: Path | str, shapes: Sequence[str], answers: Sequence[Sequence[Answer]]) -> None:
    """Write the answers of every draft shape, one a line, whole or not at all."""
    rows = [
        {"result": index, "shape": shape, **answer._asdict()}
        for index, (shape, own) in enumerate(zip(shapes, answers, strict=True))
        for answer in own
    ]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def read_answers(path: Path | str, shapes: int) -> list[list[Answer]]:
    """What :func:`write_answers` wrote: the answers of each of so many shapes, in their order.

    Raises:
        ValueError: the file cannot be read, or a line of it is no answer; the message names the line.
    """
    out: list[list[Answer]] = [[] for _ in range(shapes)]
    for number, line in enumerate(read_text(Path(path)).split("\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            result = out[row.pop("result")]
            columns: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
            columns.pop("shape", None)
            result.append(Answer(**columns))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not an answer of specdec evaluate: {error!r}") from error
    return out


def greedy_answers(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    end: Collection[int] = (),
    batch: int = 1,
    on_answer: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The target's own greedy answers to prompts of ids, decoded plainly and eagerly: what a drafter has to guess.

    Args:
        end: tokens that end an answer, and are its last; by default every answer has ``max_new_tokens``.
        on_answer: called as each answer is done.
    """
    out: list[list[int]] = [[] for _ in prompts]
    requests = [Request(prompt, max_new_tokens) for prompt in prompts]
    for number, made in PlainDecoder(target, batch=batch).generate_all(requests, frozenset(end)):
        out[number] = made.ids
        on_answer()
    return out
