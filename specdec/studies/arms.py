"""From combinations of levels to trainings: each composed and parsed as ``specdec fit`` would, before any begins.

Arms must be comparable: the same tokens, the same data in the same order, one change apart where one is meant.
"""

import functools
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import PreTrainedModel

from specdec.data import TokenData
from specdec.drafter import Drafter, DrafterConfig
from specdec.drafter.parts import dry_run
from specdec.fit import Configured, configured
from specdec.plan import drafter_config, plan
from specdec.studies.study import Axis, Combination, Level, Study, arm_name, measure_of
from specdec.target import TargetSource
from specdec.target.loading import skeleton
from specdec.training.building import check
from specdec.training.run_directory import RunDirectory
from specdec.utils.config import read_yaml
from specdec.utils.config_diff import canonical, is_part, pairs, words

NOT_KEPT = ("allow_changes", "ckpt_path", "out", "seed_everything", "weights_only")  # of a fit's config
LENGTH = (
    "max_steps", "max_epochs", "min_steps", "min_epochs", "limit_train_batches", "overfit_batches", "fast_dev_run",
    "accumulate_grad_batches", "devices", "num_nodes",
)  # fmt: skip
OF_A_BATCH = ("batch_size", "num_workers", "cache")  # of the data: neither which rows there are, nor their order


@dataclass(frozen=True)
class Arm:
    """One combination of levels, parsed.

    Args:
        config: of its fits, seed aside; what was left to a default included.
        measures: by name the arguments of what is measured.
        data: not read yet.
        drafter: its architecture, with the target's dimensions.
        parameters: numbers of the target's and of the drafter's.
        trained: parameters of the drafter that are trained; as the next, None where its precision is not known.
        memory_bytes: estimated for one process of training.
    """

    name: str
    levels: Combination
    config: Mapping[str, Any]
    measures: Mapping[str, Mapping[str, Any]]
    target: TargetSource
    data: TokenData
    drafter: DrafterConfig
    parameters: tuple[int, int]
    trained: int | None
    memory_bytes: int | None

    @property
    def tokens(self) -> int | None:
        """Tokens that it trains on, padding included; None where its length is in epochs, or not known."""
        trainer = self.config["trainer"]
        devices = str(trainer["devices"])
        plain = trainer["max_steps"] > 0 and trainer["max_epochs"] in (None, -1)
        if not plain or not devices.isdecimal() or trainer["fast_dev_run"] or trainer["overfit_batches"]:
            return None
        if "GradientAccumulationScheduler" in self.callbacks:
            return None
        rows = self.data.batch_size * trainer["accumulate_grad_batches"] * int(devices) * trainer["num_nodes"]
        return trainer["max_steps"] * rows * self.data.seq_len

    @property
    def callbacks(self) -> list[str]:
        """Names of its callbacks' classes."""
        found = self.config["trainer"]["callbacks"] or []
        each = found if isinstance(found, list) else [found]
        return [one["class_path"].rpartition(".")[2] for one in each if is_part(one)]


def read_arms(study: Study) -> list[Arm]:
    """Every arm of a study.

    Raises:
        ValueError: one is illegal, or two are one and the same; the message has the name, and what the parser or the
            parts say.
    """
    arms: list[Arm] = []
    for combination in study.combinations:
        name = arm_name(combination)
        try:
            arms.append(_arm(study, name, combination))
        except ValueError as error:
            raise ValueError(f"arm {name}: {error}") from error
    for one, two in itertools.combinations(arms, 2):
        if one.measures == two.measures and canonical(one.config) == canonical(two.config):
            raise ValueError(
                f"arms {one.name} and {two.name} come to the same training and the same measures: leave one of them "
                "out (leave_out), or see whether a level says what you mean"
            )
    return arms


def differences(baseline: Arm, arm: Arm) -> list[str]:
    """What an arm changes, in its parts' own terms: ``norms.aux: none to each``, one line for each setting.

    The drafter's settings come first, without ``model.drafter`` before them.
    """
    found = [*pairs(canonical(baseline.config), canonical(arm.config))]
    found.sort(key=lambda pair: not pair[0].startswith("model.drafter."))
    found += pairs(dict(baseline.measures), dict(arm.measures))
    return [f"{key.removeprefix('model.drafter.')}: {words(a)} to {words(b)}" for key, a, b in found]


