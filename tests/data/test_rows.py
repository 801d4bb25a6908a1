"""Where rows are read from."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets.exceptions import DatasetNotFoundError
from pyarrow import parquet

from specdec.data.chat import read_conversations
from specdec.data.rows import DataRow, find_sources, read_rows, stem, warn_of_overlap
from specdec.data.texts import iter_texts
from specdec.utils import reading
from specdec.utils.files import write_sums
from tests.data import arrow_flips

CALL = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello", "tool_calls": [{"name": "f"}]},
]
CALLED = {"type": "function", "function": {"name": "f", "arguments": {}}}
CALL_AS_MESSAGES = [CALL[0], CALL[1] | {"tool_calls": [CALLED]}]
ROWS: list[dict[str, Any]] = [
    {"id": "a", "messages": CALL},
    {"id": "b", "messages": CALL[:1], "note": "n"},
]


LINES = "line 1, line 3"


def write(path: Path) -> str:
    """The rows as the path's suffix says; a path without one is a saved dataset."""
    table = pyarrow.Table.from_pylist([{"note": None} | row for row in ROWS])
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif path.suffix.lower() in (".jsonl", ".ndjson", ".jsonlines"):
        path.write_text("\n\n".join(map(json.dumps, ROWS)))
    else:
        datasets.Dataset(table).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.jsonl", LINES),
        ("a.ndjson", LINES),
        ("a.jsonlines", LINES),
        ("a.JSONL", LINES),
        ("a.json", ""),
        ("a.parquet", ""),
        ("saved", ""),
    ],
)
def test_every_source_holds_the_same_rows(tmp_path: Path, name: str, places: str) -> None:
    source = write(tmp_path / name)
    expected = places.split(", ") if places else ["row 1", "row 2"]
    assert list(read_rows(source)) == [
        DataRow(f"{source}, {place}", place.replace(" ", "-"), row)
        for place, row in zip(expected, ROWS, strict=True)
    ]
    assert stem(source) == "a" or name == "saved"
    read = read_conversations(source)
    assert [(item.id, item.messages) for item in read] == [("a", CALL_AS_MESSAGES), ("b", CALL[:1])]


def test_plain_text_is_rows_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffx\n\n y\u2028\r\n")
    assert [(row.name, row.values) for row in read_rows(str(tmp_path / "a.txt"))] == [
        ("line-1", {"prompt": "x"}), ("line-3", {"prompt": " y\u2028"}),
    ]  # fmt: skip


def test_json_lines_by_another_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text('{"prompt": "x"}\n\n {"prompt": "y"} \r\n')
    for read in (lambda: list(read_rows(str(path))), lambda: list(iter_texts(str(path)))):
        with pytest.raises(
            ValueError, match=r"a\.txt: every line is a JSON object: name the file \.jsonl"
        ):
            read()
    for text in ('{"prompt": "x"}\nand more', "{}\n[1]\n", "{a}", "1\n2\n"):
        path.write_text(text)
        assert [row.values["prompt"] for row in read_rows(str(path))] == text.split("\n")[
            : 1 + text.rstrip().count("\n")
        ]


def test_a_parquet_file_is_not_held_in_memory(tmp_path: Path) -> None:
    parquet.write_table(
        pyarrow.table({"text": ["x" * 1000] * 20_000}), tmp_path / "a.parquet", row_group_size=1000
    )
    rows = read_rows(str(tmp_path / "a.parquet"))
    tracemalloc.start()
    try:
        assert sum(len(row.values["text"]) for row in rows) == 20_000_000
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_sources_are_found_once_and_in_order(tmp_path: Path) -> None:
    files = [write(tmp_path / name) for name in ("b.jsonl", "a.parquet", "saved")]
    hub = "hub:openai/gsm8k:main:train"
    assert find_sources([files[2], hub, f"{tmp_path}/*.*", files[0]]) == [
        files[2],
        hub,
        files[1],
        files[0],
    ]
    (tmp_path / "a[1].txt").write_text("x")
    assert find_sources(f"{tmp_path}/a[1].txt") == [f"{tmp_path}/a[1].txt"]
    with pytest.raises(ValueError, match="no such file"):
        find_sources(str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"\*\.txt: no file matches"):
        find_sources(f"{tmp_path}/none*.txt")
    with pytest.raises(ValueError, match="is a directory; name its files with a glob"):
        find_sources(str(tmp_path))
    with pytest.raises(ValueError, match="no data files are named"):
        find_sources([])


