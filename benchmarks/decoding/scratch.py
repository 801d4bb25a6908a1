"""The target and the drafter on disk, in one dtype, as each system reads them."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.decoding.systems import DRAFT_TOKENS
from specdec.drafter import load
from specdec.embedded.source import TargetSource
from specdec.export import export_drafter
from specdec.target import Target
from specdec.target.loading import no_progress_bars


class Kept(NamedTuple):
    """Directories."""

    target: str  # in Hugging Face's format
    served: str | None  # the drafter in vLLM's
    method: str | None


def keep(source: str, drafter: str | None, dtype: str, folder: Path) -> Kept:
    """Write both; weights are rounded to the dtype once, here.

    Raises:
        ValueError: target or drafter cannot be read, do not match, or vLLM cannot serve the drafter.
    """
    target = TargetSource(source, dtype=dtype).load()
    place = folder / f"target-{dtype}"
    target.model.set_attn_implementation("sdpa")  # every system chooses its own anew
    with no_progress_bars():
        target.model.save_pretrained(place)
    if drafter is None:
        return Kept(str(place), None, None)
    saved = Target.load(place, dtype=dtype)
    exported = export_drafter(
        load(drafter, dtype=target.dtype), saved, folder / f"drafter-{dtype}", draft_tokens=DRAFT_TOKENS
    )
    return Kept(str(place), str(exported.directory), exported.method)
