"""Every shipped config is one that runs."""

from pathlib import Path

import pytest
import yaml

from specdec.compose import compose
from specdec.drafter import DrafterConfig
from specdec.fit import run
from tests.tiny import presets, tiny_config

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted((CONF / "drafter").glob("*.yaml"))
RUNS = sorted(CONF.glob("*.yaml"))


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    """What --print_config says."""
    assert run("fit", [*args, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_there_are_presets() -> None:
    assert {path.stem for path in PRESETS} == {"eagle1", "eagle2", "eagle3", "eagle3_1"}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_the_published_design(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = printed(capsys, "--model.drafter", str(path))["model"]["drafter"]
    wanted = tiny_config(presets()["eagle1" if path.stem == "eagle2" else path.stem])
    assert isinstance(wanted, DrafterConfig)
    for axis in ("fusion", "entry", "recurrence"):
        assert drafter[axis]["class_path"].endswith(f".{type(getattr(wanted, axis)).__name__}")
    assert drafter["norms"] == vars(wanted.norms)
    assert drafter["head"] == wanted.head


def test_the_generations_differ_in_a_handful_of_lines() -> None:
    texts = {path.stem: {line for line in path.read_text().splitlines() if line[0] != "#"} for path in PRESETS}
    assert all(len(texts[one] - texts[two]) <= 6 for one in texts for two in texts)
    assert len(texts["eagle3_1"] - texts["eagle3"]) == 2
    assert texts["eagle1"] == texts["eagle2"]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_config_parses_and_says_how_to_use_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "specdec fit" in path.read_text().split("\n\n")[0]
    assert printed(capsys, "--config", str(path))["trainer"]["max_steps"] > 0


def test_a_printed_config_prints_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = printed(capsys, "--config", str(CONF / "quickstart.yaml"), "--model.drafter.norms.aux", "concat")
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(once))
    assert compose(["--config", str(tmp_path / "all.yaml")])[0] == once
    assert printed(capsys, "--config", str(tmp_path / "all.yaml")) == once
    assert once["model"]["drafter"]["norms"]["aux"] == "concat"
