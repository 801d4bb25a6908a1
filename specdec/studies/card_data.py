"""The numbers behind a card: the sums of every arm, seed, prompt and draft step, from which its intervals follow.

``data.parquet`` has a row for each of them, with these columns:

- ``quantity``: its name in ``card.json``; of a curve its title.
- ``step``: of a curve, the draft position or step, from 1; else null.
- ``arm``, ``seed``, ``prompt``.
- ``sum``, ``weight``: the quantity of some prompts and seeds is the ratio of the sums of both (acceptance length:
  committed tokens over target passes). ``sum_2``, ``weight_2``: of a quantity made of two such ratios the second, by
  which the first is divided, or which is taken from it; else null.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specdec.diagnostics.drift_figures import sums_of
from specdec.studies.outcomes import (
    FAMILIES,
    Metric,
    Table,
    accepted_at,
)
from specdec.studies.recorded_run import RecordedRun
from specdec.studies.results import RecordedStudy, deepest_position, position_title
from specdec.utils.files import staged

DATA = "data.parquet"
NAMES = ("quantity", "arm", "prompt")
SUMS = ("sum", "weight", "sum_2", "weight_2")
SCHEMA = pa.schema(
    [
        ("quantity", pa.string()),
        ("step", pa.int32()),
        ("arm", pa.string()),
        ("seed", pa.int64()),
        ("prompt", pa.string()),
        *((name, pa.float64()) for name in SUMS),
    ]
)

Row = dict[str, Any]


def write_data(study: RecordedStudy, path: Path) -> None:
    """Write the sums of a card's quantities and curves to a Parquet file.

    Raises:
        ValueError: a measurement cannot be read.
    """
    rows = [*_quantities(study), *_positions(study), *_drift_steps(study)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    with staged(path) as place:
        pq.write_table(table, place, use_dictionary=list(NAMES), compression="zstd")


def _quantities(study: RecordedStudy) -> Iterator[Row]:
    """Yield the rows of the card's quantities."""
    by_name = {metric.name: metric for metric in study.metrics.values()}
    for metric in by_name.values():
        for arm, runs in study.done(FAMILIES[metric.family]).items():
            yield from _rows_of(metric, metric.name, None, arm, runs)


def _positions(study: RecordedStudy) -> Iterator[Row]:
    """Yield the rows of the curves by draft position."""
    for arm, runs in study.done("evaluate").items():
        for shape in dict.fromkeys(shape for run in runs for shape in run.evaluation.answers):
            for position in range(1, deepest_position(runs, shape) + 1):
                metric = accepted_at(str(position), shape)
                yield from _rows_of(metric, position_title(shape), position, arm, runs)


def _rows_of(
    metric: Metric, name: str, step: int | None, arm: str, runs: Sequence[RecordedRun]
) -> Iterator[Row]:
    for run in runs:
        table: Table = metric.table(run) or {}
        for prompt, sums_C in table.items():
            yield _row(name, step, arm, run.seed, prompt, sums_C.tolist())


def _drift_steps(study: RecordedStudy) -> Iterator[Row]:
    """Yield the rows of the curves by draft step."""
    for arm, runs in study.done("drift").items():
        for run in runs:
            drift = run.measured("drift")
            for name, series in drift["series"].items():
                for step, sums_P2 in enumerate(sums_of(drift, name), 1):
                    for prompt, sums_2 in zip(drift["prompts"], sums_P2.tolist(), strict=True):
                        yield _row(series["title"], step, arm, run.seed, str(prompt), sums_2)


def _row(
    quantity: str, step: int | None, arm: str, seed: int, prompt: str, sums: Sequence[float]
) -> Row:
    about = {"quantity": quantity, "step": step, "arm": arm, "seed": seed, "prompt": prompt}
    return about | dict(zip(SUMS, sums, strict=False))
