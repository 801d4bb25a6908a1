"""A directory loads as it was saved or is refused in one line; which target it is."""

import json
import os
import resource
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, modeling_utils

from specdec.data.template import text_ids
from specdec.data.tokenizer import tokenizer_digest
from specdec.target import Target, TargetSource, files, load_config, loading
from specdec.target.identity import SAMPLES, model_fingerprint
from specdec.target.model_parts import OURS_EAGER
from specdec.utils.text import printable
from tests.target.zoo import make


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "llama"
    words = {"<unk>": 0, "a": 1, "b": 2, "<end>": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        eos_token="<end>",
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
    digest = tokenizer_digest(target.tokenizer)
    assert target.identity == {**memory.identity, "source": str(saved), "tokenizer": digest}
    assert target.dtype == torch.float32 and target.tokenizer.eos_token == "<end>"
    assert target.eos_token_ids == {2, 3}
    target.prove()


def test_capped_attention_loads_as_eager(tmp_path: Path) -> None:
    make("gemma2").save_pretrained(tmp_path / "gemma2")
    assert Target.load(tmp_path / "gemma2").config._attn_implementation == OURS_EAGER


def test_a_loaded_target_needs_its_files_no_more(copy: Path) -> None:
    """Mapped, it would change with them, and end in a SIGBUS where one is cut off."""
    target = Target.load(copy)
    assert str(copy) not in Path("/proc/self/maps").read_text()
    os.truncate(copy / "model.safetensors", 100)
    target.prove()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "named", ["evil/kernels", "kernels-community/flash-attn2", "flash_attention_2", "nonsense"]
)
def test_no_config_names_the_attention(
    copy: Path, key: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would fetch and run a repository of the Hub."""
    asked: list[str] = []
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(
        modeling_utils, "lazy_import_flash_attention", lambda name, **more: asked.append(name)
    )
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {key: named}))
    Target.load(copy).prove()
    loading.skeleton(str(copy), None, False)
    assert not asked


@pytest.mark.parametrize("alone", [False, True])
def test_an_adapter_is_refused(copy: Path, alone: bool) -> None:
    """It names another model, which transformers would fetch, or is left out silently where there is no PEFT."""
    about = {"base_model_name_or_path": "evil/repository", "peft_type": "LORA"}
    (copy / "adapter_config.json").write_text(json.dumps(about))
    if alone:
        (copy / "config.json").unlink()
    assert "adapter_config.json: it holds a PEFT adapter: give that as target.adapter" in refused(
        copy
    )


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


def weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """The same file with other tensors in it."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def index(path: Path, value: object) -> None:
    """Shards instead of one file."""
    (path / "model.safetensors").rename(path / "one.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(value))


def device(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")


def edit(path: Path, name: str, *keys: Any) -> None:
    """Another value, the last, at some keys of a JSON file."""
    whole = value = json.loads((path / name).read_text())
    for key in keys[:-2]:
        value = value[key]
    value[keys[-2]] = keys[-1]
    (path / name).write_text(json.dumps(whole))


def prefix(path: Path, header: bytes) -> None:
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


REMOTE = {
    "model_type": "odd",
    "auto_map": {"AutoConfig": "conf.C", "AutoModelForCausalLM": "mod.M"},
}
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "Unrecognized model"),
    "broken config": (lambda p: (p / "config.json").write_text('{"a":'), "is not a valid JSON file"),
    "empty config": (lambda p: (p / "config.json").write_text("{}"), "Should have a `model_type`"),
    "truncated": (truncate, "Error while deserializing header"),
    "garbage": (lambda p: (p / "model.safetensors").write_bytes(b"no"), "Error while deserializing header"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no file named model.safetensors"),
    "missing weights": (lambda p: change(p, num_hidden_layers=5), "it lacks model.layers.4."),
    "other shapes": (lambda p: change(p, hidden_size=48), "lm_head.weight is [96, 32], the config says [96, 48]"),
    "unknown family": (lambda p: change(p, model_type="odd"), "model type `odd`"),
    "not a language model": (lambda p: change(p, model_type="clip"), "a 'clip' model is not a causal language model"),
    "encoder-decoder": (lambda p: change(p, model_type="t5"), "a 't5' model is not a causal language model"),
    "own code": (lambda p: change(p, **REMOTE), "read that code, then allow it with trust_remote_code"),
    "broken tokenizer": (lambda p: (p / "tokenizer.json").write_text("{"), "copy: "),
    "a config of another type": (lambda p: (p / "config.json").write_text("[]"), "copy: "),
    "a deep config": (lambda p: (p / "config.json").write_text('{"a":' * 10**5), "RecursionError"),
    "an endless config": (lambda p: device(p, "config.json"), "config.json: no file: a device, a pipe"),
    "an endless tokenizer": (lambda p: device(p, "tokenizer.json"), "tokenizer.json: no file: a device"),
    "endless weights": (lambda p: device(p, "model.safetensors"), "model.safetensors: no file: a device"),
    "a pipe": (lambda p: ((p / "tokenizer.json").unlink(), os.mkfifo(p / "tokenizer.json")), "tokenizer.json: no file"),
    "many layers": (lambda p: change(p, num_hidden_layers=10**6), "num_hidden_layers is 1,000,000, at most 1,000 can"),
    "more layers than tensors": (lambda p: change(p, num_hidden_layers=999), "says 999 layers, the files hold 39 tens"),
    "wide": (lambda p: change(p, hidden_size=10**9), "weights, the files hold 37,152: one of the two is of another"),
    "many tokens": (lambda p: change(p, vocab_size=2 * 10**9), "config.json describes a model of 128,0"),
    "an infinite size": (lambda p: change(p, hidden_size=float("inf")), "config.json: hidden_size is inf, at most"),
    "NaN": (lambda p: change(p, rms_norm_eps=float("nan")), "config.json: rms_norm_eps is nan, at most"),
    "many labels": (lambda p: change(p, num_labels=10**9), "config.json: num_labels is 1,000,000,000, at most 1,0"),
    "a size in words": (lambda p: change(p, hidden_size="abc"), "Validation error for field 'hidden_size'"),
    "no size": (lambda p: change(p, hidden_size=None), "Validation error for field 'hidden_size'"),
    "a foreign end": (lambda p: change(p, eos_token_id=10**9), "config.json: eos_token_id 1000000000 is none of 96 to"),
    "an end in words": (lambda p: edit(p, "generation_config.json", "eos_token_id", "x"), "eos_token_id 'x' is none"),
    "a token far away": (lambda p: edit(p, "tokenizer.json", "model", "vocab", "a", 10**9), "1000000000 is no token's"),
    "no longest text": (lambda p: edit(p, "tokenizer_config.json", "model_max_length", "x"), "model_max_length is no"),
    "no tokenizer's JSON": (lambda p: (p / "tokenizer.json").write_text("7"), "copy: "),
    "an oversized header": (lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 8), "model.safetensors: Error"),
    "a deep header": (lambda p: prefix(p, b'{"a":' * 10**5), "model.safetensors: Error while deserializing header"),
    "a header alone": (lambda p: prefix(p, b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'), "damaged or"),
    "no weight_map": (lambda p: index(p, {"metadata": {}}), "model.safetensors.index.json: it has no weight_map"),
    "an index that is none": (lambda p: index(p, None), "it has no weight_map of tensors to files: download it again"),
    "numbers for files": (lambda p: index(p, {"weight_map": {"a": 1}}), "it has no weight_map"),
    "a file elsewhere": (lambda p: index(p, {"weight_map": {"a": "../a.safetensors"}}), "../a.safetensors is no safe"),
    "a missing shard": (lambda p: index(p, {"weight_map": {"a": "b.safetensors"}}), "b.safetensors: "),
    "NaN in a weight": (
        lambda p: weights(p, lambda t: t["model.embed_tokens.weight"][95].fill_(float("nan"))),
        "its weight model.embed_tokens.weight is not finite in float32; check the checkpoint",
    ),
    "infinity in a weight": (
        lambda p: weights(p, lambda t: t["model.layers.3.mlp.up_proj.weight"][1, 1].fill_(float("-inf"))),
        "its weight model.layers.3.mlp.up_proj.weight is not finite",
    ),
}  # fmt: skip


def test_a_number_may_say_no_end(copy: Path) -> None:
    change(copy, time_step_limit=[0.0, float("inf")], model_max_length=10**30)
    load_config(str(copy), None, False)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_in_one_line(copy: Path, damage: str) -> None:
    do, words = DAMAGE[damage]
    do(copy)
    message = refused(copy)
    assert message.startswith(str(copy)) and words in message


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Inside, the process may map 2 GiB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


SIZES = ("hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts",
         "head_dim", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "max_position_embeddings",
         "n_embd", "n_layer", "n_inner", "n_positions", "q_lora_rank", "kv_lora_rank", "n_routed_experts", "ffn_dim",
         "decoder_sparse_step", "n_shared_experts", "word_embed_proj_dim")  # fmt: skip


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "gpt2", "opt", "deepseek_v3", "gpt_oss", "gemma3_text"]
)
def test_no_size_takes_more_than_the_files_justify(
    family: str, tmp_path: Path, little_memory: None
) -> None:
    make(family).float().save_pretrained(tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    sizes = [name for name in SIZES if name in config]
    assert len(sizes) >= 3
    for name in sizes:
        for value in (10**9, 2**31, 10**18, 900):
            (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, name: value}))
            begin = time.monotonic()
            try:
                Target.load(tmp_path / "copy")
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 900, error  # noqa: PT017
            assert time.monotonic() - begin < 10, name


