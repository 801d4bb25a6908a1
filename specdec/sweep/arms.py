"""From combinations of levels to trainings: each composed and parsed as ``specdec fit`` would, before any begins."""

import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.data import TokenData
from specdec.difference import Side, aligned, differences, run_groups
from specdec.drafter import Drafter, DrafterConfig
from specdec.drafter.dry_run import dry_run
from specdec.embedded.source import TargetSource
from specdec.fit import Configured, configured
from specdec.sweep.composing import arguments, measures
from specdec.sweep.designs import Combination, arm_name
from specdec.sweep.reading import nearest
from specdec.sweep.study import Study
from specdec.target.loading import skeleton
from specdec.training.building import check
from specdec.training.plan import drafter_config, plan
from specdec.training.run_directory import RunDirectory
from specdec.values import canonical, keys, pairs, words

NOT_KEPT = ("allow_changes", "ckpt_path", "out", "seed_everything", "weights_only")  # of a fit's config


class Parsed(Configured):
    """Parts of an arm; the parser, which takes most of the time, is made once for all."""

    _kept: ClassVar[dict[str, Any]] = {}

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, or what that made before."""
        if not self._kept:
            before = set(vars(self))
            super().setup_parser(*args, **kwargs)
            self._kept.update({name: value for name, value in vars(self).items() if name not in before})
        vars(self).update(self._kept)


@dataclass(frozen=True)
class Arm:
    """One combination of levels, parsed.

    Args:
        config: of its fits, seed aside; what was left to a default included.
        measures: by name the arguments of what is measured.
        data: not read yet.
        design: the drafter, with the target's dimensions.
        parameters: numbers of the target's and of the drafter's.
        memory_bytes: estimated for one process of training; None where its precision is not known.
        differences: against the baseline, a line each.
    """

    name: str
    levels: Combination
    config: Mapping[str, Any]
    measures: Mapping[str, Mapping[str, Any]]
    target: TargetSource
    data: TokenData
    design: DrafterConfig
    parameters: tuple[int, int]
    memory_bytes: int | None
    differences: tuple[str, ...] = ()


def read_arms(study: Study) -> list[Arm]:
    """Every arm of a study.

    Raises:
        ValueError: one is illegal, or two are one and the same; the message has the name, and what the parser or the
            parts say.
    """
    arms = []
    for combination in study.design.combinations:
        name = arm_name(combination)
        try:
            arms.append(_arm(study, name, combination))
        except ValueError as error:
            raise ValueError(f"arm {name}: {error}") from error
    _check_distinct(arms)
    sides = [Side(arm.name, "run", run_groups(arm.config, f"arm {arm.name}")) for arm in arms]
    base = next(number for number, arm in enumerate(arms) if arm.levels == study.baseline)
    told = [_differences(sides[base], arms[base], *pair) for pair in zip(sides, arms, strict=True)]
    return [dataclasses.replace(arm, differences=tuple(lines)) for arm, lines in zip(arms, told, strict=True)]


def _arm(study: Study, name: str, combination: Combination) -> Arm:
    given = arguments(study, combination)
    cli = _parsed(given)
    full = cli.full()
    config = {key: value for key, value in full.items() if key not in NOT_KEPT}
    module, data = cli.model, cli.datamodule
    model = _skeleton(module.target_source)
    design = drafter_config(module, model)
    positions = model.config.get_text_config(decoder=True).max_position_embeddings
    check(design, data.seq_len, positions, module.start, module.train_embed, module.train_head, module.ttt_steps)
    with torch.device("meta"):
        drafter = Drafter(design, torch.arange(design.draft_vocab_size, device="cpu"))
    dry_run(drafter)
    trainer = full["trainer"]
    try:
        size = (data.batch_size, data.seq_len, 1, "one", trainer["precision"], trainer["accumulate_grad_batches"])
        memory = plan(module, *size, model).memory.total
    except ValueError:  # a precision that the arithmetic does not know
        memory = None
    measured = measures(study, combination)
    parameters = (_parameters(model), _parameters(drafter))
    return Arm(name, dict(combination), config, measured, module.target_source, data, design, parameters, memory)


def _parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _parsed(given: list[str]) -> Parsed:
    argv, sys.argv = sys.argv, sys.argv[:1]  # Lightning warns of a command line beside the given one
    try:
        return configured(Parsed, "fit", given, RunDirectory())
    except ValueError as error:
        raise ValueError(f"{error}{_hint(str(error), given)}") from error
    finally:
        sys.argv = argv


def _hint(message: str, given: Sequence[str]) -> str:
    """The known key that is nearest to one that the parser did not know."""
    unknown = re.search(r"unrecognized arguments: --([\w.]+)", message)
    option = re.search(r"Option '(\w+)' is not accepted", message)
    wrong = unknown[1] if unknown else None
    if option:
        wrong = next((key for key in (arg[2:].partition("=")[0] for arg in given) if key.endswith(option[1])), None)
    if wrong is None:
        return ""
    files = [word for pair in itertools.pairwise(given) if pair[0] == "--config" for word in pair]
    known = list(keys(canonical(_parsed(files).full())))
    close = nearest(wrong, known)
    return close if "did you mean" in close else ""


@functools.lru_cache(maxsize=8)
def _skeleton(source: TargetSource) -> PreTrainedModel:
    return skeleton(source.directory(), source.revision, source.trust_remote_code)


def _check_distinct(arms: Sequence[Arm]) -> None:
    for number, arm in enumerate(arms):
        for other in arms[:number]:
            if arm.measures == other.measures and canonical(arm.config) == canonical(other.config):
                raise ValueError(
                    f"arms {other.name} and {arm.name} come to the same training and the same measures: leave one of "
                    "them out (leave_out), or see whether a level says what you mean"
                )


def _differences(base: Side, baseline: Arm, side: Side, arm: Arm) -> list[str]:
    rows = [(each.what, each.text(0), each.text(1)) for each in differences(base, side)]
    rows += [(key, words(a), words(b)) for key, a, b in pairs(dict(baseline.measures), dict(arm.measures))]
    return aligned(rows)
