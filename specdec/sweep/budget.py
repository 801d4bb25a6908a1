"""Whether all arms train on the same number of tokens, and on the same data in the same order."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.sweep.arms import Arm
from specdec.sweep.axes import Axis
from specdec.sweep.composing import read
from specdec.sweep.study import Study
from specdec.values import canonical, is_part, pairs, words

LENGTH = (
    "max_steps", "max_epochs", "min_steps", "min_epochs", "limit_train_batches", "overfit_batches", "fast_dev_run",
    "accumulate_grad_batches", "devices", "num_nodes",
)  # fmt: skip
OF_A_BATCH = ("batch_size", "num_workers", "cache")  # of the data: neither which rows there are, nor their order


def check_equal(study: Study, arms: Sequence[Arm], allow_unequal: bool) -> list[str]:
    """What of budget and data differs between arms; nothing where they are equal.

    Data may differ along axes that are of the data.

    Raises:
        ValueError: they differ and may not, or an arm may end early; the message has its name, and what differs.
    """
    baseline = next(arm for arm in arms if arm.levels == study.baseline)
    told = []
    for arm in arms:
        if early := _may_end_early(arm):
            raise ValueError(f"arm {arm.name}: {early} may end it early: remove it, so that all train alike")
        found = _unequal(baseline, arm) + _other_data(study, arms, arm)
        if found and not allow_unequal:
            raise ValueError(
                f"arm {arm.name}: {'; '.join(found)}: give all arms the same budget and data, make the data an axis, "
                "or say --allow_unequal"
            )
        told += [f"arm {arm.name}: {line}" for line in found]
    return told


def tokens(arm: Arm) -> int | None:
    """Tokens that it trains on, padding included; None where its length is in epochs, or not known."""
    trainer = arm.config["trainer"]
    devices = str(trainer["devices"])
    plain = trainer["max_steps"] > 0 and trainer["max_epochs"] in (None, -1)
    if not plain or not devices.isdecimal() or trainer["fast_dev_run"] or trainer["overfit_batches"]:
        return None
    if "GradientAccumulationScheduler" in _callbacks(arm):
        return None
    rows = arm.data.batch_size * trainer["accumulate_grad_batches"] * int(devices) * trainer["num_nodes"]
    return trainer["max_steps"] * rows * arm.data.seq_len


def _may_end_early(arm: Arm) -> str | None:
    trainer = arm.config["trainer"]
    if trainer["max_time"] is not None:
        return "trainer.max_time"
    return "EarlyStopping, of trainer.callbacks," if "EarlyStopping" in _callbacks(arm) else None


def _callbacks(arm: Arm) -> list[str]:
    """Names of their classes."""
    found = arm.config["trainer"]["callbacks"] or []
    each = found if isinstance(found, list) else [found]
    return [one["class_path"].rpartition(".")[2] for one in each if is_part(one)]


def _unequal(baseline: Arm, arm: Arm) -> list[str]:
    one, two = tokens(baseline), tokens(arm)
    if one is not None and one == two:
        return []
    a, b = _length(baseline), _length(arm)
    found = [f"{key} is {words(theirs)}, the baseline's {words(own)}" for key, own, theirs in pairs(a, b)]
    if one is None or two is None:
        return found
    return [f"it trains on {two:,} tokens, the baseline, {baseline.name}, on {one:,} ({', '.join(found)})"]


def _length(arm: Arm) -> dict[str, Any]:
    trainer = {f"trainer.{name}": arm.config["trainer"][name] for name in LENGTH}
    return {**trainer, "data.batch_size": arm.data.batch_size, "data.seq_len": arm.data.seq_len}


def _other_data(study: Study, arms: Sequence[Arm], arm: Arm) -> list[str]:
    axes = [axis.name for axis in study.axes if _is_of_data(axis)]
    like = next(other for other in arms if all(other.levels[axis] == arm.levels[axis] for axis in axes))
    found = pairs(_data(like), _data(arm))
    told = [f"{key} is {words(b)}, that of arm {like.name} {words(a)}" for key, a, b in found]
    if axes and tokens(arm) is None:
        told.append("the data is an axis, and epochs of other data are other budgets: set trainer.max_steps")
    return told


def _is_of_data(axis: Axis) -> bool:
    keys = {key for level in axis.levels for file in level.files for key in read(file)}
    return "data" in {key.partition(".")[0] for key in keys | axis.keys}


def _data(arm: Arm) -> Mapping[str, Any]:
    data = canonical(arm.config["data"])
    given = {name: value for name, value in data["init_args"].items() if name not in OF_A_BATCH}
    return {"data": data["class_path"], **{f"data.{name}": value for name, value in given.items()}}
