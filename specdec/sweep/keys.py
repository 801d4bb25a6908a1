"""Content addresses: the hash of what decides a job's numbers, and of nothing else.

A fit's key has its whole config but the settings that :data:`specdec.training.resuming.FREE` lists (logging,
validation, checkpoints, where things lie), what the names in it stand for (target, data, a drafter to start from), the
seed, and the code. A measure's key has its fit's, its settings, the prompts and the code. Neither has an arm's name:
two arms, or two studies, that ask for the same share it. How many threads or which machine is not in it: that changes
numbers by rounding alone.
"""

from collections.abc import Mapping
from typing import Any

from specdec.sweep.arms import Arm
from specdec.sweep.code import code_of, vouched
from specdec.sweep.contents import contents, digest, target_contents
from specdec.training.resuming import FREE
from specdec.values import canonical

DIGITS = 16  # of a key, hexadecimal


def key_of(kind: str, decisive: Any) -> str:
    """The address of a job of this kind."""
    return digest([kind, decisive, code_of(kind, vouched())])[:DIGITS]


def fit_decisive(arm: Arm, features: str, seed: int) -> Any:
    """What decides the numbers of a fit.

    Args:
        features: ``cached`` or ``on_the_fly``: the numbers are equal up to rounding, not always to the last bit.

    Raises:
        ValueError: a file that the config names cannot be read.
    """
    config = _without(canonical(arm.config), FREE)
    model = {**config["model"], "target": target_contents(arm.target)}
    model["start"] = contents(model["start"])
    if features == "cached":
        model["features"] = features
    return {**config, "model": model, "data": contents(config["data"]), "seed": seed}


def measure_decisive(fit: str, settings: Mapping[str, Any], target: Any, prompts: str) -> Any:
    """What decides the numbers of a measure.

    Args:
        fit: the fit's key.
        settings: the command's arguments, without where things lie.
        target: :func:`specdec.sweep.contents.target_contents` of the target as the measure runs it.
        prompts: their hash.
    """
    return {"fit": fit, "settings": dict(settings), "target": target, "prompts": prompts}


def _without(value: Any, free: tuple[str, ...], key: str = "") -> Any:
    """Without the settings below these keys, in which ``init_args`` does not count."""
    if not isinstance(value, dict):
        return value
    found = {}
    for name, child in value.items():
        inner = key if name == "init_args" else f"{key}.{name}" if key else name
        if name == "init_args" or inner not in free:
            found[name] = _without(child, free, inner)
    return found
