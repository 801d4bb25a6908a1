"""The benchmark of faults in small: real SIGKILLs, real flips, and what it says where something differs."""

from pathlib import Path

import pytest

from benchmarks.faulting.campaign import Campaign, Killed
from benchmarks.faulting.flips import Flipped, artefacts, flip
from benchmarks.faulting.report import faults, markdown, to_json
from benchmarks.faulting.scene import DISTRIBUTED, VARIANTS, Scene, build
from benchmarks.faulting.trial import losses_of

STEPS, EVERY = 12, 4
ABOUT = {
    "date": "2026-01-01", "command": "x", "cpu": "c", "cores": 1, "threads": 1, "memory_gb": 1, "platform": "p",
    "git_commit": "g", "git_dirty": False, "python": "3", "load_at_start": 0, "load_at_end": 0, "seconds": 1,
    "versions": {"torch": "9.9"},
}  # fmt: skip


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return build(tmp_path_factory.mktemp("scene"))


def campaign(scene: Scene, name: str, folder: Path) -> Campaign:
    (variant,) = [each for each in (*VARIANTS, *DISTRIBUTED) if each.name == name]
    return Campaign(scene, variant, folder / "runs", folder / "temporary", STEPS, EVERY)


def test_killed_runs_end_as_if_nothing_had_happened(scene: Scene, tmp_path: Path) -> None:
    """Draws from the global generator, data workers, accumulation and validation; at steps and within saves."""
    runs = campaign(scene, "eagle3_1, dropout, 2 workers, accumulation, validation", tmp_path)
    assert len(runs.undisturbed.losses) == 2 * STEPS
    found = [runs.at_steps(2), runs.in_saves(2, 80)]
    assert [one.kills for one in found] == [2, 2] and faults(found, []) == []
    artefact = {each.what: each for each in artefacts(tmp_path / "runs" / "whole", scene, tmp_path)}
    flips = [flip(each, 12) for each in artefact.values()]
    assert len(flips) == 4 and faults([], flips) == []
    text = markdown(ABOUT, found, flips)
    assert "- 2 SIGKILLs at steps: **0** of" in text and "48 one-bit flips: **48** detected" in text
    assert to_json(ABOUT, found, flips)["kills"][0]["kills"] == 2


@pytest.mark.parametrize("name", ["eagle3, cached features, noise", "eagle3_1, FSDP2 x2"])
def test_other_runs_too(scene: Scene, name: str, tmp_path: Path) -> None:
    found = campaign(scene, name, tmp_path).at_steps(1)
    assert found.kills == 1 and faults([found], []) == []


def test_a_loss_that_differs_in_its_last_bit_is_found(scene: Scene, tmp_path: Path) -> None:
    runs = campaign(scene, "eagle1, noise", tmp_path)
    key = max(runs.undisturbed.losses)
    loss = runs.undisturbed.losses[key]
    runs.undisturbed.losses[key] = loss[:-3] + ("1" if loss[-3] == "0" else "0") + loss[-2:]
    found = runs.at_steps(1)
    assert found.differing >= 1 and found.weights_equal
    (said,) = faults([found], [])
    assert said.startswith("eagle1, noise, at steps: 1 kills, ") and losses_of(tmp_path / "runs" / "whole").exists()


def test_every_kind_of_fault_is_said() -> None:
    well = Killed("a", "at steps", 5, 1, 40, 0, True, 0, 0, 3, 1.0)
    assert well.holds
    for change in (
        {"kills": 0}, {"differing": 1}, {"weights_equal": False}, {"unreadable": 1}, {"leftovers": 1},
        {"most_checkpoints": 4},
    ):  # fmt: skip
        assert len(faults([well._replace(**change)], [])) == 1
    for missed in (Flipped("b", 9, 8, 8, 1), Flipped("b", 9, 9, 8, 1), Flipped("b", 0, 0, 0, 0)):
        assert len(faults([well], [missed])) == 1
