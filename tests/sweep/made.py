"""Studies of a tiny target."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.sweep.plan import Plan, make
from specdec.sweep.study import Study, read_study

Write = Callable[..., Path]


def base(target: Path, text: Path, prompts: Path) -> dict[str, Any]:
    """Two axes, three seeds, an evaluation."""
    return {
        "name": "tiny",
        "set": {
            "model.target.source": str(target), "model.drafter.draft_vocab_size": 200, "data": "TextData",
            "data.train": str(text), "data.val": str(text), "data.seq_len": 32, "data.batch_size": 2,
            "trainer.max_steps": 2, "trainer.accelerator": "cpu", "trainer.limit_val_batches": 0,
            "trainer.logger": False, "trainer.enable_model_summary": False,
        },
        "axes": {
            "fc_norm": {"off": {"model.drafter.norms.aux": "none"}, "on": {"model.drafter.norms.aux": "each"}},
            "K": {"model.ttt_steps": [1, 2]},
        },
        "baseline": {"fc_norm": "off", "K": 2},
        "evaluate": {"prompts": [str(prompts)], "growth": "chain:depth=2", "max_new_tokens": 8},
    }  # fmt: skip


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text('{"prompt": "def add_1(a, b):"}\n{"prompt": "    return a"}\n')
    return path


@pytest.fixture
def write(target_directory: Path, text_file: Path, prompts_file: Path, tmp_path: Path) -> Write:
    """Writes the base study with changes; what becomes None is left out, and ``set`` is added to."""

    def write(**changes: Any) -> Path:
        study = base(target_directory, text_file, prompts_file)
        study["set"] = {
            key: value for key, value in {**study["set"], **changes.pop("set", {})}.items() if value is not None
        }
        study |= changes
        path = tmp_path / "study.yaml"
        path.write_text(
            yaml.safe_dump({key: value for key, value in study.items() if value is not None}, sort_keys=False)
        )
        return path

    return write


@pytest.fixture
def planned(write: Write, tmp_path: Path) -> Callable[..., Plan]:
    """The plan of the base study with changes."""

    def planned(**changes: Any) -> Plan:
        flags = {name: changes.pop(name) for name in ("threads", "allow_unequal", "alone") if name in changes}
        return make(read_study(write(**changes), allow_few_seeds=True), tmp_path / "runs", **flags)

    return planned


@pytest.fixture(scope="session")
def tiny(
    target_directory: Path, text_file: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Study, Plan]:
    """The base study and its plan; nothing of it is written."""
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(yaml.safe_dump(base(target_directory, text_file, prompts_file), sort_keys=False))
    study = read_study(path)
    return study, make(study, path.parent / "runs")
