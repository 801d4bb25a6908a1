"""Paths in a config, judged by where they end up."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace

from specdec.training.checkpoint import AtomicCheckpointIO
from specdec.utils import imports
from specdec.utils.places import checkpoint_folders, is_inside, keep_inside, typed_values

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
    with pytest.raises(ValueError, match=rf"trainer\.logger\S*{name} is taken from the command line alone.*"
                       rf"--allow_keys {name}$"):  # fmt: skip
        keep_inside(config, tmp_path / "run", (), "")
    keep_inside(around(value, name, draw), tmp_path / "run", {(name, value)})
    with pytest.raises(ValueError, match="command line alone"):
        keep_inside(around(value, name, draw), tmp_path / "run", {("other", value), (name, "y")})
    with imports.allowing((), keys=[name]):
        keep_inside(around(value, name, draw), tmp_path / "run", ())


@pytest.mark.parametrize("value", INSIDE)
def test_a_path_that_stays_inside_is_kept(value: str, tmp_path: Path) -> None:
    config = Namespace(trainer=Namespace(x=[{"name": value}], dirpath=value, seed=3, no=None))
    keep_inside(config, tmp_path, ())
    assert config.trainer.x == [{"name": value}] and config.trainer.seed == 3
    assert config.trainer.dirpath == str(tmp_path / value)


def test_beside_the_trainer_known_places_alone_are_paths(tmp_path: Path) -> None:
    """Other parts read what lies elsewhere."""
    source = {"directory": "/features", "tee": "teed"}
    config = Namespace(data={"train": ["/data", "../x"]}, model={"features": source})
    keep_inside(config, tmp_path, ())
    assert config.data == {"train": ["/data", "../x"]}
    assert config.model == {"features": {"directory": "/features", "tee": str(tmp_path / "teed")}}
    with pytest.raises(
        ValueError, match=r"model\.features\.tee is taken from the command line alone"
    ):
        keep_inside(Namespace(model={"features": {"tee": "/elsewhere"}}), tmp_path, ())
    keep_inside(config := Namespace(model={"tee": "teed"}), tmp_path, {("tee", "teed")})
    assert config.model == {"tee": "teed"}


def test_what_was_typed_is_known_by_its_option() -> None:
    words = [
        "fit", "--config", "{trainer: {a: {name: ../x}}}", "--trainer.logger+=CSVLogger",
        "--trainer.logger.name", "../y",
        "--trainer.logger.save_dir=/z", "--trainer.callbacks+", "[{init_args: {dirpath: /d}}]", "--out", "/o",
    ]  # fmt: skip
    typed = typed_values(words)
    assert typed >= {("name", "../y"), ("save_dir", "/z"), ("dirpath", "/d"), ("out", "/o")}
    assert ("name", "../x") not in typed and ("save_dir", "/o") not in typed


def test_a_name_that_begins_as_the_folder_is_no_place_in_it(tmp_path: Path) -> None:
    assert is_inside(tmp_path / "run" / "x", tmp_path / "run") and is_inside("a/..", ".")
    assert not is_inside(tmp_path / "run-2", tmp_path / "run")


def test_a_template_leads_no_checkpoint_out(tmp_path: Path) -> None:
    """``{step:c}`` writes a dot at step 46."""
    (tmp_path / "elsewhere.ckpt").write_text("precious")
    callback = Namespace(dirpath=str(tmp_path / "typed"))
    folders = checkpoint_folders(tmp_path / "run", [callback, object()], ())
    plugin = AtomicCheckpointIO(folders)
    name = f"{46:c}{46:c}"
    for path in (tmp_path / "run" / name / "elsewhere.ckpt", tmp_path / "elsewhere.ckpt"):
        with pytest.raises(ValueError, match="a checkpoint outside"):
            plugin.save_checkpoint({}, path)
        with pytest.raises(ValueError, match="a checkpoint outside"):
            plugin.remove_checkpoint(path)
    assert (tmp_path / "elsewhere.ckpt").read_text() == "precious"
    plugin.save_checkpoint({}, tmp_path / "typed" / "x.ckpt")
    assert os.listdir(tmp_path / "typed") == ["x.ckpt"]
    assert checkpoint_folders(tmp_path, [], {("filename", "../x")}) == []
