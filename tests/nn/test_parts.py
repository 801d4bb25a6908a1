"""Parts as data: nothing but what is loaded already, or allowed by the user, can come back."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec.drafter import (
    Concat,
    Drafter,
    DrafterConfig,
    DrafterSpec,
    Entry,
    Fusion,
    LastLayer,
    Narrow,
    Norms,
    PostNorm,
    PreNorm,
    Recurrence,
    ScalarMix,
    Wide,
)
from specdec.nn.parts import part_from_json, part_to_json
from specdec.utils.imports import allowing
from tests.tiny import tiny_config


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
        (Fusion, ScalarMix()),
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
    back = part_from_json(base, part_to_json(part), "here")
    assert back == part and type(back) is type(part)


def test_the_spelling_is_that_of_configs() -> None:
    assert part_to_json(Wide()) == "Wide"
    assert part_to_json(Narrow(bias=False)) == {
        "class_path": "Narrow",
        "init_args": {"bias": False},
    }
    assert part_to_json(Outside(0.5)) == {
        "class_path": f"{__name__}.Outside",
        "init_args": {"scale": 0.5},
    }


def test_a_users_module_is_imported_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "allowed_parts").mkdir()
    (tmp_path / "allowed_parts" / "__init__.py").touch()
    (tmp_path / "allowed_parts" / "late.py").write_text(
        "from dataclasses import dataclass\n"
        "from specdec.drafter import Recurrence\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Late(Recurrence):\n"
        "    by: float = 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    data = {"class_path": "allowed_parts.late.Late", "init_args": {"by": 0.25}}
    with allowing(["allowed_parts"]):
        assert "allowed_parts.late" not in sys.modules
        with pytest.raises(ValueError, match=r"^here: 'allowed_parts\.late\.Late' is no Entry"):
            part_from_json(Entry, data, "here")
        part = part_from_json(Recurrence, data, "here")
    del sys.modules["allowed_parts.late"]
    del sys.modules["allowed_parts"]
    assert type(part).__name__ == "Late" and part_to_json(part) == data


def test_a_part_without_declared_arguments_is_refused() -> None:
    class Loose(Entry):
        pass

    with pytest.raises(
        ValueError, match=r"^Loose cannot be stored: decorate it with @dataclass\(frozen=True\)$"
    ):
        part_to_json(Loose())


def test_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_part.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = set(sys.modules)
    for path in ("evil_part.Evil", "os.system", "antigravity.Flight", "builtins.eval"):
        with pytest.raises(
            ValueError,
            match=f"^here: '{path}' is no Entry that is loaded here; .*import its module",
        ):
            part_from_json(Entry, {"class_path": path, "init_args": {}}, "here")
    assert set(sys.modules) == loaded


@pytest.mark.parametrize("path", ["PostNorm", "Entry", "wide", "", 3])
def test_other_axes_and_the_bare_base_are_refused(path: object) -> None:
    with pytest.raises(ValueError, match="is no Entry that is loaded here"):
        part_from_json(Entry, {"class_path": path, "init_args": {}}, "here")


@pytest.mark.parametrize(
    "data", [None, [], {}, {"class_path": "x"}, {"class_path": "x", "init_args": {}, "y": 1}]
)
def test_what_is_no_part(data: object) -> None:
    with pytest.raises(
        ValueError, match=r"^here: expected a part's name, or class_path and init_args"
    ):
        part_from_json(Entry, data, "here")


@pytest.mark.parametrize("arguments", [{}, {"bias": True, "scale": 2}, {"scale": 2}])
def test_arguments_are_complete_and_known(arguments: dict) -> None:
    data = {"class_path": "Narrow", "init_args": arguments}
    with pytest.raises(ValueError, match=r"^here: Narrow takes \['bias'\], found"):
        part_from_json(Entry, data, "here")


@dataclass(frozen=True)
class EmptyFusion(Concat):
    def build(self, config: DrafterConfig) -> Any:
        return None


@dataclass(frozen=True)
class PlainEntry(Wide):
    def build(self, config: DrafterConfig) -> Any:
        return nn.Linear(1, 1)


@dataclass(frozen=True)
class FunctionRecurrence(PreNorm):
    def build(self, config: DrafterConfig) -> Any:
        return lambda out, normed: out


@dataclass(frozen=True)
class EmptyNorms(Norms):
    def build(self, config: DrafterConfig) -> Any:
        """Forgets to return it."""


@pytest.mark.parametrize(
    ("axis", "part", "made", "wanted"),
    [
        ("fusion", EmptyFusion(), "a NoneType", "torch.nn.modules.module.Module"),
        ("entry", PlainEntry(), "a Linear", "specdec.drafter.entry.EntryModule"),
        ("recurrence", FunctionRecurrence(), "a function", "torch.nn.modules.module.Module"),
        ("norms", EmptyNorms(), "a NoneType", "specdec.drafter.norms.NormTable"),
    ],
)
def test_a_part_that_builds_no_module_is_named(
    axis: str, part: Any, made: str, wanted: str
) -> None:
    config = tiny_config(DrafterSpec(draft_vocab_size=40, **{axis: part}))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is checked below
        Drafter(config, torch.arange(40))
    path = f"{__name__}.{type(part).__name__}"
    assert (
        str(caught.value)
        == f"{axis} {path}: its build returned {made}, wanted an instance of {wanted}"
    )
