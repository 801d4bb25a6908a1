"""A stranger's checkpoint is measured before it is believed: it becomes a drafter, or one line, at once."""

import json
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafter import Drafter
from specdec.export import import_checkpoint, read_checkpoint
from specdec.target import Target
from tests.drafter.test_io_measured import HEADERS, JSON, written
from tests.export.test_read import eagle1, eagle3, flat, nested
from tests.export.test_read import written as checkpoint
from tests.tiny import little_memory, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(dtype=torch.float32)


def refused(directory: Path, target: Target, message: str = ".") -> None:
    with little_memory(), pytest.raises(ValueError, match=message) as told:
        import_checkpoint(read_checkpoint(directory), target)
    said = str(told.value)
    assert str(directory) in said and "\n" not in said and len(said) < 1000


VALUES: dict[str, list[Any]] = {
    "head_dim": [10**9, 12.5, "12", True, -12, [12]],
    "hidden_size": [10**9, 32.0, None, "32"],
    "num_hidden_layers": [10**9, 1025, 10**30, 1e9, math.inf, True],
    "num_attention_heads": [10**9, 1e30],
    "num_key_value_heads": [3, 10**9],
    "intermediate_size": [10**9, [], {}],
    "vocab_size": [10**9, 61.5],
    "draft_vocab_size": [10**9, 40.0, "40", True],
    "target_hidden_size": [10**9, 32.5],
    "max_position_embeddings": [10**30, "512", -1],
    "rms_norm_eps": [math.nan, math.inf, -1.0, True],
    "rope_theta": [0, -1.0, math.nan, math.inf, "high", [], {}],
    "rope_scaling": [
        "yarn", [], 3, {"rope_type": "yarn", "factor": 0.0}, {"rope_type": "linear", "factor": "two"},
        {"rope_type": ["linear"], "factor": 2.0}, {"full_attention": "abc"}, {"full_attention": [1]},
        {"rope_type": "linear", "factor": math.nan}, {"rope_type": "default", "partial_rotary_factor": 1e9},
    ],
    "layer_types": [3, [["sliding_attention"]], {"a": 1}, ["sliding_attention"]],
    "eagle_config": [3, "abc", [1]],
    "eagle_aux_hidden_state_layer_ids": [[10**30, 2, 3], "234", {}, [[2]]],
    "norm_output": [1, "true", []],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in VALUES.items() for value in values]
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_no_value_of_the_config_is_trusted(
    key: str, value: Any, kind: str, tmp_path: Path, target: Target
) -> None:
    harmless = (None, []) if key in ("rope_scaling", "hidden_size", "layer_types") else (None,)
    if value in harmless and value is not None:
        pytest.skip("as if it were absent")
    refused(checkpoint(tmp_path / "x", flat(model_type=kind) | {key: value}, eagle3()), target)


@settings(max_examples=100, deadline=5000)
@given(st.data())
def test_whatever_stands_in_a_config_is_a_drafter_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, target: Target, data: st.DataObject
) -> None:
    raw, tensors = data.draw(
        st.sampled_from([(flat(), eagle3()), (nested(), eagle3("layers.0.")), (flat(), eagle1())])
    )
    place: Any = raw
    key = data.draw(
        st.sampled_from(sorted([*raw, "rope_scaling", "head_dim", "fc_norm", "layer_types"]))
    )
    if isinstance(raw.get(key), dict) and data.draw(st.booleans()):
        place, key = raw[key], data.draw(st.sampled_from(sorted(raw[key])))
    place[key], said = data.draw(JSON), ""
    try:
        with little_memory():
            directory = checkpoint(tmp_path_factory.mktemp("any") / "x", raw, tensors)
            assert isinstance(import_checkpoint(read_checkpoint(directory), target), Drafter)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said and len(said) < 1500


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_contradict_their_file(name: str, tmp_path: Path, target: Target) -> None:
    directory = checkpoint(tmp_path / "x", flat(), eagle3())
    written(directory / "model.safetensors", *HEADERS[name])
    refused(directory, target)


