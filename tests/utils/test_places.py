"""Paths in a config, judged by where they end up."""

import copy
import os
import random
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace

from specdec.training.checkpoint import AtomicCheckpointIO
from specdec.training.distributed import FSDP2
from specdec.utils import imports
from specdec.utils.places import (
    checkpoint_folders,
    flags_for,
    is_inside,
    make_typed_places_absolute,
    move_places_inside,
    path_texts,
    plain_key,
    typed_values,
)

ESCAPES = (
    "/etc/x", "../x", "a/../../x", "~/x", "~root", "$HOME/x", "${HOME}/x", "a/b/../../../x", "./..", "..", "//x",
    "{epoch}/../../x", "/", "run-other/../../run-other",
)  # fmt: skip
INSIDE = (
    "x", "a/b", "a/../b", ".", "", "val/loss", "{epoch}-{step}", "...", "..a", "a~", "lightning.pytorch.X", "$NONE/x",
)  # fmt: skip
NAMES = ("name", "version", "sub_dir", "filename", "prefix", "anything", "save_dir", "dirpath")


def around(value: Any, name: str, draw: random.Random) -> Namespace:
    """A config with a value somewhere below ``trainer``."""
    part: Any = draw.choice([Namespace, dict])(**{name: value})
    for _ in range(draw.randrange(4)):
        part = draw.choice(
            [lambda part: [part], lambda part: {"a": part}, lambda part: Namespace(b=part)]
        )(part)
    return Namespace(trainer=Namespace(logger=part), data=Namespace(train="/data/x"))


@pytest.mark.parametrize("seed", range(60))
def test_a_path_that_leads_out_is_refused_whatever_its_key(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    name = draw.choice(NAMES)
    value = draw.choice(ESCAPES)
    config = around(value, name, draw)
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=rf"trainer\.logger\S*{name} is taken from the command line alone.*"
                       rf"--allow_keys {name}$"):  # fmt: skip
        move_places_inside(config, run, ())
    assert flags_for(around(value, name, draw), run) == ["--allow_keys", name]
    config = around(value, name, draw)
    (key,) = (plain_key(path.key) for path in path_texts(config) if path.name == name)
    move_places_inside(config, run, {(key, value)})
    others = {(f"trainer.profiler.{name}", value), (name, value), (key, "y")}
    with pytest.raises(ValueError, match="command line alone"):
        move_places_inside(around(value, name, draw), run, others)
    with imports.allowing((), keys=[name]):
        move_places_inside(around(value, name, draw), run, ())


@pytest.mark.parametrize("value", INSIDE)
def test_a_path_that_stays_inside_is_kept(value: str, tmp_path: Path) -> None:
    config = Namespace(trainer=Namespace(x=[{"name": value}], dirpath=value, seed=3, no=None))
    move_places_inside(config, tmp_path, ())
    assert config.trainer.x == [{"name": value}] and config.trainer.seed == 3
    assert config.trainer.dirpath == str(tmp_path / value)


def test_beside_the_trainer_known_places_alone_are_paths(tmp_path: Path) -> None:
    """Other parts read what lies elsewhere."""
    source = {"directory": "/features", "tee": "teed"}
    config = Namespace(data={"train": ["/data", "../x"]}, model={"features": source})
    move_places_inside(config, tmp_path, ())
    assert config.data == {"train": ["/data", "../x"]}
    assert config.model == {"features": {"directory": "/features", "tee": str(tmp_path / "teed")}}
    with pytest.raises(
        ValueError, match=r"model\.features\.tee is taken from the command line alone"
    ):
        move_places_inside(Namespace(model={"features": {"tee": "/elsewhere"}}), tmp_path, ())


def test_what_was_typed_is_known_by_its_whole_key() -> None:
    """What stands inside ``{...}`` is as in a file."""
    words = [
        "fit", "--config", "{trainer: {a: {name: ../x}}}", "--trainer.logger+=CSVLogger",
        "--trainer.logger.init_args.name", "../y",
        "--trainer.logger.save_dir=/z", "--trainer.callbacks+", "[{init_args: {dirpath: /d}}]", "--out", "/o",
    ]  # fmt: skip
    typed = typed_values(words)
    assert typed >= {("trainer.logger.name", "../y"), ("trainer.logger.save_dir", "/z"), ("out", "/o")}  # fmt: skip
    assert not {key for key, value in typed if value in ("/d", "../x")}
    move_places_inside(Namespace(trainer={"logger": [{"init_args": {"name": "../y"}}]}), Path("r"), typed)  # fmt: skip


