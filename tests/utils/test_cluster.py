"""What a worker of Ray imports: nothing of the folder in which a command runs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.short_run import short_run
from tests.two_processes import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="no ray"),
]
MARK = "ran.txt"
TASK = """
import os, sys
from specdec.utils.cluster import join

def imported():
    import numpy, specdec
    return numpy.__file__, specdec.__file__, os.environ.get("PYTHONSAFEPATH")

ray = join(None)
numpy, specdec, safe = ray.get(ray.remote(imported).remote())
ray.shutdown()
print(numpy, specdec, safe)
"""


def plant(folder: Path) -> Path:
    """A folder with a file for every module that is loaded here; each says that it was run."""
    folder.mkdir()
    code = f"open({str(folder / MARK)!r}, 'a').write(__name__ + '\\n')\n"
    for name in {name.partition(".")[0] for name in sys.modules} | {"cloudpickle", "colorama"}:
        (folder / f"{name}.py").write_text(code)
    return folder


def ran(command: list[str], folder: Path, **variables: str) -> str:
    """The output of a command in a planted folder, in which nothing may run."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONSAFEPATH", None)
    result = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment | variables, capture_output=True, text=True
    )  # fmt: skip
    assert not (folder / MARK).exists(), (folder / MARK).read_text().split()
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_a_worker_imports_nothing_of_the_working_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TASK)
    numpy, specdec, safe = ran([str(script)], plant(tmp_path / "planted")).split()
    assert numpy == importlib.util.find_spec("numpy").origin  # type: ignore[union-attr]
    assert specdec == str(REPOSITORY / "specdec" / "__init__.py") and safe == "None"


def test_a_checkout_that_is_not_installed_is_that_of_its_workers(tmp_path: Path) -> None:
    """They find the one that this process has put before all libraries."""
    code = "import sys; sys.path[0] = sys.argv[1]; exec(sys.stdin.read())"
    folder = tmp_path / "other"
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", code, str(REPOSITORY)], input=TASK, cwd=folder, capture_output=True, text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONSAFEPATH": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert str(REPOSITORY / "specdec" / "__init__.py") in result.stdout


def test_workers_of_a_job_import_what_its_owner_says(tmp_path: Path) -> None:
    """Ray refuses a field that the job has already."""
    (tmp_path / "parts.py").write_text("NAME = 'of the job'")
    job = {
        "working_dir": str(tmp_path),
        "env_vars": {"PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": ""},
    }
    code = (
        "from specdec.utils.cluster import join\n"
        "def imported():\n    import parts, specdec\n    return parts.NAME\n"
        "ray = join(None)\nprint(ray.get(ray.remote(imported).remote()))\nray.shutdown()"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    config = json.dumps({"runtime_env": job, "metadata": {}})
    folder = plant(tmp_path.with_name("planted"))
    printed = ran([str(script)], folder, RAY_JOB_CONFIG_JSON_ENV_VAR=config, PYTHONSAFEPATH="")
    assert "of the job" in printed


def test_producers_import_nothing_of_the_working_folder_and_find_its_target(
    target_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = plant(tmp_path / "planted")
    (folder / "target").symlink_to(target_directory)
    run = short_run(Path("target"), text_file, trainer__max_steps=2, trainer__limit_val_batches=0,
                    acceptance__max_new_tokens=2, acceptance__count=1, out=tmp_path / "run")  # fmt: skip
    ran(
        ["-P", "-m", "specdec", "fit", *run, "--model.features=Streamed"],
        folder,
        PYTHONSAFEPATH="1",
    )
    assert (tmp_path / "run" / "DONE.json").exists()