NASTY = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.sampled_from([-1, 0, 10**9, 1e308, "\x1b[2J"]),
)  # fmt: skip


def test_any_json_loads_or_is_refused_in_one_line(copy: Path) -> None:
    """Every file for transformers, with one value of it another."""
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    before = {name: (copy / name).read_text() for name in names}
    places = {name: list(paths(json.loads(text))) for name, text in before.items()}
    refusals = []

    @settings(max_examples=60, deadline=None)
    @given(name=st.sampled_from(names), data=st.data(), value=NASTY)
    def check(name: str, data: st.DataObject, value: object) -> None:
        edit(copy, name, *data.draw(st.sampled_from(places[name])), value)
        try:
            text_ids(Target.load(copy).tokenizer, "a b")
        except ValueError as error:
            refusals.append(str(error))
        finally:
            (copy / name).write_text(before[name])

    check()
    assert len(refusals) > 20
    assert all(one.startswith((f"{copy}: ", "the tokenizer ")) for one in refusals)
    assert all(one == printable(one) and "\n" not in one and len(one) < 900 for one in refusals)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys down to every value of a JSON document but the document itself."""
    for key, child in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield (*at, key)
        yield from paths(child, (*at, key))


def test_any_weights_load_or_are_refused_in_one_line(copy: Path) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    refusals = []

    @settings(max_examples=100, deadline=None)
    @given(
        at=st.integers(0, header - 1),
        byte=st.integers(0, 255),
        cut=st.integers(0, len(whole)) | st.none(),
    )
    def check(at: int, byte: int, cut: int | None) -> None:
        file.write_bytes((whole[:at] + bytes([byte]) + whole[at + 1 :])[:cut])
        try:
            Target.load(copy)
        except ValueError as error:
            refusals.append(str(error))

    check()
    assert len(refusals) > 20
    assert all(
        one.startswith(f"{copy}: ") and "\n" not in one and len(one) < 900 for one in refusals
    )


def test_the_hubs_files_are_measured_too(
    saved: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that transformers will read: one file, else those of the index."""
    asked: list[str] = []

    def download(repo: str, name: str, revision: str | None) -> str:
        asked.append(name)
        if not (copy / name).exists():
            raise EntryNotFoundError(name)
        return str(copy / name)

    monkeypatch.setattr(files, "hf_hub_download", download)
    assert files.weight_files("a/b", None) == [copy / "model.safetensors"] and asked == [
        "model.safetensors"
    ]
    index(copy, {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})
    assert files.weight_files("a/b", None) == [copy / "one.safetensors"]
    (copy / "model.safetensors.index.json").unlink()
    assert files.weight_files("a/b", None) == []