def test_overlap_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_overlap(["a.jsonl"], ["b.jsonl"])
    assert not caplog.text
    warn_of_overlap(["a.jsonl", "b.jsonl"], ["b.jsonl"])
    assert "validation reads training files: b.jsonl" in caplog.text


def test_a_folder_of_splits_names_them(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[1:])}).save_to_disk(
        tmp_path / "sets"
    )
    with pytest.raises(ValueError, match="sets: holds the splits train: name one of the folders"):
        list(read_rows(str(tmp_path / "sets")))
    assert len(list(read_rows(str(tmp_path / "sets" / "train")))) == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.parquet", b"PAR1 or not", "not a readable Parquet file"),
        ("a.json", b'{"data": []}', "must be a list of rows, not dict; or name JSON lines .jsonl"),
        ("a.txt", b"ok \xff", "not UTF-8 text"),
        ("a.jsonl", b'\n\n{"text": "a",}', "line 3: not usable JSON: "),
        ("a.jsonl", b'{"text": ' + b"[" * 200_000, "line 1: not usable JSON"),
        ("a.json", b'["a"]', "row 1: a row must be a JSON object, not str"),
        ("a.json", b'[{"a": "\\ud800"}]', "row 1: holds half of a surrogate pair"),
        (
            "a.json",
            b'{"a": 1}\n{"a": 2}',
            "not usable JSON: Extra data: line 2 column 1 .*are these JSON lines",
        ),
        ("a.json", b"[" * 100_000, "not usable JSON"),
        ("saved/dataset_info.json", b"{", "saved: not a readable folder of save_to_disk"),
        (
            "saved/dataset_dict.json",
            b'{"splits": ["x"]}',
            "saved: not a readable folder of save_to_disk",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    source = str(path.parent) if name.startswith("saved") else str(path)
    with pytest.raises(ValueError, match=complaint) as caught:
        list(read_rows(source))
    assert source in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "broken"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n\n"b"\n{"a": "\xff"}\n{"a": 2}\n{"a": 3', [2, 4, 5, 7]),
        ("a.json", b'[{"a": 1}, 7, {"a": "\\ud800"}, {"a": 2}]', [2, 3]),
    ],
)
def test_broken_rows_may_be_left_out(
    tmp_path: Path, name: str, content: bytes, broken: list[int]
) -> None:
    (tmp_path / name).write_bytes(content)
    left_out: list[str] = []
    rows = list(read_rows(str(tmp_path / name), left_out=left_out))
    assert [row.values["a"] for row in rows] == [1, 2]
    kind = "line" if name == "a.jsonl" else "row"
    assert [
        int(one.split(f"{name}, {kind} ")[1].split(":")[0].split(",")[0]) for one in left_out
    ] == broken
    with pytest.raises(ValueError, match=f"{name}, {kind} {broken[0]}"):
        list(read_rows(str(tmp_path / name)))


