"""What one decoded answer leaves behind: the raw material of every statistic, and its file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.files import explain, write_text


class Answer(NamedTuple):
    """One turn of one prompt, decoded with one growth and, for comparison, plainly.

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
    context: tuple[int, ...] = ()
    """Committed tokens, the prompt's included, before each target pass; as the next two, empty where not recorded."""
    draft_ms: tuple[float, ...] = ()
    """Milliseconds of drafting for each target pass."""
    verify_ms: tuple[float, ...] = ()
    """Milliseconds of each target pass with its acceptance."""


def fault(answer: Answer) -> str | None:
    """What is impossible about an answer, or None."""
    passes = len(answer.accepted)
    if len(answer.drafted) != passes:
        return f"{passes} passes accepted and {len(answer.drafted)} drafted"
    if not all(0 <= got <= depth for got, depth in zip(answer.accepted, answer.drafted, strict=True)):
        return "a pass accepted more than was drafted, or less than nothing"
    for name in ("context", "draft_ms", "verify_ms"):
        values = getattr(answer, name)
        if values and (len(values) != passes or min(values) < 0):
            return f"{name} holds {len(values)} values, which must be {passes} and none negative"
    if min(answer.tokens, answer.seconds, answer.plain_seconds, answer.plain_tokens) < 0:
        return "a count or a time is negative"
    return None


def write_answers(path: Path | str, growths: Sequence[str], answers: Sequence[Sequence[Answer]]) -> None:
    """Write the answers of every growth, one a line, whole or not at all."""
    rows = [
        {"result": index, "growth": growth, **answer._asdict()}
        for index, (growth, own) in enumerate(zip(growths, answers, strict=True))
        for answer in own
    ]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def read_answers(path: Path | str, growths: int) -> list[list[Answer]]:
    """What :func:`write_answers` wrote: the answers of each of so many growths, in their order.

    Raises:
        ValueError: the file cannot be read, or a line of it is no answer; the message names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise explain(error, path) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    out: list[list[Answer]] = [[] for _ in range(growths)]
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            index, answer = _answer(json.loads(line))
            wrong = fault(answer) or ("" if 0 <= index < growths else f"there is no result {index}")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not an answer of specdec evaluate: {error!r}") from error
        if wrong:
            raise ValueError(f"{path}, line {number}: not an answer of specdec evaluate: {wrong}")
        out[index].append(answer)
    return out


def answer_of(values: dict[str, Any]) -> Answer:
    """An answer from JSON; TypeError if it is none."""
    columns: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Answer(**columns)


def _answer(row: dict[str, Any]) -> tuple[int, Answer]:
    return row["result"], answer_of({name: value for name, value in row.items() if name not in ("result", "growth")})
