"""A saved, exported or published drafter in the place of the one that a run would make."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from specdec.doctor.finding import Finding, Verdict
from specdec.doctor.vocabulary import maps
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, load, save
from specdec.drafter.io import FORMAT
from specdec.export.adopt import adopt
from specdec.export.checkpoint import fetch, read_checkpoint
from specdec.files import read_json
from specdec.target import Target
from specdec.training.module import DrafterModule
from specdec.training.start import FromDrafter


class FaultError(Exception):
    """Nothing can be checked beyond this."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.said)
        self.finding = finding


class Begun(NamedTuple):
    """Where a drafter lies that a module can begin from."""

    directory: str
    config: DrafterConfig
    checkpoint: dict[str, Tensor] | None
    """Its tensors as published, where it is not specdec's own."""


def found(directory: str, target: Target, scratch: Path) -> Begun:
    """Read it; a checkpoint is imported into ``scratch``.

    Raises:
        ValueError: it cannot be read, or is of another target.
        FaultError: its vocabulary's maps contradict themselves, so that no drafter can be made of it.
    """
    where = Path(directory)
    stored = read_json(where / "config.json") if (where / "config.json").is_file() else {}
    if isinstance(stored, dict) and stored.get("format") == FORMAT:
        return Begun(directory, load(where).config, None)
    checkpoint = read_checkpoint(fetch(directory, None))
    try:
        drafter: Drafter = adopt(checkpoint, target)
    except ValueError:
        finding = maps("the checkpoint's d2t and t2d", checkpoint.tensors, None, target.vocab_size)
        if finding.verdict is Verdict.FAULTY:
            raise FaultError(finding) from None
        raise
    made = save(drafter, scratch / "imported")
    return Begun(str(made), drafter.config, checkpoint.tensors)


def begin(module: DrafterModule, begun: Begun) -> None:
    """Let the module begin with its design and weights.

    Raises:
        ValueError: the module's loss cannot train such a design.
    """
    fields = {field.name: getattr(begun.config, field.name) for field in dataclasses.fields(DrafterSpec)}
    module.spec = DrafterSpec(**{**fields, "aux_layers": list(begun.config.aux_layers)})
    module.recipe.loss.check(module.spec)
    module.start = FromDrafter(begun.directory)
    module.train_head = module.train_head and module.spec.head == "own"