def test_a_refused_row_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n{')

    def of(row: DataRow) -> int:
        if "a" not in row.values:
            raise ValueError(f"{row.place}: no a")
        return int(row.values["a"])

    left_out: list[str] = []
    assert list(read_rows(str(path), of, left_out)) == [1]
    assert left_out[0] == f"{path}, line 2: no a" and "line 3: not usable" in left_out[1]
    with pytest.raises(ValueError, match="line 2: no a"):
        list(read_rows(str(path), of))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    source = Path(write(tmp_path / "a.parquet"))
    source.write_bytes(source.read_bytes()[:-120])
    with pytest.raises(ValueError, match="not a readable"):
        list(read_rows(str(source)))


SUMS = [{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": "3"}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the Hub was asked for; it has sums."""
    seen: list[tuple[Any, ...]] = []

    def load_dataset(
        name: str, config: str, *, split: str, revision: str | None
    ) -> datasets.Dataset:
        seen.append((name, config, split, revision))
        return datasets.Dataset.from_list(SUMS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return seen


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("hub:openai/gsm8k:main:test", ("openai/gsm8k", "main", "test", None)),
        ("hub:openai/gsm8k@1a2b:main:train[:80]", ("openai/gsm8k", "main", "train[:80]", "1a2b")),
    ],
)
def test_repository_config_split_and_revision(
    asked: list[tuple[Any, ...]], source: str, wanted: tuple[Any, ...]
) -> None:
    assert [row.values for row in read_rows(source)] == SUMS
    assert asked == [wanted]
    assert stem(source) == "gsm8k"


def test_files_of_a_repository_are_named_at_their_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **more: seen.append((args, more)) or []
    )
    for revision in ("@1a2b", ""):
        list(read_rows(f"hub:org/code{revision}:data/test*.jsonl:train[:9]"))
        url = f"hf://datasets/org/code{revision}/data/test*.jsonl"
        assert seen.pop() == (("json",), {"data_files": url, "split": "train[:9]"})


def test_a_directory_of_data_is_read_like_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through ``datasets`` itself, which takes a directory for a repository's name."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    assert [row.values for row in read_rows(f"hub:{tmp_path / 'sums'}:default:test")] == SUMS
    with pytest.raises(ValueError, match=r"sums:default:train: not to be had .*train") as caught:
        list(read_rows(f"hub:{tmp_path / 'sums'}:default:train"))
    assert "\n" not in str(caught.value)
    # a script, as some repositories have
    (tmp_path / "sums" / "sums.py").write_text("raise AssertionError")
    (tmp_path / "sums" / "test2.jsonl").write_text(json.dumps(SUMS[0]) + "\n")
    assert [row.values for row in read_rows(f"hub:{tmp_path / 'sums'}:test*.jsonl:train")] == [
        *SUMS,
        SUMS[0],
    ]
    assert [
        row.values for row in read_rows(f"hub:{tmp_path / 'sums'}:test2.jsonl:train[:5]")
    ] == SUMS[:1]


@pytest.mark.parametrize("source", ["hub:", "hub:openai/gsm8k:test", "hub:a/b@:c:d"])
def test_a_name_that_says_too_little_is_refused(source: str) -> None:
    with pytest.raises(
        ValueError, match=r"write hub:REPOSITORY:CONFIG:SPLIT, as hub:openai/gsm8k:main:test"
    ):
        list(read_rows(source))


@pytest.mark.parametrize(
    "error",
    [
        DatasetNotFoundError("Dataset 'openai/gsm8k' doesn't exist\non the Hub"),
        ValueError("BuilderConfig 'x' not found.\nAvailable: ['main']"),
    ],
)
def test_what_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*args: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ValueError, match=r"^hub:openai/gsm8k:main:test: not to be had from the Hub"
    ) as caught:
        list(read_rows("hub:openai/gsm8k:main:test"))
    assert "\n" not in str(caught.value) and str(error).split()[-1] in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("summed", [False, True])
def test_a_flipped_bit_of_a_stored_data_set_ends_no_process(
    kind: str, summed: bool, tmp_path: Path
) -> None:
    """With a list of hashes beside the data none is silent; without, damage is refused where it can be seen."""
    rows = [
        {"id": f"row-{n}", "messages": [{"role": "user", "content": f"{n}"}] * (n % 3)}
        for n in range(40)
    ]
    source = tmp_path / ("saved" if kind == "folder" else "rows.parquet")
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(source) if kind == "folder" else table.to_parquet(source)
    if summed:
        write_sums(source if kind == "folder" else tmp_path)
    command = [sys.executable, arrow_flips.__file__, str(source), "60", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["refused"] > 0 and not counts.keys() & {"died", "traceback"}, counts
    assert not (summed and "other rows" in counts), counts


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_stored_data_set_is_compared_with_its_hashes(kind: str, tmp_path: Path) -> None:
    source = tmp_path / ("saved" if kind == "folder" else "rows.parquet")
    table = datasets.Dataset.from_list([{"prompt": "a"}])
    table.save_to_disk(source) if kind == "folder" else table.to_parquet(source)
    place = source if kind == "folder" else tmp_path
    (place / "README.md").write_text("a card")
    # as docs/data.md says
    subprocess.run("sha256sum * > SHA256SUMS", shell=True, cwd=place, check=True)
    assert len(list(read_rows(str(source)))) == 1
    sums = place / reading.SUMS
    name = next(place.glob("*.arrow"), source).name
    digest = reading.sha256(place / name)
    sums.write_text(f"{digest[::-1]}  ./{name}\n")
    with pytest.raises(ValueError, match=f"its SHA-256 is not that in {reading.SUMS}"):
        list(read_rows(str(source)))
