import logging
from pathlib import Path

import pytest

from specdec.data.documents import Text, find_files, read_jsonl, read_texts, warn_of_overlap
from tests.data.tiny import write_jsonl


def test_a_text_file_is_one_document_and_a_json_line_is_one(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("one\r\ntwo é\u2028 three\n".encode())
    rows = write_jsonl(tmp_path / "a.jsonl", [{"text": "x\u2028y"}, {"text": "z", "more": 1}])
    rows.write_text(rows.read_text() + "\n", encoding="utf-8")  # a blank line at the end
    assert read_texts(str(tmp_path / "*")) == [
        Text(f"{rows}, line 1", "x\u2028y"),
        Text(f"{rows}, line 2", "z"),
        Text(str(tmp_path / "b.txt"), "one\r\ntwo é\u2028 three\n"),
    ]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}')
    assert [item.text for item in read_texts([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])] == ["hello"] * 2


def test_files_come_once_and_in_order(tmp_path: Path) -> None:
    for name in ("c.txt", "a.txt", "sub/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files([f"{tmp_path}/c.txt", f"{tmp_path}/**/*.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["c.txt", "a.txt", "sub/b.txt"]


def test_a_name_with_brackets_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert find_files(f"{tmp_path}/a[1].txt") == [tmp_path / "a[1].txt"]


def test_what_names_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nope\.txt: no such file"):
        find_files(f"{tmp_path}/nope.txt")
    with pytest.raises(ValueError, match=r"\*\.txt: no file matches"):
        find_files(f"{tmp_path}/*.txt")
    with pytest.raises(ValueError, match="is a directory; name its files with a glob"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match="no data files are named"):
        find_files([])


def test_empty_files_are_refused_when_named_and_counted_when_globbed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.jsonl").write_text("\n")
    for name in ("a.txt", "b.jsonl"):
        with pytest.raises(ValueError, match=f"{name}: the file holds no text"):
            read_texts(f"{tmp_path}/{name}")
    with pytest.raises(ValueError, match=r"no documents in .*every file is empty"):
        read_texts(f"{tmp_path}/*")
    write_jsonl(tmp_path / "c.jsonl", [{"text": "x"}, {"text": ""}])
    with caplog.at_level(logging.WARNING):
        assert [item.text for item in read_texts(f"{tmp_path}/*")] == ["x"]
    assert "2 empty documents were left out, 1 remain" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2, column \d+: not valid JSON"),
        (b'\n\n{"text": "a",}\n', r"a\.jsonl, line 3, column \d+: not valid JSON"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl, line 2: not UTF-8"),
        (b'{"text": "a"}\n[1]\n', r"a\.jsonl, line 2: a row must be a JSON object, not list"),
        (b'{"text": "a"}\n{"body": "a"}\n', r"a\.jsonl, line 2: the row has no 'text' field, only \['body'\]"),
        (b'{"text": "a"}\n{"text": 3}\n', r"a\.jsonl, line 2: 'text' must be a string, got int"),
        (b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1: holds half of a surrogate"),
        (b'{"text": ' + b"[" * 200_000 + b"\n", r"a\.jsonl, line 1: not usable JSON"),
    ],
)
def test_broken_rows_name_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_texts(f"{tmp_path}/a.jsonl")
    assert "\n" not in str(error.value)


def test_undecodable_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff\xfe")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 text \(invalid start byte at byte 3\)"):
        read_texts(f"{tmp_path}/a.txt")
    with pytest.raises(ValueError, match="no such file"):
        list(read_jsonl(tmp_path / "gone.jsonl"))


def test_overlap_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("x")
    warn_of_overlap([tmp_path / "a.txt"], [tmp_path / "b.txt"])
    assert not caplog.text
    warn_of_overlap(find_files(f"{tmp_path}/*.txt"), find_files(f"{tmp_path}/b.txt"))
    assert "validation reads training files" in caplog.text
    assert "b.txt" in caplog.text
    assert "a.txt" not in caplog.text