def test_a_config_alone_is_measured_too(copy: Path) -> None:
    for name, value in {
        "num_hidden_layers": 10**9,
        "num_labels": 10**9,
        "vocab_size": 10**20,
    }.items():
        before = (copy / "config.json").read_text()
        change(copy, **{name: value})
        for read in (
            lambda: load_config(str(copy), None, False),
            lambda: loading.skeleton(str(copy), None, False),
        ):
            with pytest.raises(ValueError, match=f"copy: config.json: {name} is "):
                read()
        (copy / "config.json").write_text(before)
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").mkdir()
    with pytest.raises(ValueError, match=r"copy: tokenizer.json: no file"):
        TargetSource(str(copy)).load_tokenizer()


def test_layers_over_several_devices_need_accelerate(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: False)
    with pytest.raises(ValueError, match="device_map=auto needs the package accelerate"):
        Target.load(saved, device_map="auto")


def test_layers_over_several_devices_stay_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # it stays where it was placed
    assert seen == ["auto"] and target.to("meta").device.type == "cpu"
    places = [0, "cpu"]
    with pytest.raises(ValueError, match="device_map=auto leaves layers on cpu: free GPU memory"):
        Target.load(saved, device_map="auto")


def test_any_single_value_counts() -> None:
    weight = torch.randn(8, SAMPLES)
    first = model_fingerprint({}, {"w": weight})
    assert first == model_fingerprint({}, {"w": weight.clone()}) and len(first) == 64
    for place in (1, 777, weight.numel() - 2):
        other = weight.clone()
        other.view(-1)[place] += 0.5
        assert model_fingerprint({}, {"w": other}) != first


def test_order_names_and_shapes_count() -> None:
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    first = model_fingerprint({}, {"a": a, "b": b})
    assert first == model_fingerprint({}, {"b": b, "a": a})
    others = [
        {"a": b, "b": a},
        {"a": a, "c": b},
        {"a": a.view(4, 6), "b": b},
        {"a": a.flip(0), "b": b},
    ]
    assert len({model_fingerprint({}, other) for other in others} | {first}) == len(others) + 1


def test_a_model_in_another_precision_is_the_same_model() -> None:
    weight = torch.randn(6, 4)
    assert (
        len(
            {
                model_fingerprint({}, {"w": weight.to(kind)})
                for kind in (torch.float32, torch.float64, torch.bfloat16)
            }
        )
        == 1
    )


def test_paths_and_versions_do_not_count() -> None:
    config = {"hidden_size": 4, "text_config": {"rope_theta": 1.0}}
    stored = {
        **config,
        "_name_or_path": "x",
        "transformers_version": "9",
        "_attn_implementation": "sdpa",
        "dtype": "y",
    }
    assert model_fingerprint(config, {}) == model_fingerprint(stored, {})
    assert model_fingerprint(config, {}) != model_fingerprint(
        {**config, "text_config": {"rope_theta": 2.0}}, {}
    )
