"""Shipped configs have names: listed, copied, and taken by ``specdec fit`` in place of a file."""

from pathlib import Path

import pytest
import yaml

from specdec.cli import main
from specdec.commands.presets import preset_files, summary_of
from specdec.utils.config import compose, read_yaml

ROOT = Path(__file__).parents[2]


def test_every_shipped_config_is_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    files = preset_files()
    assert len(files) == len(list((ROOT / "conf").glob("*/*.yaml")))
    assert all(
        10 < len(summary_of(file)) < 250 and "http" not in summary_of(file)
        for file in files.values()
    )
    assert main(["presets"]) == 0
    listed = capsys.readouterr().out
    assert all(name.partition("/")[2] in listed for name in files)


def test_a_copy_is_the_shipped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cp", "drafter/eagle3"]) == 0
    assert main(["cp", "two_layer", "--to", "mine.yaml"]) == 0
    for copy, name in (("eagle3.yaml", "eagle3"), ("mine.yaml", "two_layer")):
        assert Path(copy).read_text() == (ROOT / f"conf/drafter/{name}.yaml").read_text()
    for argv, message in (
        (["eagle3"], "give drafter/eagle3 or train/eagle3 or optimizer/eagle3"),
        (["drafter/eagle3"], "eagle3.yaml exists already"),
        (["two_layers"], "did you mean two_layer?"),
        (["unheard"], "specdec presets lists them"),
    ):
        assert main(["cp", *argv]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--model.drafter", "eagle3"], ["--model.drafter=eagle3"]])
def test_a_name_on_the_command_line_is_its_file(words: list[str]) -> None:
    by_file = [word.replace("eagle3", "conf/drafter/eagle3.yaml") for word in words]
    given, wanted = (Path(compose(argv)[1][-1].rpartition("=")[2]) for argv in (words, by_file))
    assert given.is_file() and given == wanted
    assert compose(["--out", "eagle3"]) == ({}, ["--out", "eagle3"])


def test_a_name_in_a_config_is_its_file(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump({"model": {"drafter": "eagle3", "optimizer": "muon"}, "out": "muon"})
    )
    model = read_yaml(str(config))["model"]
    assert Path(model["drafter"]) == ROOT / "conf/drafter/eagle3.yaml"
    assert Path(model["optimizer"]) == ROOT / "conf/optimizer/muon.yaml"
    assert read_yaml(str(config))["out"] == "muon"


def test_a_misspelled_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--model.drafter", "eagle_3"]) == 2
    assert "model.drafter: there is no eagle_3; did you mean eagle3?" in capsys.readouterr().err
    assert main(["fit", "--model.optimizer", "muonn"]) == 2
    assert "model.optimizer: there is no muonn" in capsys.readouterr().err


def test_a_folder_of_the_users_hides_no_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "drafter").mkdir(parents=True)
    (tmp_path / "conf" / "drafter" / "eagle3.yaml").write_text("fusion: LastLayer\n")
    monkeypatch.chdir(tmp_path)
    assert Path(compose(["--model.drafter", "eagle3"])[1][1]) == ROOT / "conf/drafter/eagle3.yaml"
    assert main(["presets"]) == 0 and "weighted_sum" in capsys.readouterr().out
