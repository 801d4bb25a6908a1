"""What a fit cost, and how its loss fell: from its run directory."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

from specdec.card.study import Run
from specdec.files import read_json

EMBEDDING, HEAD, IDS = "embed_tokens.", "lm_head.", "vocab."
_POINTS = 400  # of a drawn loss curve


def cost(run: Run) -> dict[str, Any]:
    """Steps, tokens, time, memory, parameters and the last losses of a finished fit; None for what it did not record.

    ``tokens`` are rows times their length, padding included; ``seconds`` the whole process's, as the engine measured
    it; ``step_seconds`` those of an optimizer step, the median of what was logged; ``peak_memory_bytes`` the process's
    or, on a GPU, the device's.
    """
    directory, state = run.place("fit"), run.states["fit"]
    config, done = fit_config(directory), read_json(directory / "DONE.json")
    model, trainer = config.get("model", {}), config.get("trainer", {})
    data = (config.get("data") or {}).get("init_args") or {}
    found = logged(directory)
    steps, peak = int(done["steps"]), [value for _, value in found.get("memory/peak_mb", [])]
    tokens = None
    if isinstance(trainer.get("devices"), int) and {"batch_size", "seq_len"} <= set(data):
        batches = steps * (trainer.get("accumulate_grad_batches") or 1) * trainer["devices"]
        tokens = batches * (trainer.get("num_nodes") or 1) * data["batch_size"] * data["seq_len"]
    every = sorted(value for _, value in found.get("speed/step_seconds", []))
    return {
        "steps": steps,
        "tokens": tokens,
        "seconds": state.seconds,
        "step_seconds": every[len(every) // 2] if every else None,
        "peak_memory_bytes": round(max(peak) * 1e6) if peak else state.peak_memory_bytes,
        "trained_depth": model.get("ttt_steps"),
        **parameters(directory / "drafter", model),
        "metrics": done.get("metrics", {}),
    }


def fit_config(directory: Path) -> dict[str, Any]:
    """The run's resolved config, as it began."""
    found = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def parameters(drafter: Path, model: dict[str, Any]) -> dict[str, int | None]:
    """Numbers of a saved drafter: of all its parameters, and of those that were trained."""
    weights, config = drafter / "model.safetensors", drafter / "config.json"
    if not weights.is_file():
        return {"parameters": None, "trained_parameters": None}
    sizes = {}
    with safe_open(weights, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  it is no mapping
            shape = tensors.get_slice(name)
            sizes[name] = math.prod(shape.get_shape()) if not name.startswith(IDS) else 0
    frozen: tuple[str, ...] = () if model.get("train_embed") else (EMBEDDING,)
    own = read_json(config)["drafter"].get("head") == "own"
    frozen += () if model.get("train_head", True) and own else (HEAD,)
    trained = sum(size for name, size in sizes.items() if not name.startswith(frozen or ("\0",)))
    return {"parameters": sum(sizes.values()), "trained_parameters": trained}


def logged(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """``(step, value)`` of everything that the run logged as CSV; of a step that was run again, the last."""
    found: dict[str, dict[int, float]] = {}
    paths = sorted(directory.glob("csv/version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for name, text in row.items():
                    if name != "step" and text and row.get("step"):
                        found.setdefault(name, {})[int(row["step"])] = float(text)
    return {name: sorted(values.items()) for name, values in found.items()}


def curve(directory: Path, name: str) -> list[tuple[int, float]]:
    """``(optimizer step, value)`` of one logged number, thinned to what a picture can show; finite ones only."""
    points = [(step + 1, value) for step, value in logged(directory).get(name, []) if math.isfinite(value)]
    every = max(1, len(points) // _POINTS)
    return points[::every] if every > 1 else points


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Without what JSON cannot hold."""
    return json.loads(json.dumps(values, allow_nan=True), parse_constant=lambda name: None)
