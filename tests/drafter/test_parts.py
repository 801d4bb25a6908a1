"""Parts as data: nothing but what is loaded already can come back."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec.drafter import Concat, Entry, Fusion, LastLayer, Narrow, PostNorm, PreNorm, Recurrence, Wide
from specdec.drafter.parts import describe, revive


@dataclass(frozen=True)
class Outside(Entry):
    """A part that a user wrote."""

    scale: float = 1.0


@dataclass(frozen=True)
class Deeper(Outside):
    """And one derived from it."""

    more: int = 0


@pytest.mark.parametrize(
    ("base", "part"),
    [
        (Fusion, Concat()),
        (Fusion, LastLayer()),
        (Entry, Wide()),
        (Entry, Narrow()),
        (Entry, Narrow(bias=False)),
        (Recurrence, PreNorm()),
        (Recurrence, PostNorm()),
        (Entry, Outside(scale=0.1)),
        (Entry, Deeper(scale=0.1, more=3)),
    ],
    ids=str,
)
def test_there_and_back(base: type, part: object) -> None:
    back = revive(base, describe(part), "here")
    assert back == part and type(back) is type(part)


def test_the_spelling_is_that_of_configs() -> None:
    assert describe(Narrow(bias=False)) == {
        "class_path": "specdec.drafter.entry.Narrow",
        "init_args": {"bias": False},
    }


def test_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_part.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = set(sys.modules)
    for path in ("evil_part.Evil", "os.system", "antigravity.Flight", "builtins.eval"):
        with pytest.raises(ValueError, match=f"^here: '{path}' is no Entry that is loaded here; .*import its module"):
            revive(Entry, {"class_path": path, "init_args": {}}, "here")
    assert set(sys.modules) == loaded


@pytest.mark.parametrize("path", ["specdec.drafter.recurrence.PostNorm", "specdec.drafter.entry.Entry", "Wide", "", 3])
def test_other_axes_and_the_bare_base_are_refused(path: object) -> None:
    with pytest.raises(ValueError, match="is no Entry that is loaded here"):
        revive(Entry, {"class_path": path, "init_args": {}}, "here")


@pytest.mark.parametrize(
    "data", [None, "Wide", [], {}, {"class_path": "x"}, {"class_path": "x", "init_args": {}, "y": 1}]
)
def test_what_is_no_part(data: object) -> None:
    with pytest.raises(ValueError, match=r"^here: expected class_path and init_args"):
        revive(Entry, data, "here")


@pytest.mark.parametrize("arguments", [{}, {"bias": True, "scale": 2}, {"scale": 2}])
def test_arguments_are_complete_and_known(arguments: dict) -> None:
    data = {"class_path": "specdec.drafter.entry.Narrow", "init_args": arguments}
    with pytest.raises(ValueError, match=r"^here: Narrow takes \['bias'\], found"):
        revive(Entry, data, "here")
