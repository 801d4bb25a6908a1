"""What a Parquet file decodes to is bounded, whatever it says of itself; a file of any honest shape is read."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from specdec.data import tables
from specdec.data.tables import AT_ONCE, MOST, MOST_ROW, parquet_rows

# Reads the module alone: its package imports torch, which takes seconds and memory that are not the reader's.
READ = """
import importlib.util, json, resource, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("tables", sys.argv[1])
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)
reason = None
try:
    for row in tables.parquet_rows(Path(sys.argv[2])):
        pass
except ValueError as error:
    reason = str(error)
peaks = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps([reason, max(peaks)]))
"""


def repeated(rows: int, size: int) -> Any:
    """One long text in every row, which the file holds once."""
    indices = pyarrow.array([0] * rows, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * size]))


def many(count: int) -> Any:
    """A row of so many nulls."""
    offsets = pyarrow.array([0, count], pyarrow.int32())
    return pyarrow.ListArray.from_arrays(offsets, pyarrow.nulls(count, pyarrow.int8()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "keeps_types", "reason"),
    [
        (lambda: repeated(1024, 2**24), False, "takes more than 2 GiB of memory"),
        (lambda: repeated(3000, 2**20), True, "made to fill the memory"),
        (lambda: repeated(1024, MOST_ROW), True, f"row 1: more than {MOST_ROW:,} bytes in a row"),
        (lambda: repeated(1, MOST_ROW), False, f"row 1: more than {MOST_ROW:,} bytes in a row"),
        (lambda: many(2**25), False, f"row 1: more than {MOST_ROW:,} bytes in a row"),
    ],
    ids=["repeated", "repeated by type", "long", "alone", "many"],
)
def test_a_small_file_takes_no_great_memory(
    make: Callable[[], Any], keeps_types: bool, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": make()})
    parquet.write_table(
        table, path, compression="zstd", store_schema=keeps_types, write_statistics=False
    )
    assert path.stat().st_size < 20_000
    done = subprocess.run(
        [sys.executable, "-c", READ, tables.__file__, path],
        capture_output=True,
        text=True,
        check=True,
    )
    said, peak = json.loads(done.stdout)
    assert said.startswith(str(path)) and reason in said
    assert peak < 3 * 2**30


def test_rows_of_every_type_are_read(tmp_path: Path) -> None:
    """Also where rows are so large that they are made one by one."""
    values = [
        {
            "messages": [{"role": "user", "content": "é" * n}],
            "n": n,
            "tags": {"a": 1.5},
            "none": None,
        }
        for n in range(2000)
    ]
    large = [{"role": "user", "content": "b" * (AT_ONCE // 2)}]
    values += [values[0] | {"messages": large}] * 3
    path = tmp_path / "rows.parquet"
    table = pyarrow.Table.from_pylist(values)
    parquet.write_table(table, path, row_group_size=700)
    assert list(parquet_rows(path)) == values
    assert table.nbytes < MOST


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.int64()])
def test_categories_count_by_what_a_row_has_of_them(kind: Any, tmp_path: Path) -> None:
    """Not by the whole dictionary for each row, which would be more than any file may have."""
    numbers = [n % 20_000 for n in range(60_000)]
    texts = numbers if kind == pyarrow.int64() else [f"category {n} " * 4 for n in numbers]
    categories = pyarrow.array(texts).dictionary_encode()
    categories = pyarrow.DictionaryArray.from_arrays(
        categories.indices, categories.dictionary.cast(kind)
    )
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"category": categories}), path)
    assert len(numbers) * categories.dictionary.nbytes > MOST + 1000 * path.stat().st_size
    assert [row["category"] for row in parquet_rows(path)] == texts


def test_packages_outside_the_interpreters_own_folder_are_found(tmp_path: Path) -> None:
    """As those of PYTHONPATH, which the process that decodes does not see by itself."""
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    base = getattr(sys, "_base_executable", sys.executable)
    bare = subprocess.run([base, "-I", "-c", "import pyarrow"], capture_output=True, check=False)
    if bare.returncode == 0:
        pytest.skip("there is no interpreter without pyarrow here")
    packages = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))
    done = subprocess.run(
        [base, "-c", READ, tables.__file__, path], env=os.environ | {"PYTHONPATH": packages},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)[0] is None


def test_whoever_stops_early_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": [str(n) * 1000 for n in range(20_000)]}), path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    rows = parquet_rows(path)
    assert next(rows)["text"].startswith("000")
    rows.close()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > before
