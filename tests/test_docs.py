"""The page that shows a part of one's own does what it says."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from torch import nn

from specdec.cli import main
from specdec.drafter import load_drafter
from specdec.utils import imports

PAGE = Path(__file__).parents[1] / "docs" / "add_a_variant.md"


@pytest.fixture
def commands(
    tmp_path: Path, target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[list[str]]]:
    """The page's commands in a folder with the page's file, each with what makes it small."""
    text = PAGE.read_text()
    (name,) = re.findall(r"^`(\w+\.py)`:$", text, re.MULTILINE)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shell,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    (tmp_path / name).write_text(code)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def add_3(a, b):"}) + "\n")
    small = {
        "model": {"target": {"source": str(target_directory)}, "drafter": {"draft_vocab_size": 200}, "ttt_steps": 2},
        "data": {
            "class_path": "TextData",
            "init_args": {"train": str(text_file), "val": str(text_file), "seq_len": 32, "batch_size": 2},
        },
        "trainer": {
            "max_steps": 2,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "enable_model_summary": False,
            "limit_val_batches": 0,
        },
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    more = {
        "fit": ["--config", "small.yaml"],
        "evaluate": [
            *("--target", str(target_directory), "--max_new_tokens", "8", "--compile", "off"),
            *("--shape", "chain", "--out", "out"),
        ],
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not Path(path, name).exists()])  # of another test
    sys.modules.pop(name.removesuffix(".py"), None)
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.delenv(imports.VARIABLE, raising=False)
    words = [shlex.split(line) for line in shell.replace("\\\n", "").splitlines()]
    assert all(line[0] == "specdec" for line in words)
    yield [[*line[1:], *more[line[1]]] for line in words]
    sys.modules.pop(name.removesuffix(".py"), None)


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) < 50


def test_a_part_of_ones_own_is_trained_and_evaluated(commands: list[list[str]]) -> None:
    assert [line[0] for line in commands] == ["fit", "evaluate"]
    for line in commands:
        assert main(line) == 0
    stored = json.loads(Path("runs/gated/drafter/config.json").read_text())["drafter"]["fusion"]
    assert stored == "my_parts.Gated"
    assert json.loads(Path("out/metrics.json").read_text())["drafter"]["fusion"] == stored
    with imports.allowing(["my_parts"]):
        drafter = load_drafter("runs/gated/drafter")
    assert drafter.fusion.gate.weight.any() and isinstance(drafter.norms.embed, nn.LayerNorm)
    assert drafter.config.fusion.default_layers(7) == (2, 3, 4)


def test_without_the_flag_nothing_of_it_is_imported(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [word for word in commands[0] if word not in ("--allow_imports", "my_parts")]
    assert main(bare) == 2
    assert "my_parts.Gated (model.drafter.fusion) was not imported" in capsys.readouterr().err
    assert "my_parts" not in sys.modules
