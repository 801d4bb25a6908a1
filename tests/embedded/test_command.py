from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specdec.embedded import build
from specdec.embedded.build import RECORD, EmbeddedConfig
from specdec.utils import command
from specdec.utils.files import read_json
from tests.embedded.conftest import TINY


def arguments() -> list[str]:
    return [f"--{name}={value}" for name, value in asdict(TINY).items()]


def main(argv: list[str]) -> int:
    return command.call(build.build_target, "pretrain", argv)


class AskedError(Exception):
    pass


@pytest.fixture
def cache(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_names_the_directory_and_the_loss(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments()) == 0
    (line,) = capsys.readouterr().out.splitlines()
    (path,) = (path for path in cache.iterdir() if path.is_dir())
    loss = read_json(path / RECORD)["held_out_loss"]
    assert line.startswith(f"{path}: held-out loss {loss:.3f}, ") and line.endswith(" tokens/s")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[EmbeddedConfig]:
    """The configurations that would have been built."""
    configs: list[EmbeddedConfig] = []

    def ask(config: EmbeddedConfig) -> Any:
        configs.append(config)
        raise AskedError

    monkeypatch.setattr(build, "embedded_target", ask)
    return configs


def test_config_file_and_defaults(tmp_path: Path, asked: list[EmbeddedConfig]) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("tokens: 50000\nnum_layers: 3\n")
    for argv in ([], ["--config", str(file), "--num_layers", "4"]):
        with pytest.raises(AskedError):
            main(argv)
    assert asked == [EmbeddedConfig(), EmbeddedConfig(tokens=50000, num_layers=4)]


@pytest.mark.parametrize("argv", [["--tokenz", "3"], ["--tokens", "many"], ["--config", "nowhere.yaml"]])
def test_unknown_and_ill_typed_arguments(argv: list[str], asked: list[EmbeddedConfig]) -> None:
    with pytest.raises(ValueError, match=argv[0].lstrip("-")) as error:
        main(argv)
    assert "\n" not in str(error.value)
    assert not asked


def test_number_out_of_range(asked: list[EmbeddedConfig]) -> None:
    with pytest.raises(ValueError, match="warmup is -1"):
        main(["--warmup=-1"])
    assert not asked
