"""A LoRA adapter as part of a target: the model that PEFT would run, and nothing that a stranger's file may ask for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.cli import main
from specdec.evaluation.table import verifier
from specdec.export import NotServable
from specdec.studies.keys import target_contents
from specdec.target import Target, TargetSource

peft = pytest.importorskip("peft")

IDS_1T = torch.arange(40)[None] % 251


def adapted(target: Target, **options: Any) -> Any:
    """A target's model with a random adapter around it, whose updates are large enough to be seen."""
    torch.manual_seed(1)
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **options}
    wrapped = peft.get_peft_model(target.model, peft.LoraConfig(**given))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return wrapped.eval()


@pytest.fixture
def adapter(target_directory: Path, tmp_path: Path) -> Path:
    adapted(Target.load(target_directory)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"modules_to_save": ["lm_head"], "layers_to_transform": [1, 2], "layers_pattern": "layers"},
    ],
    ids=["lora", "dora", "patterns", "saved_modules"],
)
def test_it_is_the_model_that_peft_runs(
    target_directory: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    plain = Target.load(target_directory)
    alone = plain.model(IDS_1T).logits
    wrapped = adapted(Target.load(target_directory), **options)
    wrapped.save_pretrained(tmp_path / "adapter")
    target = Target.load(target_directory, adapter=str(tmp_path / "adapter"))
    own = wrapped(input_ids=IDS_1T).logits
    assert not torch.allclose(alone, own, atol=1e-2)
    torch.testing.assert_close(target.model(IDS_1T).logits, own, rtol=1e-4, atol=1e-5)
    target.prove()
    assert type(target.model) is type(plain.model)
    assert target.model.state_dict().keys() == plain.model.state_dict().keys()
    assert (
        target.identity["adapter"] == str(tmp_path / "adapter") and "adapter" not in plain.identity
    )
    assert target.identity["fingerprint"] != plain.identity["fingerprint"]
    again = TargetSource.of(target).load()
    assert again.identity == target.identity


def test_a_study_knows_its_contents(target_directory: Path, adapter: Path) -> None:
    source = TargetSource(str(target_directory), adapter=str(adapter))
    alone, first = target_contents(TargetSource(str(target_directory))), target_contents(source)
    target_contents.cache_clear()
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: tensor * 2 for name, tensor in tensors.items()},
        adapter / "adapter_model.safetensors",
    )
    assert alone != first != target_contents(source) and target_contents(source)[0] == alone


def test_no_engine_gets_it(target_directory: Path, adapter: Path) -> None:
    with pytest.raises(
        NotServable, match=r"an engine keeps an adapter apart.*save the merged model"
    ):
        TargetSource(str(target_directory), adapter=str(adapter)).servable()


def test_a_drafter_is_measured_for_the_model_with_it(
    target_directory: Path,
    adapter: Path,
    drafter_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refused as another target's drafter unless that is asked for; told in the record."""
    (tmp_path / "p.txt").write_text("def add(a, b):\n")
    given = [
        "evaluate", "--target", str(target_directory), "--target.adapter", str(adapter),
        "--drafter", str(drafter_directory), "--prompts", str(tmp_path / "p.txt"), "--shape", "chain:depth=2",
        "--max_new_tokens", "6", "--compile", "off", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(given) == 2 and f"with {adapter} differs; give it" in capsys.readouterr().err
    assert main([*given, "--other_target", "true"]) == 0
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert found["target"]["adapter"] == found["settings"]["adapter"] == str(adapter)
    assert verifier(found) == f"{target_directory.name} with adapter in float32"


def refused(target: Path, adapter: Path | str) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        Target.load(target, adapter=str(adapter))
    assert str(error.value).startswith(f"{adapter}: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"peft_type": "IA3"}, "no LoRA adapter"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron_co"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not read"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"of_a_later_peft": 3}, "of_a_later_peft is '3', which is not read"),
        ({"target_modules": "(a+)+b"}, "modules are to be named in lists"),
        ({"target_modules": ["(a+)+b"]}, "modules are to be named in lists"),
        ({"rank_pattern": {"(a+)+b": 1}}, "modules are to be named in lists"),
        ({"r": 2**40}, "a rank is a whole number up to 16,384"),
        ({"r": 0}, "a rank is a whole number"),
        ({"r": 2}, "size mismatch"),
        ({"target_modules": ["q_proj"]}, "is unknown: it is an adapter of another model"),
        (
            {"target_modules": ["q_proj", "down_proj", "k_proj"]},
            "is missing: it is an adapter of another model",
        ),
        ({"target_modules": ["no_such"]}, "no_such"),
    ],
)
def test_what_a_strangers_config_may_not_say(
    target_directory: Path, adapter: Path, change: dict[str, Any], told: str
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert told in refused(target_directory, adapter)


def test_what_is_wrong_is_one_line(
    target_directory: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    (other / "adapter_model.safetensors").rename(other / "adapter_model.bin")
    told = "it has no adapter_model.safetensors: give what PEFT's save_pretrained wrote"
    assert told in refused(target_directory, other)
    assert "no such directory" in refused(target_directory, tmp_path / "none")
    whole = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(target_directory, adapter)
    (adapter / "adapter_config.json").write_text("[]")
    (adapter / "adapter_model.safetensors").write_bytes(whole)
    assert "no LoRA adapter" in refused(target_directory, adapter)
    monkeypatch.setattr("specdec.target.adapter.is_peft_available", lambda: False)
    assert refused(target_directory, adapter).endswith(
        "an adapter is read by one more package: pip install peft"
    )
