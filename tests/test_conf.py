"""Every shipped config is one that runs."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from specdec.commands.fit import run_fit
from specdec.commands.parser import parse_arguments
from specdec.drafter import MLA, Drafter, DrafterSpec, MarkovBlock, MaskBlock, TargetNorm, dry_run
from specdec.utils.config import compose, normalize_config
from tests.tiny import deeper, presets, tiny_config, variants

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted((CONF / "drafter").glob("*.yaml"))
RUNS = sorted(CONF.glob("*.yaml"))
# tests/sweep has those
FOR_FIT = sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name != "study")
SHIPPED = {"draft_vocab_size": 32000, "attention_window": 512}  # the tests' own are smaller
DESIGNS = presets() | variants() | deeper()
DESIGNS |= {"eagle2": DESIGNS["eagle1"], "hass": DESIGNS["eagle1"]}


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    """What --print_config says."""
    assert run_fit("fit", [*args, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def read(path: Path) -> DrafterSpec:
    """The design that a preset's file is, with nothing else."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--drafter", type=DrafterSpec)
    return parse_arguments(parser, ["--drafter", str(path)]).drafter


def shipped(design: DrafterSpec) -> DrafterSpec:
    """The tests' small design at its shipped size."""
    sizes = {name: size for name, size in SHIPPED.items() if isinstance(getattr(design, name), int)}
    if isinstance(design.recurrence, MarkovBlock):
        sizes |= {"num_layers": 5, "recurrence": MarkovBlock()}
    elif design.entry.context:
        sizes |= {"num_layers": 5, "recurrence": MaskBlock(masks=15)}
    kind = MLA() if isinstance(design.attention, MLA) else design.attention
    return dataclasses.replace(design, **sizes, attention=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_the_design_it_names(path: Path) -> None:
    spec = read(path)
    assert spec == shipped(DESIGNS[path.stem])
    config = tiny_config(spec)
    dry_run(Drafter(config, torch.arange(config.draft_vocab_size)))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_says_what_it_is_how_to_use_it_and_what_to_expect(path: Path) -> None:
    lines = path.read_text().splitlines()
    comment = " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))
    origin, use, expect = re.fullmatch(r"(.*) Use: (.*) Expect: (.*)", comment).groups()  # type: ignore[union-attr]
    assert "https://" in origin and len(expect) > 40
    assert f"specdec fit --model.drafter {path.stem}" in use
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_config_parses_and_says_how_to_use_it(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "specdec fit" in path.read_text().split("\n\n")[0]
    assert printed(capsys, "--config", str(path))["trainer"]["max_steps"] > 0


@pytest.mark.parametrize("path", FOR_FIT, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_config_passes_the_command_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the arguments that its own comment gives."""
    comment = " ".join(
        line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")
    )
    use = re.search(r"Use: specdec fit((?: --\S+ [^\s,;]+)+)", comment).group(1).split()  # type: ignore[union-attr]
    by_name = f"conf/{path.parent.name}/{path.name}" if path.parent.name == "train" else path.stem
    assert by_name in use
    config = printed(capsys, *use)["model"]
    if path.parent.name == "optimizer":
        wanted = yaml.safe_load(path.read_text())
        assert (
            normalize_config(config["optimizer"])["class_path"]
            == normalize_config(wanted)["class_path"]
        )
        assert wanted["init_args"].keys() <= config["optimizer"]["init_args"].keys()
    elif path.parent.name == "train":
        assert config["ttt_steps"] == yaml.safe_load(path.read_text())["model"]["ttt_steps"]
    else:
        design, drafter = shipped(DESIGNS[path.stem]), config["drafter"]
        for axis in ("fusion", "entry", "recurrence"):
            assert drafter[axis]["class_path"].endswith(f".{type(getattr(design, axis)).__name__}")
        theirs = {"class_path": "specdec.drafter.TargetNorm"}
        assert drafter["norms"] == {
            s: theirs if one == TargetNorm() else one for s, one in vars(design.norms).items()
        }
        assert drafter["head"] == design.head


def test_a_printed_config_prints_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = printed(
        capsys, "--config", str(CONF / "quickstart.yaml"), "--model.drafter.norms.aux", "concat"
    )
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(once))
    assert compose(["--config", str(tmp_path / "all.yaml")])[0] == once
    assert printed(capsys, "--config", str(tmp_path / "all.yaml")) == once
    assert once["model"]["drafter"]["norms"]["aux"] == "concat"


def test_a_reference_follows_what_overrides_its_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(
        "trainer: {max_steps: 9, val_check_interval: '${checkpoint.every_n_train_steps}'}"
    )
    (tmp_path / "b.yaml").write_text(
        "checkpoint: {every_n_train_steps: 5}\nmodel: {ttt_steps: '${trainer.max_steps}'}"
    )
    args = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    found = printed(capsys, *args, "--checkpoint.every_n_train_steps", "250")
    assert found["trainer"]["val_check_interval"] == 250 and found["model"]["ttt_steps"] == 9
    (tmp_path / "b.yaml").write_text("model: {ttt_steps: '${nope}'}")
    with pytest.raises(ValueError, match="nope"):
        run_fit("fit", [*args, "--print_config"])
