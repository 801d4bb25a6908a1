"""What the arguments of both commands stand for."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specdec.drafter import Drafter, load
from specdec.drafter.io import WEIGHTS
from specdec.embedded.source import EMBEDDED, TargetSource

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def found_at(source: TargetSource) -> str:
    """The directory or Hub id under which an engine finds the target."""
    if source.source == EMBEDDED:
        from specdec.embedded.build import embedded_target

        return str(embedded_target())
    return source.source


def load_as_stored(directory: Path | str) -> Drafter:
    """A saved drafter in the dtype of its file.

    Raises:
        ValueError: as :func:`specdec.drafter.load`.
    """
    weights = Path(directory) / WEIGHTS
    dtype = torch.float32
    if weights.is_file():
        try:
            with safe_open(weights, framework="pt") as file:
                if "lm_head.weight" in file.keys():  # noqa: SIM118  not a mapping
                    dtype = _DTYPES[file.get_slice("lm_head.weight").get_dtype()]
        except SafetensorError:
            pass  # load says what is wrong
    return load(directory, dtype=dtype)
