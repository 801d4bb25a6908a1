"""One line of the user's settings trusts the configs of a folder, and nothing that a stranger sends can use it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli import check_command_line
from specdec.commands.trusted_folder import folder_permissions
from specdec.utils.trust import Allowed

CONFIG = "trainer: {logger: {class_path: lightning.pytorch.loggers.WandbLogger}, max_steps: 1}\n"
REFUSED = "taken from the command line alone"
GRANTED = Allowed(imports=("my_parts",), keys=("logger",))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's project, which the settings trust, as the working folder."""
    for name in ("SPECDEC_ALLOW_KEYS", "SPECDEC_ALLOW_IMPORTS"):
        monkeypatch.delenv(name, raising=False)
    project = tmp_path / "project"
    project.mkdir()
    (project / "mine.yaml").write_text(CONFIG)
    (project / "my_parts.py").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(project)
    write_settings(tmp_path, f"{project}: {{keys: [logger], imports: [my_parts]}}\n")
    return project


def write_settings(home: Path, text: str) -> None:
    settings = home / "home" / "specdec" / "trust.yaml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(text)


def test_a_config_of_the_folder_may_name_a_logger_and_a_module() -> None:
    assert folder_permissions(["--config", "mine.yaml"]) == GRANTED
    assert folder_permissions(["--config=mine.yaml", "--config", "conf/quickstart.yaml"]) == GRANTED
    assert folder_permissions(["--config", "mine.yaml", "--model.drafter", "eagle3"]) == GRANTED
    assert folder_permissions(["mine.yaml", "--plan_only"]) == GRANTED  # a study
    check_command_line("fit", ["--config", "mine.yaml"])


def test_without_the_setting_it_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "home" / "specdec" / "trust.yaml").unlink()
    with pytest.raises(ValueError, match=REFUSED):
        run_check("--config", "mine.yaml")


def run_check(*args: str) -> None:
    """Read the configs under what the command is allowed, as fit does."""
    from specdec.cli import _permissions
    from specdec.utils import imports
    from specdec.utils.config import compose

    allowed, rest = _permissions(list(args))
    with imports.allowing(*allowed):
        compose(rest)


@pytest.mark.parametrize(
    "line",
    [
        "--config download/config.yaml",  # below the folder
        "--config mine.yaml --config download/config.yaml",
        "--config link.yaml",  # which leads out of the folder
        "--config ../elsewhere/config.yaml",
        "--config mine.yaml --config download/config",  # whatever its suffix
    ],
)
def test_a_strangers_config_is_refused(line: str, folder: Path) -> None:
    for place in (folder / "download", folder.parent / "elsewhere"):
        place.mkdir()
        (place / "config.yaml").write_text(CONFIG)
        (place / "config").write_text(CONFIG)
    (folder / "link.yaml").symlink_to(folder / "download" / "config.yaml")
    run_check("--config", "mine.yaml")  # the user's own is not
    assert folder_permissions(line.split()) == Allowed()
    with pytest.raises(ValueError, match=REFUSED):
        run_check(*line.split())


def test_data_from_anywhere_leaves_the_permission(folder: Path) -> None:
    rows = folder.parent / "rows.json"
    rows.write_text("[]")
    for words in (["--data.train", str(rows)], ["--prompts", str(rows)]):
        assert folder_permissions(["--config", "mine.yaml", *words]) == GRANTED


def test_a_strangers_part_takes_the_permission_away(folder: Path) -> None:
    (folder / "download").mkdir()
    (folder / "download" / "part.yaml").write_text("fusion: my_parts.Fusion\n")
    words = ["--config", "mine.yaml", "--model.drafter", "download/part.yaml"]
    assert folder_permissions(words) == Allowed()


def test_a_folder_cannot_trust_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by settings that it brings, nor by lying where another folder is trusted."""
    stranger = folder / "download"
    stranger.mkdir()
    (stranger / "config.yaml").write_text(CONFIG)
    for name in ("trust.yaml", ".config/specdec/trust.yaml", "specdec/trust.yaml"):
        (stranger / name).parent.mkdir(parents=True, exist_ok=True)
        (stranger / name).write_text(f"{stranger}: {{keys: [logger]}}\n")
    monkeypatch.chdir(stranger)
    with pytest.raises(ValueError, match=REFUSED):
        run_check("--config", "config.yaml")
    with pytest.raises(ValueError, match=REFUSED):
        run_check("--config", "../mine.yaml")  # modules would come from the working folder


def test_the_home_folder_of_the_environment_has_the_settings(folder: Path) -> None:
    """Without $XDG_CONFIG_HOME, in another process, as a shell starts it."""
    home = folder.parent / "home"
    (home / ".config").mkdir()
    (home / "specdec").rename(home / ".config" / "specdec")
    code = "from specdec.commands.trusted_folder import folder_permissions as f; print(f(['mine.yaml']).keys)"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"HOME": str(home), "PYTHONPATH": root},
    )  # fmt: skip
    assert done.stdout.strip() == "('logger',)"


@pytest.mark.parametrize(
    "text",
    ["keys: [logger]\n", "relative: {keys: [logger]}\n", "/x: {everything: [yes]}\n", "/x: {keys: logger}\n", "3\n"],
)  # fmt: skip
def test_damaged_settings_are_refused_with_their_place(text: str, tmp_path: Path) -> None:
    write_settings(tmp_path, text)
    settings = tmp_path / "home" / "specdec" / "trust.yaml"
    with pytest.raises(ValueError, match=re.escape(f"{settings}: write FOLDER: {{keys: [logger]")):
        folder_permissions(["mine.yaml"])
