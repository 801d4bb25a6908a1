"""What may be served as a drafter."""

import json
import shutil
from pathlib import Path

import pytest

from specdec.drafter import DrafterSpec, WeightedSum, save
from specdec.embedded.source import TargetSource
from specdec.export import NotServable, export_drafter
from specdec.serving.drafted import drafted
from specdec.target import Target
from tests.export.made import made_drafter
from tests.tiny import presets


@pytest.fixture
def target(target_directory: Path) -> Target:
    return Target.load(target_directory)


def test_a_drafter_is_exported_first(target: Target, tmp_path: Path) -> None:
    for name, method in (("eagle1", "eagle"), ("eagle3_1", "eagle3")):
        save(made_drafter(presets()[name], target), tmp_path / name)
        made = drafted(tmp_path / name, TargetSource(target.source), tmp_path / f"{name}-out")
        assert made == (tmp_path / f"{name}-out", method)
        assert (made.directory / "specdec.json").is_file()


def test_an_export_is_served_as_it_is(target: Target, tmp_path: Path) -> None:
    for form in ("vllm", "speculators"):
        export_drafter(made_drafter(DrafterSpec(draft_vocab_size=200), target), target, tmp_path / form, form)
        assert drafted(tmp_path / form, TargetSource(target.source), tmp_path / "no") == (tmp_path / form, "eagle3")
    assert not (tmp_path / "no").exists()


def test_what_vllm_would_serve_wrongly_is_refused(target: Target, tmp_path: Path) -> None:
    drafter, source, out = made_drafter(DrafterSpec(), target), TargetSource(target.source), tmp_path / "out"
    export_drafter(made_drafter(presets()["eagle1"], target), target, tmp_path / "sglang", "sglang")
    with pytest.raises(ValueError, match=r"exported for SGLang .*--format vllm"):
        drafted(tmp_path / "sglang", source, out)
    export_drafter(drafter, target, tmp_path / "changed")
    weights = tmp_path / "changed" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match="SHA-256"):
        drafted(weights.parent, source, out)
    export_drafter(drafter, target, tmp_path / "other")
    other = shutil.copytree(target.source, tmp_path / "target")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(ValueError, match=r"for a target of num_hidden_layers 7, .* has 9$"):
        drafted(tmp_path / "other", TargetSource(str(other)), out)
    record = json.loads((tmp_path / "other" / "specdec.json").read_text())
    del record["drafter"]["vocab_size"]
    (tmp_path / "other" / "specdec.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"specdec\.json: its SHA-256 is not that in SHA256SUMS"):
        drafted(tmp_path / "other", source, out)
    (tmp_path / "other" / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=r"specdec\.json: damaged, for want of 'vocab_size'"):
        drafted(tmp_path / "other", source, out)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(ValueError, match=r"neither a drafter .* specdec import"):
        drafted(tmp_path / "published", source, out)
    with pytest.raises(ValueError, match="no such drafter directory"):
        drafted(tmp_path / "nowhere", source, out)
    save(made_drafter(DrafterSpec(WeightedSum()), target), tmp_path / "sum")
    with pytest.raises(NotServable, match="WeightedSum"):
        drafted(tmp_path / "sum", source, out)
    assert not out.exists()
