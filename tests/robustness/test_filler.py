"""Texts that contexts are filled with."""

from pathlib import Path

import pytest

from specdec.embedded.corpus import Corpus, Source
from specdec.robustness import filler as module
from specdec.robustness.filler import filler


def test_a_file_or_the_sources_that_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("some text")
    assert list(filler(str(tmp_path / "text.txt"))()) == ["some text"]
    monkeypatch.setattr(module, "corpus", lambda seed: Corpus([Source("a.py", "seen")], [Source("b.py", "unseen")]))
    assert list(filler()()) == ["unseen"]
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        filler("nowhere.txt")
