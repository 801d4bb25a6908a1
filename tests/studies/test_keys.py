"""Content addresses change with whatever decides numbers, and with nothing else."""

import copy
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.studies.arms import Arm
from specdec.studies.jobs import StudyPlan
from specdec.studies.keys import (
    content_hashes,
    digest,
    fit_decisive,
    key_of,
    target_contents,
)
from specdec.studies.study import Study
from specdec.target import TargetSource
from specdec.training.run_directory import changes_numbers
from specdec.utils import machine, trust


def key(arm: Arm, seed: int = 0, features: str = "on_the_fly") -> str:
    return key_of("fit", fit_decisive(arm, features) | {"seed": seed})


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from leaves(child, (*path, name))
    else:
        yield path


def changed(arm: Arm, path: tuple[str, ...]) -> Arm:
    config = copy.deepcopy(dict(arm.config))
    place = config
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = "changed"
    return dataclasses.replace(arm, config=config)


def test_every_setting_but_the_free_ones_is_in_a_fits_key(tiny: tuple[Study, StudyPlan]) -> None:
    arm = tiny[1].arms[0]
    found, seen = key(arm), set()
    for path in leaves(arm.config):
        dotted = ".".join(name for name in path if name != "init_args")
        free = not changes_numbers(dotted)
        if path[:2] == ("model", "target"):
            continue  # told by what it holds, below
        assert (key(changed(arm, path)) == found) == free, dotted
        seen.add(free)
    assert seen == {True, False}
    assert len({found, key(arm, seed=1), key(arm, features="cached")}) == 3


def test_the_order_of_keys_and_the_names_of_files_do_not_count(
    tiny: tuple[Study, StudyPlan], tmp_path: Path
) -> None:
    arm = tiny[1].arms[0]
    back = dict(reversed(list(arm.config.items())))
    assert key(dataclasses.replace(arm, config=back, name="other")) == key(arm)
    data = copy.deepcopy(dict(arm.config["data"]))
    moved = Path(shutil.copy(data["init_args"]["train"], tmp_path / "moved.txt"))
    data["init_args"]["train"] = str(moved)
    there = dataclasses.replace(arm, config={**arm.config, "data": data})
    assert key(there) == key(arm)
    moved.write_text(moved.read_text() + "more\n")
    assert key(there) != key(arm)


def test_what_names_stand_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("two")
    pattern = str(tmp_path / "**" / "*.txt")
    found = [
        content_hashes({"train": name})
        for name in (pattern, str(tmp_path), str(tmp_path / "a.txt"), "none", 3)
    ]
    assert found[3:] == [{"train": "none"}, {"train": 3}]
    (tmp_path / "sub" / "b.txt").write_text("three")
    again = [
        content_hashes({"train": name})
        for name in (pattern, str(tmp_path), str(tmp_path / "a.txt"))
    ]
    assert [a == b for a, b in zip(found, again, strict=False)] == [False, False, True]


def test_a_target_is_its_files_and_its_dtype(target_directory: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(target_directory, tmp_path / "other"))
    (other / "README.md").write_text("a model")
    one, two = (
        digest(target_contents(TargetSource(str(path)))) for path in (target_directory, other)
    )
    assert one == two != digest(target_contents(TargetSource(str(other), dtype="bfloat16")))
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    target_contents.cache_clear()
    assert digest(target_contents(TargetSource(str(other)))) != one


def test_the_code_is_in_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its commit, whether the checkout has changes, the libraries' versions, and modules of the user's own."""
    versions = dict.fromkeys(machine.LIBRARIES, "1")
    found = {"git_commit": "a", "git_dirty": False, "python": "3", "versions": versions}

    def of(**changes: Any) -> str:
        machine.code_version.cache_clear()
        monkeypatch.setattr(machine, "provenance", lambda: found | changes)
        return key_of("evaluate", ["fit", {"a": 1}])

    told = [of(), of(git_commit="b"), of(git_dirty=True), of(versions=versions | {"torch": "2"})]
    assert len(set(told)) == 4 and of() == told[0] != key_of("drift", ["fit", {"a": 1}])
    (tmp_path / "counted_parts.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(trust, "permissions", [trust.Allowed(imports=("counted_parts",))])
    own = of()
    (tmp_path / "counted_parts.py").write_text("X = 2\n\n")
    assert len({told[0], own, of()}) == 3
    machine.code_version.cache_clear()
