import dataclasses
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.embedded import build
from specdec.embedded.build import RECORD, embedded_target
from specdec.utils.files import read_json
from tests.embedded.conftest import TINY, use_library


@pytest.fixture(scope="session")
def built(small_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the tiny target in it; tests copy it."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        use_library(patch, small_library)
        embedded_target(TINY, cache)
    return cache


@pytest.fixture
def cache(built: Path, library: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "cache"))


def refuse(*args: Any) -> None:
    raise AssertionError("it was built again")


def only(cache: Path) -> Path:
    (path,) = (path for path in cache.iterdir() if path.is_dir())
    return path


def test_second_call_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_build", refuse)
    assert embedded_target(TINY, cache) == only(cache)


def test_read_only_cache_is_usable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "locked", refuse)
    assert embedded_target(TINY, cache) == only(cache)


def test_directory_loads(cache: Path) -> None:
    path = embedded_target(TINY, cache)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.dtype == torch.float32
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.num_hidden_layers == TINY.num_layers
    ids = tokenizer("def f(", return_tensors="pt").input_ids
    longer = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert longer.shape == (1, ids.shape[1] + 4)
    assert all(os.stat(file).st_mode & 0o444 == 0o444 for file in path.iterdir())


def test_record(cache: Path) -> None:
    record = read_json(embedded_target(TINY, cache) / RECORD)
    assert record["config"] == dataclasses.asdict(TINY)
    assert record["tokens"] == TINY.steps * TINY.tokens_per_step
    assert 0 < record["held_out_loss"] < 6
    assert record["tokens_per_second"] > 0
    assert record["provenance"]["versions"]["torch"] == torch.__version__


def test_same_config_gives_equal_weights(cache: Path, tmp_path: Path) -> None:
    again = embedded_target(TINY, tmp_path / "other")
    first, second = (load_file(path / "model.safetensors") for path in (only(cache), again))
    assert again.name == only(cache).name
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert read_json(again / RECORD)["held_out_loss"] == read_json(only(cache) / RECORD)["held_out_loss"]


def names(cache: Path, config: Any = TINY) -> str:
    return embedded_target(config, cache).name


def test_key_changes_with_each_determinant(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_build", lambda config, sources, determinants, path: None)
    keys = [names(tmp_path), names(tmp_path)]
    assert keys[0] == keys.pop()
    other = {field.name: getattr(TINY, field.name) for field in dataclasses.fields(TINY)}
    other |= {name: 2 * value for name, value in other.items() if isinstance(value, int | float)}
    other |= {"precision": "bf16-mixed", "seed": 5}
    keys += [names(tmp_path, dataclasses.replace(TINY, **{name: value})) for name, value in other.items()]
    version = importlib.metadata.version
    for distribution in ("torch", "transformers", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.metadata, "version", lambda name, d=distribution: "9" if name == d else version(name)
            )
            keys.append(names(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(platform, "python_version", lambda: "3.99.0")
        keys.append(names(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(build, "__version__", "9")
        keys.append(names(tmp_path))
    with monkeypatch.context() as patch:
        shutil.copytree(library, tmp_path / "library")
        file = next((tmp_path / "library").iterdir())
        file.write_text(file.read_text() + "# changed\n")
        use_library(patch, tmp_path / "library")
        keys.append(names(tmp_path))
    assert len(set(keys)) == len(keys) == 1 + len(other) + 3 + 3


@pytest.mark.parametrize("error", [KeyboardInterrupt])
def test_nothing_is_left_of_a_failed_build(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    steps = []

    def fail(*args: Any) -> None:
        steps.append(args)
        raise error("enough")

    with monkeypatch.context() as patch:
        patch.setattr("specdec.embedded.build.cross_entropy", fail)
        with pytest.raises(error):
            embedded_target(TINY, tmp_path)
    assert steps
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert embedded_target(TINY, tmp_path).is_dir()


BUILD = """
import sys, torch
from pathlib import Path
from types import SimpleNamespace
import specdec.embedded.corpus as module
module.sysconfig = SimpleNamespace(get_path=lambda name: sys.argv[1])
from specdec.embedded import EmbeddedConfig, build, embedded_target
torch.set_num_threads(1)
true = build._build
build._build = lambda *args: (print("building"), true(*args))
config = EmbeddedConfig(**eval(sys.argv[3]))
print(embedded_target(config, Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_two_processes_build_once(library: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(library), str(tmp_path), repr(dataclasses.asdict(TINY))]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    path = str(only(tmp_path))
    assert sorted(printed) == sorted([["building", path], [path]])


def test_cache_that_may_not_be_written(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file"):
        embedded_target(TINY, tmp_path / "file" / "cache")
