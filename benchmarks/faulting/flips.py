"""One-bit flips over everything that a run leaves on a disk and later reads."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks.faulting.scene import Scene
from specdec.drafter import load
from specdec.embedded.source import TargetSource
from specdec.export import export_drafter
from specdec.export.arguments import load_as_stored
from specdec.features.store import Store
from specdec.serving.drafted import drafted
from specdec.training.checkpoint_io import AtomicCheckpointIO


class Flipped(NamedTuple):
    """What became of the flips in one kind of artefact."""

    what: str
    flips: int
    detected: int
    named: int
    """Of these, with a message of at most three lines that names the file or its directory."""
    without: int
    """Noticed by the library that reads the weights, without any hash."""

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return self._asdict()

    @property
    def holds(self) -> bool:
        """Whether none was missed."""
        return self.flips == self.detected == self.named > 0


class Artefact(NamedTuple):
    """Something on the disk, and its reader."""

    what: str
    path: Path
    read: Callable[[Path], object]
    plain: Callable[[Path], object]
    """What the library alone makes of the weights."""


def artefacts(run: Path, scene: Scene, folder: Path) -> list[Artefact]:
    """Of a finished run: its last checkpoint, its drafter and an export of it; and the cached features."""
    source = TargetSource(str(scene.target))
    exported = folder / "exported"
    export_drafter(load_as_stored(run / "drafter"), source.load(), exported)
    return [
        Artefact("checkpoint", run / "checkpoints" / "last.ckpt", AtomicCheckpointIO().load_checkpoint, _torch),
        Artefact("drafter", run / "drafter", load, _safetensors),
        Artefact("export", exported, lambda path: drafted(path, source, folder / "unused"), _safetensors),
        Artefact("cached features", scene.features, lambda path: Store(path, {}).verify(), _shards),
    ]


def flip(artefact: Artefact, count: int, seed: int = 0) -> Flipped:
    """Flip a bit, read, and put it back, so many times: in turn in every file, at a place drawn from all of it."""
    draw, detected, named, without = random.Random(seed), 0, 0, 0
    files = sorted(path for path in artefact.path.rglob("*") if path.is_file() and path.stat().st_size) or [
        artefact.path
    ]
    artefact.read(artefact.path)
    for number in range(count):
        file = files[number % len(files)]
        at, bit = draw.randrange(file.stat().st_size), 1 << draw.randrange(8)
        _toggle(file, at, bit)
        try:
            try:
                artefact.read(artefact.path)
            except ValueError as error:
                detected += 1
                text = str(error)
                named += str(artefact.path) in text and text.count("\n") < 3
            without += _fails(artefact.plain, artefact.path)
        finally:
            _toggle(file, at, bit)
    artefact.read(artefact.path)
    return Flipped(artefact.what, count, detected, named, without)


def _toggle(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        old = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([old ^ bit]))


def _torch(path: Path) -> object:
    return torch.load(path, weights_only=True)


def _safetensors(path: Path) -> object:
    return load_file(path / "model.safetensors")


def _shards(path: Path) -> object:
    return [load_file(shard) for shard in path.glob("*.safetensors")]


def _fails(read: Callable[[Path], object], path: Path) -> bool:
    try:
        read(path)
    except Exception:  # noqa: BLE001  whatever a library says of damage
        return True
    return False