def test_a_typed_place_is_saved_so_that_it_leads_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a config's own stays in the run where the typed one has to be allowed."""
    monkeypatch.chdir(tmp_path)
    parts = [{"init_args": {"dirpath": "far"}}, {"init_args": {"dirpath": "near"}}]
    logger = {"save_dir": "logs", "name": "../name"}
    config = Namespace(trainer={"callbacks": parts, "logger": logger}, model={"tee": "teed"})
    typed = {("trainer.callbacks.dirpath", "far"), ("model.tee", "teed"), ("trainer.logger.save_dir", "logs"),
             ("trainer.logger.name", "../name")}  # fmt: skip
    typed = make_typed_places_absolute(config, typed)
    far, near = (str(tmp_path / name) for name in ("far", "run/near"))
    assert [part["init_args"]["dirpath"] for part in parts] == [far, "near"]
    assert config.model == {"tee": str(tmp_path / "teed")} and logger["save_dir"] == "logs"
    saved = copy.deepcopy(config)
    run = tmp_path / "run"
    move_places_inside(config, run, typed)
    flags = flags_for(vars(saved), run)
    assert flags == ["--allow_keys", "dirpath,name,tee"]
    with imports.allowing((), keys=flags[1].split(",")):
        move_places_inside(saved, run, ())
    assert saved == config
    assert [part["init_args"]["dirpath"] for part in parts] == [far, near]


def test_a_name_that_begins_as_the_folder_is_no_place_in_it(tmp_path: Path) -> None:
    assert is_inside(tmp_path / "run" / "x", tmp_path / "run") and is_inside("a/..", ".")
    assert not is_inside(tmp_path / "run-2", tmp_path / "run")


def test_a_template_leads_no_checkpoint_out(tmp_path: Path) -> None:
    """``{step:c}`` writes a dot at step 46."""
    (tmp_path / "elsewhere.ckpt").write_text("precious")
    callback = Namespace(dirpath=None, filename="{step:c}")
    plugin = AtomicCheckpointIO(lambda: checkpoint_folders(tmp_path / "run", [callback, object()], ()))  # fmt: skip
    callback.dirpath = str(tmp_path / "typed")  # Lightning gives it one as training begins
    name = f"{46:c}{46:c}"
    for path in (tmp_path / "run" / name / "elsewhere.ckpt", tmp_path / "elsewhere.ckpt"):
        with pytest.raises(ValueError, match="a checkpoint outside"):
            plugin.save_checkpoint({}, path)
        with pytest.raises(ValueError, match="a checkpoint outside"):
            plugin.remove_checkpoint(path)
    assert (tmp_path / "elsewhere.ckpt").read_text() == "precious"
    plugin.save_checkpoint({}, tmp_path / "typed" / "x.ckpt")
    assert os.listdir(tmp_path / "typed") == ["x.ckpt"]


def test_a_typed_file_name_frees_its_own_folder_alone(tmp_path: Path) -> None:
    one = Namespace(dirpath=str(tmp_path / "run/a"), filename="../../x/{step}")
    other = Namespace(dirpath=str(tmp_path / "run/b"), filename="../../y/{step}")
    typed = {("trainer.callbacks.filename", one.filename), ("trainer.profiler.filename", other.filename)}  # fmt: skip
    folders = checkpoint_folders(tmp_path / "run", [one, other], typed)
    assert {os.path.relpath(folder, tmp_path) for folder in folders} == {"run", "run/a", "run/b", "x"}  # fmt: skip
    with imports.allowing((), keys=["filename"]):
        assert checkpoint_folders(tmp_path / "run", [one, other], ()) == []


def test_no_folder_of_shards_is_removed_elsewhere(tmp_path: Path) -> None:
    """Lightning replaces one that stands where a checkpoint is written."""
    shards = tmp_path / "precious"
    shards.mkdir()
    (shards / "meta.pt").write_text("precious")
    strategy = FSDP2()
    strategy.checkpoint_io = AtomicCheckpointIO(lambda: [tmp_path / "run"])
    with pytest.raises(ValueError, match="a checkpoint outside"):
        strategy.save_checkpoint({}, shards)
    assert (shards / "meta.pt").read_text() == "precious"
