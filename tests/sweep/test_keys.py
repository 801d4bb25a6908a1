"""Content addresses change with whatever decides numbers, and with nothing else."""

import copy
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.embedded.corpus import Corpus, Source
from specdec.embedded.source import TargetSource
from specdec.sweep import code
from specdec.sweep.arms import Arm
from specdec.sweep.code import essence
from specdec.sweep.contents import _corpus, contents, digest, target_contents
from specdec.sweep.keys import fit_decisive, key_of, measure_decisive
from specdec.sweep.plan import Plan
from specdec.sweep.study import Study
from specdec.training.resuming import FREE


def key(arm: Arm, seed: int = 0, features: str = "on_the_fly") -> str:
    return key_of("fit", fit_decisive(arm, features, seed))


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


def test_every_setting_but_the_free_ones_is_in_a_fits_key(tiny: tuple[Study, Plan]) -> None:
    arm = tiny[1].arms[0]
    found, seen = key(arm), set()
    for path in leaves(arm.config):
        dotted = ".".join(name for name in path if name != "init_args")
        free = any(dotted == name or dotted.startswith(f"{name}.") for name in FREE)
        if path[:2] == ("model", "target"):
            continue  # told by what it holds, below
        assert (key(changed(arm, path)) == found) == free, dotted
        seen.add(free)
    assert seen == {True, False}
    assert len({found, key(arm, seed=1), key(arm, features="cached")}) == 3


def test_the_order_of_keys_and_the_names_of_files_do_not_count(tiny: tuple[Study, Plan], tmp_path: Path) -> None:
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
    found = [contents({"train": name}) for name in (pattern, str(tmp_path), str(tmp_path / "a.txt"), "none", 3)]
    assert found[3:] == [{"train": "none"}, {"train": 3}]
    (tmp_path / "sub" / "b.txt").write_text("three")
    again = [contents({"train": name}) for name in (pattern, str(tmp_path), str(tmp_path / "a.txt"))]
    assert [a == b for a, b in zip(found, again, strict=False)] == [False, False, True]


def test_embedded_data_is_its_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"class_path": "specdec.embedded.datamodule.EmbeddedData", "init_args": {"seq_len": 32}}
    found = []
    for text in ("x = 1", "x = 2"):
        monkeypatch.setattr("specdec.sweep.contents.corpus", lambda seed, text=text: Corpus([Source("a.py", text)], []))
        _corpus.cache_clear()
        found.append(contents(part))
    _corpus.cache_clear()
    assert found[0] != found[1] and found[0]["init_args"] == part["init_args"]


def test_a_target_is_its_files_and_its_dtype(target_directory: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(target_directory, tmp_path / "other"))
    (other / "README.md").write_text("a model")
    one, two = (digest(target_contents(TargetSource(str(path)))) for path in (target_directory, other))
    assert one == two != digest(target_contents(TargetSource(str(other), dtype="bfloat16")))
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    target_contents.cache_clear()
    assert digest(target_contents(TargetSource(str(other)))) != one


def test_a_measures_key(tiny: tuple[Study, Plan]) -> None:
    given: dict[str, Any] = {"fit": "k", "settings": {"a": 1, "b": 2}, "target": ["t"], "prompts": "p"}
    found = {key_of("evaluate", measure_decisive(**given)), key_of("drift", measure_decisive(**given))}
    for name, other in {"fit": "l", "settings": {"a": 1, "b": 3}, "target": ["u"], "prompts": "q"}.items():
        found.add(key_of("evaluate", measure_decisive(**{**given, name: other})))
    assert len(found) == 6
    same = {**given, "settings": {"b": 2, "a": 1}}
    assert key_of("evaluate", measure_decisive(**same)) in found


def test_words_about_code_do_not_count_and_code_does() -> None:
    text = '"""A module."""\nX = 1  # one\n\nclass A:\n    """B."""\n    def f(self, a):\n        """C."""\n'
    text += "        return a + 1\n"
    words = '"""Other."""\nX = 1\nclass A:\n  def f(self, a):\n    # why\n    return (a +\n 1)\n'
    assert essence(text) == essence(words) != essence(words.replace("1)", "2)"))
    assert essence('def f():\n    """Only words."""\n') == essence('def f():\n    """Others."""\n')


def test_only_the_code_that_computes_is_in_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "specdec"
    for name in {each for names in code.PACKAGES.values() for each in names} | {"cli.py"}:
        assert (Path(code.__file__).parents[1] / name).exists()
        file = package / name if name.endswith(".py") else package / name / "inner" / "module.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("X = 1\n")
    monkeypatch.setattr(code, "__file__", str(package / "sweep" / "code.py"))
    of = code.code_of.__wrapped__

    def told() -> list[Any]:
        return [of(kind) for kind in ("cache", "fit", "evaluate", "drift")]

    before = told()
    for name, differs in {
        "cli.py": (False, False, False, False),
        "target/inner/module.py": (True, True, True, True),
        "training/inner/module.py": (False, True, False, False),
        "decoding/inner/module.py": (False, False, True, True),
        "drift/inner/module.py": (False, False, False, True),
    }.items():
        with (package / name).open("a") as file:
            file.write("\nMORE = 1\n")
        now = told()
        assert tuple(a != b for a, b in zip(before, now, strict=True)) == differs, name
        before = now
    (tmp_path / "counted_parts.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = of("fit", ("counted_parts",))
    (tmp_path / "counted_parts.py").write_text("X = 2\n")
    assert own != before[1] and of("fit", ("counted_parts",)) != own
