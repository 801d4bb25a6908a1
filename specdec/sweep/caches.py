"""The target's features once for all: one ``specdec cache`` for the arms whose target and data agree.

What a cache holds depends neither on a fit's seed nor on the order of rows: a row is found by its tokens. It stores the
union of the boundaries that its arms tap, and each reads its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.features.contract import INCIDENTAL
from specdec.features.index import INDEX
from specdec.features.source import OnTheFly
from specdec.imports import flags
from specdec.sweep.arms import Arm
from specdec.sweep.budget import tokens
from specdec.sweep.contents import contents, digest, target_contents
from specdec.sweep.job import Job
from specdec.sweep.keys import key_of
from specdec.sweep.memory import of_weights
from specdec.sweep.written import Written, config_of
from specdec.values import canonical

ON_THE_FLY, CACHED = "specdec.features.OnTheFly", "specdec.features.Cached"


def cache_jobs(arms: Sequence[Arm], directory: Path, threads: int, alone: int) -> tuple[dict[str, Written], list[str]]:
    """Jobs by key, and of every arm the key of its own.

    Args:
        alone: threads of a job that all others wait for.

    Raises:
        ValueError: an arm has features of its own.
    """
    groups: dict[str, list[Arm]] = {}
    of_arm = []
    for arm in arms:
        if canonical(arm.config["model"]["features"]) != canonical(_default()):
            raise ValueError(
                f"arm {arm.name}: model.features is the study's to give while its features are cached: remove it, or "
                "say features: on_the_fly"
            )
        of_arm.append(digest([target_contents(arm.target), contents(_rows(arm))]))
        groups.setdefault(of_arm[-1], []).append(arm)
    asked = alone if len(groups) == 1 else threads
    made = {same: _job(same, members, directory, asked) for same, members in groups.items()}
    return {one.job.key: one for one in made.values()}, [made[same].job.key for same in of_arm]


def features_of(directory: Path, cache: str | None) -> dict[str, Any]:
    """``model.features`` of a fit that reads a cache, or has none."""
    if cache is None:
        return _default()
    where = {"directory": str(directory / "features" / cache), "verify": False}
    return {"class_path": CACHED, "init_args": where}


def boundaries(arms: Sequence[Arm]) -> list[int]:
    """What the arms tap together; the final state is always stored."""
    designs = [arm.design for arm in arms]
    return sorted({b for d in designs for b in d.aux_layers if b < d.num_target_layers or not d.aux_final_norm})


def _job(same: str, arms: Sequence[Arm], directory: Path, threads: int) -> Written:
    layers, first, rows = boundaries(arms), arms[0], _first_rows(arms)
    key = key_of("cache", [same, layers, rows and [rows, first.data.batch_size]])  # the order of buckets has both
    model = first.config["model"]
    config = {
        "model": {"target": model["target"], "drafter": model["drafter"]},
        "data": first.config["data"],
        "layers": layers,
        "first_rows": rows,
    }
    states = f"{len(layers)} boundaries" if len(layers) != 1 else "1 boundary"
    job = Job(
        key=key,
        kind="cache",
        label=f"features of {len(arms)} arms, {states}",
        command=("cache", *flags(), "--config", config_of(directory, key), "--out", str(directory / "features" / key)),
        directory=f"features/{key}",
        done=INDEX,
        resumes=True,
        threads=threads,
        memory_bytes=of_weights(first.target, first.parameters[0]),
    )
    return Written(job, config)


def _first_rows(arms: Sequence[Arm]) -> int | None:
    """How many rows of an epoch's beginning all the fits together draw; None where that cannot be told."""
    most = 0
    for arm in arms:
        trainer, drawn = arm.config["trainer"], tokens(arm)
        alone = (str(trainer["devices"]), trainer["num_nodes"]) == ("1", 1)
        whole = str(trainer["limit_train_batches"]) in ("None", "1.0")
        alike = canonical(arm.config["data"]) == canonical(arms[0].config["data"])
        if drawn is None or not (alone and whole and alike):
            return None
        most = max(most, drawn // arm.data.seq_len)
    return most


def _rows(arm: Arm) -> Mapping[str, Any]:
    data = canonical(arm.config["data"])
    given = {name: value for name, value in data["init_args"].items() if name not in INCIDENTAL}
    return {"class_path": data["class_path"], "init_args": given}


def _default() -> dict[str, Any]:
    return {"class_path": ON_THE_FLY, "init_args": {"rows": OnTheFly().rows}}
