"""``specdec presets`` and ``specdec cp``: the configs that come with specdec, listed and copied."""

import re
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specdec.utils.config import SHIPPED
from specdec.utils.text import nearest_name

KINDS = {
    "drafter": "designs: specdec fit --model.drafter NAME",
    "train": "training recipes: specdec fit --config conf/train/NAME.yaml",
    "optimizer": "optimizers: specdec fit --model.optimizer NAME",
    "study": "studies: specdec sweep conf/study/NAME.yaml",
}


def preset_files() -> dict[str, Path]:
    """Return the configs that come with specdec, by kind and name, as ``drafter/eagle3``."""
    files = {}
    for kind in KINDS:
        for file in sorted((SHIPPED / kind).glob("*.yaml")):
            files[f"{kind}/{file.stem}"] = file
    return files


def presets() -> None:
    """List the designs, training recipes, optimizers and studies that come with specdec.

    Example: specdec presets
    """
    files = preset_files()
    console = Console()
    for kind, use in KINDS.items():
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, file in files.items():
            if name.startswith(f"{kind}/"):
                table.add_row(f"  {file.stem}", summary_of(file))
        console.print(use, highlight=False)
        console.print(table, highlight=False)
    console.print(
        "specdec cp KIND/NAME copies one, as drafter/eagle3, for you to edit.", highlight=False
    )


def summary_of(file: Path) -> str:
    """Return the first sentence of a config's comment, without links."""
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    text = re.sub(r" \([^()]*https?://[^()]*\)", "", " ".join(comment))
    return re.split(r"\. |; | Use: ", text)[0].rstrip(".:")


def cp(name: str, to: Path | None = None) -> None:
    """Copy a config that comes with specdec, for you to edit.

    Example: specdec cp drafter/eagle3 --to mine.yaml

    Args:
        name: the kind and name that specdec presets lists, or the name alone if only one kind has it.
        to: the new file; by default NAME.yaml in the working folder.

    Raises:
        ValueError: there is no config of this name, several kinds have it, or the file exists.
    """
    files = preset_files()
    matching = [known for known in files if name in (known, known.partition("/")[2])]
    if not matching:
        near = nearest_name(name, [*files, *(known.partition("/")[2] for known in files)])
        raise ValueError(f"there is no preset {name}; {near or 'specdec presets lists them'}")
    if len(matching) > 1:
        raise ValueError(f"{name} is the name of several presets: give {' or '.join(matching)}")
    source = files[matching[0]]
    target = Path(source.name) if to is None else to
    if target.exists():
        raise ValueError(f"{target} exists already: choose another file")
    shutil.copyfile(source, target)
