"""Mistakes of vLLM's own that users must hear of, since nothing else shows them."""

import logging
import re
from pathlib import Path

log = logging.getLogger(__name__)

# https://github.com/vllm-project/vllm/issues/55005: the temperature of a drafted token is memory that nobody wrote
_LOSES_TEMPERATURE = re.compile(r"LLM engine \(v0\.32\..*\bdevice_config=cpu\b")


def warn_of_draws(said: Path) -> None:
    """Warn where a server, by its log, draws tokens of another law than the target's as soon as it has a drafter."""
    if _LOSES_TEMPERATURE.search(said.read_text(encoding="utf-8", errors="replace")):
        log.warning(
            "vLLM 0.32 on a CPU drafts wrongly above temperature 0: ask with temperature 0 alone (docs/serve.md)"
        )
