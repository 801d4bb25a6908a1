"""A directory loads as it was saved or is refused in one line; which target it is."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specdec.target import Target, loading
from specdec.target.loading import SAMPLES, fingerprint
from specdec.target.model_parts import OURS_EAGER
from tests.target.zoo import make


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "llama"
    words = {"<unk>": 0, "a": 1, "b": 2, "<end>": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", eos_token="<end>"
    )
    make("llama").float().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def refused(path: Path | str, **options: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Target.load(path, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def test_a_directory_loads_as_it_was_saved(saved: Path) -> None:
    target = Target.load(saved)
    memory = Target(make("llama").float())
    assert target.identity == {**memory.identity, "source": str(saved)}
    assert target.dtype == torch.float32 and target.tokenizer.eos_token == "<end>"
    assert target.eos_token_ids == {2, 3}
    target.prove()


def test_capped_attention_loads_as_eager(tmp_path: Path) -> None:
    make("gemma2").save_pretrained(tmp_path / "gemma2")
    assert Target.load(tmp_path / "gemma2").config._attn_implementation == OURS_EAGER


def test_a_directory_without_tokenizer(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    target = Target.load(copy)
    with pytest.raises(ValueError, match="has no tokenizer"):
        _ = target.tokenizer


def test_missing_places(saved: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "absent") == f"{tmp_path / 'absent'}: no such directory"
    assert "no such directory" in refused("./absent")
    assert "a file; a target is a model directory" in refused(saved / "config.json")
    assert refused("nobody/nothing").startswith(
        "nobody/nothing: no such directory here, nor to be had from the Hugging Face Hub ("
    )


def change(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def truncate(path: Path) -> None:
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


REMOTE = {"model_type": "odd", "auto_map": {"AutoConfig": "conf.C", "AutoModelForCausalLM": "mod.M"}}
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "Unrecognized model"),
    "broken config": (lambda p: (p / "config.json").write_text('{"a":'), "is not a valid JSON file"),
    "empty config": (lambda p: (p / "config.json").write_text("{}"), "Should have a `model_type`"),
    "truncated": (truncate, "Error while deserializing header"),
    "garbage": (lambda p: (p / "model.safetensors").write_bytes(b"no"), "Error while deserializing header"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no file named model.safetensors"),
    "missing weights": (lambda p: change(p, num_hidden_layers=5), "it lacks model.layers.4."),
    "other shapes": (lambda p: change(p, hidden_size=48), "other shapes than config.json says"),
    "unknown family": (lambda p: change(p, model_type="odd"), "model type `odd`"),
    "not a language model": (lambda p: change(p, model_type="clip"), "a 'clip' model is not a causal language model"),
    "encoder-decoder": (lambda p: change(p, model_type="t5"), "a 't5' model is not a causal language model"),
    "own code": (lambda p: change(p, **REMOTE), "read that code, then allow it with trust_remote_code"),
    "broken tokenizer": (lambda p: (p / "tokenizer.json").write_text("{"), "copy: "),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_one_line(copy: Path, damage: str) -> None:
    do, words = DAMAGE[damage]
    do(copy)
    message = refused(copy)
    assert message.startswith(str(copy)) and words in message


def test_layers_over_several_devices_need_accelerate(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: False)
    with pytest.raises(ValueError, match="device_map=auto needs the package accelerate"):
        Target.load(saved, device_map="auto")


def test_layers_over_several_devices_stay_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers places them; a plan that leaves some outside the GPUs is refused."""
    seen: list[Any] = []
    read = AutoModelForCausalLM.from_pretrained

    def placed(*args: Any, device_map: str | None, **more: Any) -> Any:
        seen.append(device_map)
        model, report = read(*args, **more)
        model.hf_device_map = dict(enumerate(places))
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", placed)
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: True)
    places: list[Any] = [0, 1]
    target = Target.load(saved, device_map="auto")
    assert seen == ["auto"] and target.to("meta").device.type == "cpu"  # it stays where it was placed
    places = [0, "cpu"]
    with pytest.raises(ValueError, match="device_map=auto leaves layers on cpu: free GPU memory"):
        Target.load(saved, device_map="auto")


def test_any_single_value_counts() -> None:
    weight = torch.randn(8, SAMPLES)
    first = fingerprint({}, {"w": weight})
    assert first == fingerprint({}, {"w": weight.clone()}) and len(first) == 64
    for place in (1, 777, weight.numel() - 2):
        other = weight.clone()
        other.view(-1)[place] += 0.5
        assert fingerprint({}, {"w": other}) != first


def test_order_names_and_shapes_count() -> None:
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    first = fingerprint({}, {"a": a, "b": b})
    assert first == fingerprint({}, {"b": b, "a": a})
    others = [
        {"a": b, "b": a},
        {"a": a, "c": b},
        {"a": a.view(4, 6), "b": b},
        {"a": a.flip(0), "b": b},
    ]
    assert len({fingerprint({}, other) for other in others} | {first}) == len(others) + 1


def test_a_model_in_another_precision_is_the_same_model() -> None:
    weight = torch.randn(6, 4)
    assert (
        len({fingerprint({}, {"w": weight.to(kind)}) for kind in (torch.float32, torch.float64, torch.bfloat16)}) == 1
    )


def test_paths_and_versions_do_not_count() -> None:
    config = {"hidden_size": 4, "text_config": {"rope_theta": 1.0}}
    stored = {**config, "_name_or_path": "x", "transformers_version": "9", "_attn_implementation": "sdpa", "dtype": "y"}
    assert fingerprint(config, {}) == fingerprint(stored, {})
    assert fingerprint(config, {}) != fingerprint({**config, "text_config": {"rope_theta": 2.0}}, {})
