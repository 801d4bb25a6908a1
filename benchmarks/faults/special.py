"""Bad inputs that are no regular files, or decode to far more than they hold: families of :mod:`.inputs`."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from benchmarks.faults import world
from benchmarks.faults.world import World

Draw = Callable[[st.SearchStrategy], Any]
Bad = tuple[list[str], str]

FILES = {
    "drafter": ("config.json", "model.safetensors", "SHA256SUMS"),
    "target": ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    "export": ("config.json", "model.safetensors", "specdec.json", "SHA256SUMS"),
    "evaluation": ("metrics.json", "answers.jsonl", "SHA256SUMS"),
    "features": ("index.json", "*.safetensors"),
    "run": ("config.yaml", "losses.txt", "SHA256SUMS", "checkpoints/*.ckpt"),
    "prompts": ("a.jsonl", "a.json", "a.parquet", "a.txt"),
    "chats": ("a.jsonl", "a.json", "a.parquet"),
    "texts": ("a.txt", "a.jsonl", "a.parquet"),
    "config": ("a.yaml",),
    "study": ("a.yaml",),
    "journal": ("own.jsonl.journal",),
}  # fmt: skip
"""What a command reads, by its kind; of a pattern every file that fits is replaced."""


def special_files(a: World, draw: Draw, place: Path) -> Bad:
    """A pipe, a socket, a device or a directory in place of a file."""
    kind = draw(st.sampled_from(sorted(FILES)))
    name = draw(st.sampled_from(FILES[kind]))
    how = draw(
        st.sampled_from(["pipe", "socket", "/dev/zero", "/dev/tty", "/dev/full", "directory"])
    )
    folder = _folder(a, kind, place)
    for path in sorted(folder.glob(name)) or [folder / name]:
        _replace(path, how)
    return _use(a, kind, folder, name, place / "out"), f"{kind}/{name}: {how}"


def _folder(a: World, kind: str, place: Path) -> Path:
    """Return a copy of what is read, or an empty folder for a file of its own."""
    sources = {
        "drafter": a.drafter, "target": a.target, "export": a.export, "evaluation": a.one, "features": a.features,
        "run": a.half,
    }  # fmt: skip
    folder = place / kind
    if kind in sources:
        return world.copied(sources[kind], folder)
    folder.mkdir(parents=True)
    return folder


def _replace(path: Path, how: str) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "socket":
        # an address of a socket is short
        here = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif how == "directory":
        path.mkdir()
    else:
        path.symlink_to(how)


def _use(a: World, kind: str, folder: Path, name: str, out: Path) -> list[str]:
    """The command that reads it."""
    fit = a.fit(out, "--trainer.max_steps", "1")
    file = str(folder / name)
    if kind == "texts":
        fit[fit.index("--data.train") + 1] = file
        return fit
    return {
        **a.reading(folder, out),
        "run": a.fit(folder),
        "prompts": a.evaluate(out, prompts=folder / name),
        "chats": a.regenerate(out / "own.jsonl", chats=folder / name),
        "config": [*fit, "--config", file],
        "study": ["sweep", file, "--plan_only", "--out", str(out)],
        "journal": a.regenerate(folder / "own.jsonl"),
    }[kind]


def bombs(a: World, draw: Draw, place: Path) -> Bad:
    """A small Parquet file that decodes to gigabytes: a long text in every row, or a row of many elements."""
    import pyarrow
    from pyarrow import parquet

    how = draw(st.sampled_from(["long text", "many elements", "long names"]))
    size = draw(st.integers(24, 27))
    column = draw(st.sampled_from(["prompt", "text", "messages"]))
    if how == "long text":
        rows = draw(st.integers(500, 3000))
        values: Any = pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array(["a" * 2**size])
        )
    elif how == "many elements":
        count = 2**size
        kind = draw(st.sampled_from([pyarrow.string(), pyarrow.int8()]))
        values = pyarrow.ListArray.from_arrays(
            pyarrow.array([0, count], pyarrow.int32()), pyarrow.nulls(count, kind)
        )
    else:
        values, column = pyarrow.array(["a"]), "a" * 2**size
    path = place / "bomb.parquet"
    keeps_types = draw(st.booleans())
    parquet.write_table(
        pyarrow.table({column: values}), path, compression="zstd", store_schema=keeps_types, write_statistics=False
    )  # fmt: skip
    what = f"{how} of 2**{size} in {path.stat().st_size:,} bytes, types kept: {keeps_types}"
    if draw(st.booleans()):
        return a.evaluate(place / "out", prompts=path), f"evaluate: {what}"
    return a.regenerate(place / "out" / "own.jsonl", chats=path), f"regenerate: {what}"
