"""Where rows are read from."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from specdec.evaluation.rows import Row, read_rows, stem

ROWS: list[dict[str, Any]] = [
    {"question_id": 1, "turns": ["One", "Two"], "note": None},
    {"question_id": 2, "turns": ["é\u2028"], "note": "n"},
]


def write(path: Path, values: list[dict[str, Any]]) -> str:
    """The rows as the path's suffix says."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(values), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(values, indent=1))
    else:
        path.write_text("\n\n".join(json.dumps(value, ensure_ascii=False) for value in values), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("suffix", "names"),
    [(".jsonl", ["line-1", "line-3"]), (".json", ["row-1", "row-2"]), (".parquet", ["row-1", "row-2"])],
)
def test_every_format_holds_the_same(tmp_path: Path, suffix: str, names: list[str]) -> None:
    source = write(tmp_path / f"mt.bench{suffix}", ROWS)
    assert list(read_rows(source)) == [
        Row(f"{source}, {name.replace('-', ' ')}", name, {key: item for key, item in row.items() if item is not None})
        for name, row in zip(names, ROWS, strict=True)
    ]
    assert stem(source) == "mt.bench"


def test_plain_text_is_rows_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n\n y\r\n")
    assert [(row.name, row.values) for row in read_rows(str(tmp_path / "a.txt"))] == [
        ("line-1", {"prompt": "x"}), ("line-3", {"prompt": " y"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.json", b'{"data": []}', "must be a list of rows, not dict; or name JSON lines .jsonl"),
        ("a.json", b'{"a": 1}\n{"a": 2}', "line 2, column 1: not valid JSON: Extra data; are these JSON lines?"),
        ("a.json", b"[", "column 2: not valid JSON: Expecting value"),
        ("a.json", b"[7]", "row 1: a row must be a JSON object, not int"),
        ("a.json", b"\xff", "not UTF-8 text (invalid start byte at byte 0)"),
        ("a.parquet", b"PAR1 or not", "not a readable Parquet file"),
        ("a.parquet", None, "no such file"),
        ("a.json", None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name) as caught:
        list(read_rows(str(tmp_path / name)))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
