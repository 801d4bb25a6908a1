"""What a config may import: nothing but parts of specdec and its frameworks, unless the user says so."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from specdec.cli import main
from specdec.commands.parser import parse_arguments
from specdec.drafter import Fusion
from specdec.utils import imports

PART = """
from dataclasses import dataclass
from pathlib import Path

from specdec.drafter import Concat
from specdec.training.losses import SoftCrossEntropy

Path(__file__).with_name("imported").touch()


@dataclass(frozen=True)
class Mine(Concat):
    scale: float = 1.0


@dataclass(frozen=True)
class MyLoss(SoftCrossEntropy):
    pass
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a user's module and configs that name its parts; the file tells that it was imported."""
    (tmp_path / "users.py").write_text(PART)
    (tmp_path / "short.yaml").write_text("fusion: users.Mine")
    (tmp_path / "long.yaml").write_text("fusion: {class_path: users.Mine, init_args: {scale: 2.0}}")
    (tmp_path / "run.yaml").write_text("model: {drafter: long.yaml}")
    (tmp_path / "list.yaml").write_text(
        "model: {loss: {class_path: WeightedSum, init_args: {terms: [{loss: SoftCrossEntropy}, {loss: users.MyLoss}]}}}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.delenv(imports.VARIABLE, raising=False)
    yield tmp_path / "imported"
    for name in [name for name in sys.modules if name.split(".")[0] in ("users", "package")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("args", "path"),
    [
        (["--model.drafter.fusion", "users.Mine"], "users.Mine (model.drafter"),
        (["--model.drafter.fusion={class_path: users.Mine}"], "users.Mine (model.drafter"),
        (["--model.loss=users.MyLoss"], "users.MyLoss (model.loss)"),
        (["--model.drafter", "short.yaml"], "users.Mine (model.drafter"),
        (["--config", "run.yaml"], "users.Mine (model.drafter"),
        (["--config", "list.yaml"], "users.MyLoss (model.loss)"),
        (["--trainer.callbacks+=users.Mine"], "users.Mine"),
        (["--data.help", "users.Mine"], "users.Mine"),
        (["--data", "users.Mine"], "users.Mine (data)"),
    ],
)
def test_what_nobody_vouched_for_is_not_imported(
    mark: Path, args: list[str], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *args, "--print_config"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert path in error[0] and "was not imported" in error[0]
    assert error[0].endswith("add --allow_imports users")
    assert not mark.exists() and "users" not in sys.modules


@pytest.mark.parametrize(
    "args", [["--config", "run.yaml"], ["--config", "list.yaml"], ["--model.loss=users.MyLoss"]]
)
def test_the_flag_that_the_refusal_names_helps(
    mark: Path, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *args, "--allow_imports", "users", "--print_config"]) == 0
    assert "class_path: users." in capsys.readouterr().out
    assert mark.exists()
    assert main(["fit", *args, "--print_config"]) == 2  # it held for one command


def test_the_environment_may_vouch_too(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(imports.VARIABLE, "json, users")
    assert main(["fit", "--config", "run.yaml", "--print_config"]) == 0


def test_a_config_cannot_vouch_for_itself(mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("evil.yaml").write_text("allow_imports: users\nmodel: {drafter: long.yaml}")
    assert main(["fit", "--config", "evil.yaml", "--print_config"]) == 2
    assert not mark.exists()


@pytest.mark.parametrize(
    ("place", "callable_"),
    [
        ("optimizer", "os.system"),
        ("callback", "builtins.eval"),
        ("plugin", "torch.hub.load"),
        ("optimizer", "torch.load"),
        ("callback", "specdec.utils.files.os.system"),
        ("plugin", "functools.partial"),
    ],
)
def test_dangerous_callables_are_out_of_reach(
    mark: Path, place: str, callable_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"{{class_path: lightning.pytorch.callbacks.LambdaCallback, init_args: {{on_fit_start: {callable_}}}}}"
    args = {
        "optimizer": ["--model.optimizer", callable_],
        "callback": ["--trainer.callbacks", f"[{spec}]"],
        "plugin": ["--trainer.plugins", f"[{{class_path: {callable_}}}]"],
    }[place]
    assert main(["fit", *args, "--print_config"]) == 2
    assert re.search("was not imported|is a function", capsys.readouterr().err)


def test_a_class_where_no_type_is_declared_is_not_built() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--free", type=Any)
    built = parse_arguments(
        parser, ["--free", "{class_path: specdec.drafter.Concat, init_args: {}}"]
    ).free
    assert not isinstance(built, Fusion)


@pytest.mark.parametrize(
    "first",
    ["specdec.utils.config.compose([])", "specdec.commands.parser.parse_arguments(parser, [])"],
)
def test_every_way_in_is_guarded(first: str) -> None:
    code = (
        "import specdec.commands.parser, specdec.utils.config; from collections.abc import Callable; import jsonargparse as j\n"  # noqa: E501
        "parser = j.ArgumentParser(exit_on_error=False); parser.add_argument('--call', type=Callable)\n"
        f"{first}\n"
        "try: parser.parse_args(['--call', 'os.system'])\n"
        "except j.ArgumentError as error: assert specdec.commands.parser.shorten_message(str(error)).startswith('os.system (call)')\n"  # noqa: E501
        "else: raise SystemExit('taken')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_specdec_needs_itself_is_free() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--fusion", type=Fusion)
    assert (
        type(parse_arguments(parser, ["--fusion", "specdec.drafter.fusion.Concat"]).fusion).__name__
        == "Concat"
    )
    assert type(parse_arguments(parser, ["--fusion", "ScalarMix"]).fusion).__name__ == "ScalarMix"


def test_what_was_allowed_is_recorded_and_forgotten(mark: Path) -> None:
    path = list(sys.path)
    with imports.allowing(["users"]):
        assert imports.flags() == ["--allow_imports", "users"]
        assert str(mark.parent) in sys.path
    assert imports.flags() == []
    assert sys.path == path


def test_a_saved_part_is_imported_only_from_what_is_allowed(mark: Path) -> None:
    Path("package").mkdir()
    for name in ("__init__", "a", "b"):
        Path("package", f"{name}.py").touch()
    with imports.allowing(["package.a"]):
        imports.ensure("package.b.Part")
        assert "package.b" not in sys.modules
    with imports.allowing(["package"]):
        imports.ensure("package.b.Part")
        imports.ensure("packages.b.Part")
        assert "package.b" in sys.modules


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("nowhere", "No module named 'nowhere'"),
        ("users.Mine", "give modules, not classes"),
        ("broken", "cannot be imported"),
        ("needy", "No module named 'absent_one'"),
        ("my-parts", "cannot be imported"),
        ("*", "cannot be imported"),
        ("jsonargparse", "jsonargparse"),
    ],
)
def test_a_module_that_cannot_be_allowed_says_why(mark: Path, module: str, message: str) -> None:
    Path("broken.py").write_text("def (")
    Path("needy.py").write_text("import absent_one")
    with pytest.raises(ValueError, match=message), imports.allowing([module]):
        pass
    assert imports.flags() == []
    with imports.allowing(["users"]):
        with pytest.raises(ValueError, match=message), imports.allowing([module]):
            pass
        assert imports.flags() == ["--allow_imports", "users"]


def test_the_flag_is_taken_from_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(imports.VARIABLE, "z")
    args = [
        "--a",
        "1",
        "--allow_imports",
        "x, y",
        "--b",
        "--allow_imports=w",
        "--allow_imports",
        "x",
    ]
    assert imports.take_permissions(args) == ((("z", "x", "y", "w"), (), ()), ["--a", "1", "--b"])
    for wrong in (["--allow_imports"], ["--allow_imports", "--out"]):
        with pytest.raises(ValueError, match="needs a module's name"):
            imports.take_permissions(wrong)


def test_other_complaints_are_no_refusals() -> None:
    assert imports.refusal("argument --x: invalid choice") is None
    assert imports.refusal("Importing 'mine.yaml' is not allowed") == "mine.yaml: no such file"