def test_weights_that_are_no_file(tmp_path: Path, target: Target) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        directory = checkpoint(tmp_path / name, flat(), eagle3())
        (directory / "model.safetensors").unlink()
        (directory / name).symlink_to("/dev/zero")
        refused(directory, target, f"{name}: it is a pipe or device, no regular file")


def pickled(directory: Path, tensors: Any) -> Path:
    """The checkpoint's weights as torch saves them."""
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    return directory / "pytorch_model.bin"


Tensors = dict[str, Any]
TABLES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "expanded": (lambda t: t.update({"fc.weight": torch.zeros(1, 1).expand(10**6, 10**6)}), "repeated into tensors of"),
    "one under many names": (
        lambda t: t.update({f"layers.{i}.mlp.up_proj.weight": t["fc.weight"] for i in range(99)}), "repeated into"
    ),
    "without memory": (lambda t: t.update({"fc.weight": torch.zeros(10**6, 10**6, device="meta")}), "not a table of"),
    "a name in lines": (lambda t: t.update({"a\nb": torch.zeros(1)}), "not a table of tensors"),
    "no name": (lambda t: t.update({3: torch.zeros(1)}), "not a table of tensors"),  # type: ignore[dict-item]
    "a float8": (lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float8_e5m2)}), "without norm.weight_sc"),
    "complex": (lambda t: t.update({"norm.weight": t["norm.weight"].cfloat()}), "only unquantized ones"),
    "a map of one number": (lambda t: t.update(t2d=torch.tensor(True)), r"t2d is torch\.bool of shape \[\], wanted"),
    "a map of floats": (lambda t: t.update(t2d=t["t2d"].float()), r"t2d is torch\.float32"),
    "an infinity": (lambda t: t["fc.weight"][3, 4].fill_(-torch.inf), "the weights fc.weight are not all finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_pickled_tensors_that_are_no_weights(name: str, tmp_path: Path, target: Target) -> None:
    change, message = TABLES[name]
    directory, tensors = checkpoint(tmp_path / "x", flat(), eagle3()), eagle3()
    change(tensors)
    pickled(directory, tensors)
    refused(directory, target, message)


def test_an_archive_that_would_unpack_to_more(tmp_path: Path, target: Target) -> None:
    directory = checkpoint(tmp_path / "x", flat(), eagle3())
    file = pickled(directory, eagle3() | {"fc.weight": torch.zeros(32, 2**18)})
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert file.stat().st_size < 2**20
    refused(directory, target, "it would unpack to more than it is")


def test_an_archive_whose_numbers_are_not_there(tmp_path: Path, target: Target) -> None:
    """A storage of more numbers than its record has."""
    directory = checkpoint(tmp_path / "x", flat(), eagle3())
    file = pickled(directory, {"fc.weight": torch.zeros(7)})
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            longer = pickle.BININT1 + bytes([7])
            archive.writestr(
                name, content.replace(longer, pickle.BININT + (2**31 - 1).to_bytes(4, "little"))
            )
    refused(directory, target, "no file of plain weights")


def test_the_format_before_archives_is_told_apart(tmp_path: Path, target: Target) -> None:
    directory = checkpoint(tmp_path / "x", flat(), eagle3())
    (directory / "model.safetensors").unlink()
    torch.save(eagle3(), directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    refused(
        directory,
        target,
        r"no file of plain weights, which is all that is read \(File is not a zip file\)",
    )


def test_one_tensor_for_embedding_and_head_is_no_repetition(tmp_path: Path, target: Target) -> None:
    directory = checkpoint(tmp_path / "x", flat(draft_vocab_size=61), eagle3())
    tensors = {
        name: value
        for name, value in eagle3().items()
        if name not in ("d2t", "t2d", "lm_head.weight")
    }
    tied = torch.randn(61, 32)
    pickled(directory, tensors | {"lm_head.weight": tied, "embed_tokens.weight": tied})
    drafter = import_checkpoint(read_checkpoint(directory), target)
    assert torch.equal(drafter.lm_head.weight, drafter.embed_tokens.weight)
    assert json.loads((directory / "config.json").read_text())["draft_vocab_size"] == 61
