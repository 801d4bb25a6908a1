"""The trained depth comes from the run around the drafter, or is given."""

from pathlib import Path

import pytest

from specdec.drift.trained import trained_depth


def write(run: Path, name: str, steps: object) -> None:
    (run / name).write_text(f"model: {{ttt_steps: {steps}}}\n")


def test_the_run_says_it(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    assert trained_depth(drafter, None) is None and trained_depth(drafter, 3) == 3
    write(tmp_path, "config.yaml", 5)
    assert trained_depth(drafter, None) is None  # somebody's config, but no run's
    (tmp_path / "provenance.json").write_text("{}")
    assert trained_depth(drafter, None) == 5 == trained_depth(drafter, 5)
    for times in (2, 10):
        write(tmp_path, f"config.{times}.yaml", times)
    assert trained_depth(drafter, None) == 10  # the last that went on with it
    with pytest.raises(ValueError, match=r"trained_depth is 7, but .*config\.10\.yaml says 10"):
        trained_depth(drafter, 7)
    write(tmp_path, "config.11.yaml", "true")
    with pytest.raises(ValueError, match=r"model\.ttt_steps is True"):
        trained_depth(drafter, None)
    with pytest.raises(ValueError, match="at least 1"):
        trained_depth(drafter, 0)
