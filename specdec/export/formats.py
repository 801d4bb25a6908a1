"""The formats by name."""

from collections.abc import Mapping
from typing import Any

from specdec.export.format import Format
from specdec.export.sglang import SglangFormat
from specdec.export.speculators import SpeculatorsFormat
from specdec.export.vllm import VllmFormat

FORMATS: dict[str, Format] = {each.name: each for each in (VllmFormat(), SpeculatorsFormat(), SglangFormat())}


def format_of(raw: Mapping[str, Any]) -> Format:
    """How a ``config.json`` is laid out: nested, as speculators has it, or flat, as everybody else."""
    return FORMATS["speculators" if "speculators_config" in raw or "speculators_model_type" in raw else "vllm"]