def check_equal(study: Study, arms: Sequence[Arm], allow_unequal: bool = False) -> list[str]:
    """What of budget and data differs between arms; nothing where they are equal.

    Data may differ along axes that are of the data.

    Raises:
        ValueError: they differ and may not, or an arm may end early; the message has its name, and what differs.
    """
    baseline = next(arm for arm in arms if arm.levels == study.baseline)
    of_data = [axis.name for axis in study.axes if _is_of_data(axis)]
    told = []
    for arm in arms:
        early = "trainer.max_time" if arm.config["trainer"]["max_time"] is not None else None
        if early or "EarlyStopping" in arm.callbacks:
            raise ValueError(
                f"arm {arm.name}: {early or 'EarlyStopping, of trainer.callbacks,'} may end it early: remove it, so "
                "that all train alike"
            )
        like = next(other for other in arms if all(other.levels[axis] == arm.levels[axis] for axis in of_data))
        found = _other_length(baseline, arm)
        found += [f"{key} is {words(b)}, that of arm {like.name} {words(a)}" for key, a, b in _other_data(like, arm)]
        if of_data and arm.tokens is None:
            found.append("the data is an axis, and epochs of other data are other budgets: set trainer.max_steps")
        if found and not allow_unequal:
            raise ValueError(
                f"arm {arm.name}: {'; '.join(found)}: give all arms the same budget and data, make the data an axis, "
                "or say --allow_unequal"
            )
        told += [f"arm {arm.name}: {line}" for line in found]
    return told


def _other_length(baseline: Arm, arm: Arm) -> list[str]:
    one, two = baseline.tokens, arm.tokens
    if one is not None and one == two:
        return []
    a, b = (
        {**{f"trainer.{name}": each.config["trainer"][name] for name in LENGTH},
         "data.batch_size": each.data.batch_size, "data.seq_len": each.data.seq_len}
        for each in (baseline, arm)
    )  # fmt: skip
    found = [f"{key} is {words(theirs)}, the baseline's {words(own)}" for key, own, theirs in pairs(a, b)]
    if one is None or two is None:
        return found
    return [f"it trains on {two:,} tokens, the baseline, {baseline.name}, on {one:,} ({', '.join(found)})"]


def _other_data(one: Arm, two: Arm) -> list[tuple[str, Any, Any]]:
    def of(arm: Arm) -> dict[str, Any]:
        data = canonical(arm.config["data"])
        given = {f"data.{name}": value for name, value in data["init_args"].items() if name not in OF_A_BATCH}
        return {"data": data["class_path"], **given}

    return list(pairs(of(one), of(two)))


def _is_of_data(axis: Axis) -> bool:
    given = {key for level in axis.levels for key in (*level.settings, *(key for file in level.files for key in _read(file)))}  # fmt: skip # noqa: E501
    return "data" in {key.partition(".")[0] for key in given}


# composing


def arguments(study: Study, combination: Combination) -> list[str]:
    """What ``specdec fit`` is given for an arm: files, the levels' after the study's; then keys, deeper ones last.

    Raises:
        ValueError: files of two axes, or such a file and a key of ``set``, say different things.
    """
    levels = {axis.name: axis.level(combination[axis.name]) for axis in study.axes}
    _check_files(study.settings, levels)
    files = [*study.files, *(file for level in levels.values() for file in level.files)]
    own = {key: value for level in levels.values() for key, value in level.settings.items() if not measure_of(key)}
    settings = {key: value for key, value in study.settings.items() if key not in own} | own
    inside_last = sorted(settings.items(), key=lambda each: each[0].count("."))  # a part before what is inside it
    return [*(word for file in files for word in ("--config", file)), *(argument(*each) for each in inside_last)]


