"""A drafter as vLLM takes it: exported already, or exported first."""

from pathlib import Path
from typing import Any, NamedTuple

from specdec.drafter.io import FORMAT as DRAFTER
from specdec.embedded.source import TargetSource
from specdec.export import FORMATS, export_drafter
from specdec.export.arguments import found_at, load_as_stored
from specdec.export.checkpoint import CONFIG, OURS, SINGLE, check_unchanged
from specdec.export.checkpoint import FORMAT as EXPORT
from specdec.export.switches import VLLM
from specdec.files import read_json, sha256
from specdec.target import load_config


class Drafted(NamedTuple):
    """A checkpoint for vLLM."""

    directory: Path
    method: str
    """``eagle`` or ``eagle3``."""


def drafted(directory: Path | str, target: TargetSource, scratch: Path) -> Drafted:
    """The export that ``directory`` is, or that is made of the drafter in it at ``scratch``, a new directory.

    Raises:
        NotServable: vLLM cannot express the drafter.
        ValueError: there is neither, it is damaged, or it is of another target or for another engine.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such drafter directory")
    if (directory / OURS).is_file():
        return _exported(directory, target)
    config = read_json(directory / CONFIG)
    if not isinstance(config, dict) or config.get("format") != DRAFTER:
        raise ValueError(
            f"{directory}: neither a drafter of specdec nor an export of one; specdec import reads published ones"
        )
    made = export_drafter(load_as_stored(directory), target.load(), scratch, served=target)
    return Drafted(made.directory, made.method)


def _exported(directory: Path, target: TargetSource) -> Drafted:
    check_unchanged(directory)  # before anything in it is believed
    record, weights = read_json(directory / OURS), directory / SINGLE[0]
    if not isinstance(record, dict) or record.get("format") != EXPORT:
        raise ValueError(f"{directory / OURS}: its format is not {EXPORT!r}")
    chosen = FORMATS.get(str(record.get("exported_as")))
    if chosen is None or chosen.engine != VLLM:
        raise ValueError(f"{directory}: exported for {record.get('engine')}: export it again with --format vllm")
    if sha256(weights) != record.get("weights_sha256"):
        raise ValueError(f"{weights}: its SHA-256 is not that in {OURS}: it was changed or damaged; export it again")
    try:
        _check_shape(record["drafter"], target)
        return Drafted(directory, str(record["method"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / OURS}: damaged, for want of {error}: export it again") from error


def _check_shape(drafter: dict[str, Any], target: TargetSource) -> None:
    """Raise ValueError if an export is of a target of another shape, which vLLM may load and draft nonsense with."""
    config = load_config(found_at(target), target.revision, target.trust_remote_code)
    for ours, theirs in (
        ("target_hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_target_layers", "num_hidden_layers"),
    ):
        if drafter[ours] != getattr(config, theirs):
            raise ValueError(
                f"the export is for a target of {theirs} {drafter[ours]}, {target.source} has {getattr(config, theirs)}"
            )
