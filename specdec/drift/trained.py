"""How deep a saved drafter was unrolled in training."""

from pathlib import Path

from omegaconf import OmegaConf

from specdec.compose import read_yaml


def trained_depth(directory: Path, given: int | None) -> int | None:
    """``model.ttt_steps`` of the run that the drafter lies in, as ``specdec fit`` has written it; else what is given.

    Raises:
        ValueError: the run's config cannot be read or names no such number, or what is given is another one.
    """
    if given is not None and given < 1:
        raise ValueError(f"trained_depth must be at least 1, not {given}")
    run = directory.resolve().parent
    if not (run / "provenance.json").is_file() or not (run / "config.yaml").is_file():
        return given
    path = max(run.glob("config*.yaml"), key=_times_resumed)
    found = OmegaConf.select(read_yaml(str(path)), "model.ttt_steps")
    if not isinstance(found, int) or isinstance(found, bool):
        raise ValueError(f"{path}: model.ttt_steps is {found!r}, no number of unroll steps")
    if given not in (None, found):
        raise ValueError(f"trained_depth is {given}, but {path} says {found}: leave --trained_depth out")
    return found


def _times_resumed(path: Path) -> int:
    mark = path.name.removeprefix("config").removesuffix("yaml").strip(".")
    return int(mark) if mark.isdigit() else 0
