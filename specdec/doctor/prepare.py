"""From the arguments of ``specdec fit`` to a set-up that can be examined."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from specdec.data import Batch, TokenData
from specdec.data.encoded import MaskError
from specdec.doctor import masks, taps
from specdec.doctor.begun import Begun, FaultError, begin, found
from specdec.doctor.finding import Finding, Verdict, faulty
from specdec.doctor.subject import ROWS, Subject, Trainer
from specdec.features import OnTheFly
from specdec.fit import Configured, configured
from specdec.nn.kernels import unroll_kernel
from specdec.training.module import DrafterModule
from specdec.training.run_directory import RunDirectory
from specdec.training.start import FromDrafter

GPU = ("auto", "gpu", "cuda")


def prepared(args: list[str], drafter: str | None, seconds: float, scratch: Path) -> Iterator[Finding | Subject]:
    """What is found on the way, and at the end the subject.

    Args:
        args: of ``specdec fit``.
        drafter: a directory, in place of the drafter that the run would make.

    Raises:
        ValueError: ``specdec fit`` would refuse the set-up in the same words.
        FaultError: there is a fault beyond which nothing can be checked.
    """
    cli = configured(Configured, "fit", args, RunDirectory())
    given = cli.config["fit"].trainer
    trainer = Trainer(given.precision, given.accelerator, given.gradient_clip_val, given.gradient_clip_algorithm)
    yield from built(cli.model, cli.datamodule, trainer, drafter, seconds, scratch)


def built(
    module: DrafterModule, data: TokenData, trainer: Trainer, drafter: str | None, seconds: float, scratch: Path
) -> Iterator[Finding | Subject]:
    """The same of parts that are there."""
    target = module.target_source.load()
    device = torch.device("cuda" if trainer.accelerator in GPU and torch.cuda.is_available() else "cpu")
    proof = taps.proven(target.to(device))
    if proof.verdict is Verdict.FAULTY:
        raise FaultError(proof)
    yield proof
    module.use(target)
    begun = None if drafter is None else found(drafter, target, scratch)
    if begun is not None:
        begin(module, begun)
    try:
        data.prepare(module.tokenizer)
    except MaskError as error:
        raise FaultError(faulty(masks.NAME, "the training data's masks", str(error))) from None
    made = module.build(data)
    try:
        module.open(data, made)
    except ValueError as error:
        if isinstance(module.features, OnTheFly):
            raise
        yield faulty(taps.NAME, "the cached features are those of this target and these data", str(error))
        module.source = OnTheFly()
        data.companion = module.source
    module.recipe = dataclasses.replace(module.recipe, kernel=unroll_kernel(module.attention, device)[1])
    batch = Batch(*(column[:ROWS].to(device) for column in next(iter(data.train_dataloader()))))
    from_saved = isinstance(module.start, FromDrafter)
    yield Subject(module, data, made.to(device), batch, module.source, trainer, from_saved, _checkpoint(begun), seconds)


def _checkpoint(begun: Begun | None) -> dict[str, torch.Tensor] | None:
    return None if begun is None else begun.checkpoint
