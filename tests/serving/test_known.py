"""vLLM's own mistakes are told where they are made, and nowhere else."""

import logging
from pathlib import Path

import pytest

from specdec.serving.known import warn_of_draws

LINE = "(EngineCore pid=2) INFO 11-21 Initializing a V1 LLM engine (v{}) with config: model='t', device_config={}, kv"


@pytest.mark.parametrize(
    ("version", "device", "wrong"),
    [
        ("0.32.0", "cpu", True),
        ("0.32.0", "cuda", False),
        ("0.33.0", "cpu", False),
    ],
)
def test_draws_on_a_cpu(
    version: str, device: str, wrong: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log").write_text(f"first\n{LINE.format(version, device)}\nlast\n")
    with caplog.at_level(logging.WARNING):
        warn_of_draws(tmp_path / "log")
    assert ("temperature 0 alone" in caplog.text) == wrong
