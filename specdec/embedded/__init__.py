"""A target with no download: a small Llama of the Python standard library's sources, which comes with the package."""

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.utils.lazily import imported_when_asked_for

__all__ = ["RECORD", "SEED", "EmbeddedData", "embedded_target", "held_out_prompts"]

RECORD = "pretrain.json"  # how a target of this kind was trained, in its directory

if TYPE_CHECKING:
    from specdec.embedded.corpus import SEED, EmbeddedData, held_out_prompts
else:  # they import lightning, which decoding does without
    __getattr__ = imported_when_asked_for(
        __name__,
        dict.fromkeys(["SEED", "EmbeddedData", "held_out_prompts"], "specdec.embedded.corpus"),
    )


def embedded_target() -> Path:
    """Return the directory of the embedded target: bfloat16 weights, tokenizer, card and record, as
    ``benchmarks/embedded_target.py`` wrote them.

    Raises:
        ValueError: the package was copied without its data.
    """
    path = Path(__file__).with_name("target")
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: the embedded target is missing: install specdec again")
    return path
