import sysconfig
from pathlib import Path

import pytest

from specdec.embedded.corpus import Corpus, corpus
from tests.embedded.conftest import use_library


@pytest.mark.slow
def test_real_library_splits_by_file() -> None:
    parts = corpus(0)
    train, held_out = ({source.path for source in part} for part in parts)
    assert not train & held_out
    assert len(train) > 300
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.1
    assert [source.path for source in parts.train] == sorted(train)
    assert {"textwrap.py", "json/decoder.py"} <= train | held_out
    assert parts == corpus(0)
    assert held_out != {source.path for source in corpus(1).held_out}


def test_real_library_leaves_out_tests_tables_and_packages() -> None:
    paths = [source.path for part in corpus(0) for source in part]
    folders = {folder for path in paths for folder in path.split("/")[:-1]}
    assert not folders & {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "__pycache__",
        "lib2to3",
        "encodings",
    }
    assert "stringprep.py" not in paths
    assert not [path for path in paths if path.startswith("_sysconfigdata")]


def test_texts_are_the_files() -> None:
    source = corpus(0).held_out[0]
    file = Path(sysconfig.get_path("stdlib")) / source.path
    assert source.text == file.read_text(encoding="utf-8")


def test_unusable_files_are_left_out(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in library.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    use_library(monkeypatch, tmp_path)
    before = corpus(0)
    (tmp_path / "tiny.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" * 200)
    (tmp_path / "table.py").write_text("T = [" + "0x1234, " * 500 + "]\n")
    (tmp_path / "vast.py").write_text("# a word\n" * 100_000)
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "sub.py").write_text("# a word\n" * 100)
    assert corpus(0) == before
    (tmp_path / "good.py").write_text("# a word\n" * 100)
    after = corpus(0)
    assert len(after.train) + len(after.held_out) == len(before.train) + len(before.held_out) + 1
    assert set(before.train) <= set(after.train)


def test_library_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in (tmp_path, tmp_path / "python311.zip"):
        use_library(monkeypatch, root)
        with pytest.raises(ValueError, match="use one installed with its sources") as error:
            corpus(0)
        assert "\n" not in str(error.value)


def test_the_hash_is_of_every_path_and_text(library: Path) -> None:
    parts = corpus(0)
    first = parts.train[0]
    for other in (first._replace(path="other.py"), first._replace(text="other")):
        assert Corpus([other, *parts.train[1:]], parts.held_out).sha256 != parts.sha256
    assert corpus(0).sha256 == parts.sha256
