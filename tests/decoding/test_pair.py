"""A drafter of another target of the same shape is told from one of this target, by the weights."""

import dataclasses

import pytest
import torch

from specdec.decoding import warn_unless_made_for
from specdec.target import Target
from tests.export.made import made_drafter
from tests.tiny import presets, tiny_target


def test_another_target_of_the_same_shape(caplog: pytest.LogCaptureFixture) -> None:
    target, other = (tiny_target(seed, dtype=torch.float32) for seed in (0, 1))
    drafter = made_drafter(presets()["eagle3"], target)
    assert warn_unless_made_for(target, drafter) and not caplog.text
    assert not warn_unless_made_for(other, drafter)
    assert "trained for another target (in memory) of the same shape" in caplog.text
    with pytest.raises(
        ValueError,
        match=r"another target of the same shape, in memory: .*of another build or version; .*--other_target",
    ):
        warn_unless_made_for(other, drafter, refuse=True)


def test_a_drafter_that_does_not_say_whose_it_is(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target(0, dtype=torch.float32)
    drafter = made_drafter(presets()["eagle3"], target)
    drafter.config = dataclasses.replace(drafter.config, target={})
    assert (
        not warn_unless_made_for(target, drafter, refuse=True)
        and "does not say which target" in caplog.text
    )


def test_float16_has_a_fingerprint_of_its_own() -> None:
    target = tiny_target(0, dtype=torch.float32)
    drafter = made_drafter(presets()["eagle3"], target)
    half = Target(target.model.half())
    assert half.identity["fingerprint"] != drafter.config.target["fingerprint"]
    assert not warn_unless_made_for(half, drafter, refuse=True)