def argument(key: str, value: Any) -> str:
    """A setting as on the command line."""
    return f"--{key}={value if isinstance(value, str) else json.dumps(value)}"


def _measures(study: Study, combination: Combination) -> dict[str, dict[str, Any]]:
    """What an arm is measured with: the study's arguments, over which those of its levels win."""
    found = {name: dict(given) for name, given in study.measures.items()}
    for axis in study.axes:
        level = axis.level(combination[axis.name])
        for key, value in level.settings.items():
            if (measure := measure_of(key)) is None:
                continue
            if measure not in found:
                raise ValueError(
                    f"level {level.name} of axis {axis.name} gives {key}, but the study has no {measure}: add it, or "
                    "remove the key"
                )
            found[measure][key.partition(".")[2]] = value
    return found


def _check_files(settings: Mapping[str, Any], levels: Mapping[str, Level]) -> None:
    """See that no file of an axis silently wins over another axis' file, or loses to ``set``."""
    said: dict[str, tuple[str, str, Any]] = {}  # axis, file, value
    for axis, level in levels.items():
        own = {key: (axis, file, value) for file in level.files for key, value in _leaves(_read(file))}
        for key, (_, file, value) in own.items():
            if key in said and said[key][2] != value:
                raise ValueError(
                    f"{key} is given by {said[key][1]} (axis {said[key][0]}) and by {file} (axis {axis}): leave it to "
                    "one of them"
                )
        said |= own
    for name, (key, (axis, file, value)) in itertools.product(settings, said.items()):
        if (key == name and value != settings[name]) or key.startswith(f"{name}."):
            raise ValueError(
                f"set gives {name}, and so does {file} (axis {axis}): put it into a file under fit, over which levels "
                "win, or into the levels, beside their files"
            )


def _read(file: str) -> Any:
    """A config file as data, references unresolved."""
    return OmegaConf.to_container(read_yaml(file), resolve=False)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys as on a command line: those of a part's file belong to the part, ``init_args`` is left out."""
    if isinstance(value, str) and key and value.endswith((".yaml", ".yml")):
        value = _read(value)
    if not isinstance(value, dict):
        yield key, value
        return
    for name, child in value.items():
        yield from _leaves(child, key if name == "init_args" else f"{key}.{name}" if key else str(name))


# parsing


def _arm(study: Study, name: str, combination: Combination) -> Arm:
    """Parsed, and its drafter built without weights and sent a first pass."""
    cli = _parsed(arguments(study, combination))
    full = cli.full()
    config = {key: value for key, value in full.items() if key not in NOT_KEPT}
    module, data, trainer = cli.model, cli.datamodule, full["trainer"]
    model = _skeleton(module.target_source)
    design = drafter_config(module, model)
    positions = model.config.get_text_config(decoder=True).max_position_embeddings
    check(design, data.seq_len, positions, module.start, module.train_embed, module.train_head, module.ttt_steps)
    with torch.device("meta"):
        drafter = Drafter(design, torch.arange(design.draft_vocab_size, device="cpu"))
    dry_run(drafter)
    try:
        size = (data.batch_size, data.seq_len, 1, "one", trainer["precision"], trainer["accumulate_grad_batches"])
        needs = plan(module, *size, model)
        memory = needs.memory_bytes_per_process.total
        training: tuple[int | None, int | None] = (needs.drafter_trainable_parameters, memory)
    except ValueError:  # a precision that the arithmetic does not know
        training = (None, None)
    return Arm(
        name, dict(combination), config, _measures(study, combination), module.target_source, data, design,
        (_parameters(model), _parameters(drafter)), *training,
    )  # fmt: skip


def _parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _parsed(given: list[str]) -> Configured:
    argv, sys.argv = sys.argv, sys.argv[:1]  # Lightning warns of a command line beside the given one
    try:
        return configured(Configured, "fit", given, RunDirectory())
    finally:
        sys.argv = argv


@functools.lru_cache(maxsize=8)
def _skeleton(source: TargetSource) -> PreTrainedModel:
    return skeleton(source.directory(), source.revision, source.trust_remote_code)
