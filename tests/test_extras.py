"""What installs of specdec lack unless an extra is asked for: nothing needs it but what says so.

Commands run in an interpreter that sees only links to the packages of this environment that are left.
"""

import os
import site
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.short_run import short_run

ROOT = Path(__file__).parents[1]
# what an install without extras lacks, by module and the names of the distributions
NOT_INSTALLED = ("tensorboard", "datasets", "pandas")
# what decoding needs no more than these
NOT_FOR_DECODING = (*NOT_INSTALLED, "matplotlib", "PIL", "pillow", "pyarrow", "lightning",
                    "pytorch_lightning", "torchmetrics")  # fmt: skip

DECODE = """
import sys
import torch
from specdec import Chain, DraftedGenerate, Sampling, SpeculativeDecoder, Target, load_drafter
from specdec.decoding import PlainDecoder
target = Target.load(sys.argv[1])
drafter = load_drafter(sys.argv[2])
made = SpeculativeDecoder(target, drafter, Chain(2)).generate("def add", 8, ())
assert made.ids == PlainDecoder(target).generate("def add", 8, ()).ids
inputs = target.tokenizer("def add", return_tensors="pt")
drafted = DraftedGenerate(target.model, drafter)
assert target.model.generate(**inputs, custom_generate=drafted, max_new_tokens=8).shape[1] > 2
print("decoded", made.acceptance_length)
"""


def links_without(names: tuple[str, ...], folder: Path) -> Path:
    """Link every installed package but those of these names, and their metadata, into a folder."""
    folder.mkdir(parents=True)
    for packages in map(Path, [*site.getsitepackages(), site.getusersitepackages()]):
        for entry in packages.iterdir() if packages.is_dir() else ():
            name = entry.name.partition(".")[0].partition("-")[0].lower()
            if (
                name not in {known.lower() for known in names}
                and not (folder / entry.name).exists()
            ):
                (folder / entry.name).symlink_to(entry)
    return folder


def run_without(names: tuple[str, ...], folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Run Python without these packages; ``-S`` leaves out the folder where they lie."""
    packages = links_without(names, folder / "packages")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"}
    return subprocess.run(
        [sys.executable, "-S", *command], capture_output=True, text=True, env=environment
    )


def test_an_install_without_extras_lacks_them() -> None:
    """So that the names above mean something."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = " ".join(project["dependencies"])
    assert not [name for name in NOT_INSTALLED if name in always]
    assert {"tensorboard", "datasets"} <= project["optional-dependencies"].keys()


def test_what_is_left_out_cannot_be_imported(tmp_path: Path) -> None:
    look = (
        "import sys; from importlib.util import find_spec as find; print(*map(find, sys.argv[1:]))"
    )
    modules = sorted({*NOT_FOR_DECODING} - {"pillow"})
    found = run_without(NOT_FOR_DECODING, tmp_path, "-c", look, *modules)
    assert found.stdout.split() == ["None"] * len(modules)


@pytest.mark.slow
def test_decoding_needs_none_of_them(
    target_directory: Path, drafter_directory: Path, tmp_path: Path
) -> None:
    command = ["-c", DECODE, str(target_directory), str(drafter_directory)]
    found = run_without(NOT_FOR_DECODING, tmp_path, *command)
    assert found.returncode == 0, found.stderr
    assert "decoded" in found.stdout


@pytest.fixture
def fit(target_directory: Path, text_file: Path) -> list[str]:
    short = short_run(
        target_directory, text_file, trainer__max_steps=2, trainer__log_every_n_steps=1
    )
    return ["-m", "specdec", "fit", *short]


@pytest.mark.slow
def test_a_run_without_tensorboard_logs_to_csv_and_says_so(fit: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = run_without(NOT_INSTALLED, tmp_path, *fit, "--out", str(out))
    assert found.returncode == 0, found.stderr
    assert "for tensorboard/ too: pip install 'specdec-lightning[tensorboard]'" in found.stderr
    assert (out / "csv/version_0/metrics.csv").exists()
    assert not (out / "tensorboard").exists()


def refusal(tmp_path: Path, *command: str) -> str:
    """Return what a command without these packages says, which must be an error on one line."""
    out = tmp_path / "out"
    found = run_without(NOT_INSTALLED, tmp_path, *command, "--out", str(out))
    assert found.returncode in (1, 2)
    assert "Traceback" not in found.stderr
    assert not out.exists()
    return found.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_tensorboard_logger_is_missed_with_the_line_that_installs_it(
    fit: list[str], tmp_path: Path
) -> None:
    logger = ["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=."]
    assert refusal(tmp_path, *fit, *logger).endswith(
        "trainer.logger: TensorBoardLogger needs the package tensorboard: "
        "pip install 'specdec-lightning[tensorboard]'"
    )


@pytest.mark.slow
def test_data_of_the_hub_is_missed_with_the_line_that_installs_it(
    target_directory: Path, drafter_directory: Path, tmp_path: Path
) -> None:
    source = "hub:openai/gsm8k:main:test"
    pair = ["--target", str(target_directory), "--drafter", str(drafter_directory)]
    message = refusal(tmp_path, "-m", "specdec", "evaluate", *pair, "--prompts", source)
    assert message.endswith(
        f"{source}: the Hub's data needs the package datasets: "
        "pip install 'specdec-lightning[datasets]'"
    )
