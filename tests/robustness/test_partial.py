"""What is measured so far."""

from pathlib import Path

import pytest

from specdec.robustness.partial import Partial
from tests.evaluation.made import answer

ANSWERS = [answer("a", (2, 0), context=(5, 8), draft_ms=(0.5, 1.0)), answer("b", ())]


def test_what_is_kept_is_found_with_the_same_settings_alone(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    kept = Partial(folder, {"seed": 0}, ["one", "two"])
    assert kept.find("clean", 0) is None and not folder.exists()
    kept.keep("clean", 0, ANSWERS, {"c": "too long"})
    assert Partial(folder, {"seed": 0}, ["three", "one"]).find("clean", 1) == (ANSWERS, {"c": "too long"})
    other = Partial(folder, {"seed": 1}, ["one"])
    assert other.find("clean", 0) is kept.find("no_bos", 0) is kept.find("clean", 1) is None
    kept.end()
    assert not folder.exists()


@pytest.mark.parametrize("text", ["[]", "{}", '{"answers": [{"prompt_id": 1}], "left_out": {}}', "{"])
def test_a_broken_file_is_told(tmp_path: Path, text: str) -> None:
    kept = Partial(tmp_path, {}, [None])
    kept.keep("clean", 0, ANSWERS, {})
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=path.name):
        kept.find("clean", 0)
