"""A drafter's directory is measured before it is believed: nothing in it makes the process hang, allocate or trace."""

import json
import math
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specdec.drafter import Drafter, load_drafter, save_drafter
from specdec.drafter.io import check_finite, measure
from specdec.utils.reading import sha256
from tests.drafter.test_io import edit, swap
from tests.tiny import biased, little_memory, presets, tiny_drafter


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_drafter(
        tiny_drafter(presets()["eagle3_1"], dtype=torch.float32), tmp_path / "drafter"
    )


def refused(directory: Path, message: str = ".") -> None:
    """In one short line that names a file, at once, without memory."""
    start = time.monotonic()
    with little_memory(), pytest.raises(ValueError, match=message) as told:
        load_drafter(directory)
    said = str(told.value)
    assert (
        str(directory) in said
        and "\n" not in said
        and len(said) < 1000
        and time.monotonic() - start < 10
    )


VALUES: dict[str, Any] = {
    "num_layers": [10**9, 10**30, 0, -1, 1.0, True, None, "1", [1], {}],
    "hidden_size": [10**9, 2**20, 32.0, math.inf, math.nan, False],
    "intermediate_size": [10**9, 2**22, "48"],
    "num_attention_heads": [2**14, 10**9, None],
    "num_key_value_heads": [0, 3, "2"],
    "head_dim": [10**9, 2**14, 12.0, 0, 13],
    "vocab_size": [10**9, 2**22, True],
    "draft_vocab_size": [10**9, 61, None],
    "target_hidden_size": [10**9, 2**20, 31],
    "num_target_layers": [10**9, None, "7"],
    "max_position_embeddings": [10**30, -1, 1e30],
    "rms_norm_eps": [math.nan, math.inf, -1e-6, 2, "small", None, True],
    "attention_window": [True, 1.5, None, [], 10],
    "attention_sinks": [True, 1.5, None, [], -1, 4],
    "aux_layers": [[True, 3, 4], [2.0, 3, 4], "234", None, 3, [], [2, 10**9], {"2": 3}],
    "head": ["mine", None, True, []],
    "norms": [None, [], {"aux": "each"}],
    "fusion": [3, None, ["Concat"], {"class_path": ["Concat"], "init_args": {}}, "os.system"],
    "target": [None, [], {"source": []}, {"source": 1.5}],
    "rope": [
        None, [], {}, {"rope_type": "default"}, {"rope_type": [], "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": "1e4"}, {"rope_type": "default", "rope_theta": True},
        {"rope_type": "default", "rope_theta": 0}, {"rope_type": "default", "rope_theta": math.inf},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": None},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": "two"},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": math.nan},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": {}},
        {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 1000, "short_factor": [1.0] * 1000},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in VALUES.items() for value in values]
)
def test_no_value_of_the_config_is_trusted(key: str, value: Any, directory: Path) -> None:
    edit(directory, lambda stored: stored["drafter"].update({key: value}))
    refused(directory)


@pytest.mark.parametrize("value", [3, None, "yes", 1.0, []])
def test_nor_one_of_a_parts_arguments(value: Any, tmp_path: Path) -> None:
    directory = save_drafter(tiny_drafter(biased(), dtype=torch.float32), tmp_path / "drafter")
    edit(directory, lambda stored: stored["drafter"]["entry"]["init_args"].update(bias=value))
    refused(directory, r"entry: bias is .*, wanted bool")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**31, 10**9]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drafter = tiny_drafter(presets()["eagle3_1"], dtype=torch.float32)
    return save_drafter(drafter, tmp_path_factory.mktemp("template") / "drafter")


@settings(max_examples=150, deadline=5000)
@given(st.data())
def test_whatever_stands_in_a_config_is_a_drafter_or_one_line(
    template: Path, data: st.DataObject
) -> None:
    """A value anywhere becomes any other; what is read then is still a drafter."""
    where = template / "config.json"
    before = where.read_text()
    stored = json.loads(before)
    place: Any = stored
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key], said = data.draw(JSON), ""
    try:
        (template / "SHA256SUMS").unlink(missing_ok=True)
        where.write_text(json.dumps(stored))
        with little_memory():
            assert isinstance(load_drafter(template), Drafter)
    except ValueError as error:
        said = str(error)
    finally:
        where.write_text(before)
    assert len(said) < 1500


Tensors = dict[str, torch.Tensor]
ODD: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "NaN": (lambda t: t["norms.output.weight"][3].fill_(torch.nan), r"model\.safetensors: the weights norms\.output"),
    "inf": (lambda t: t["lm_head.weight"][3, 4].fill_(-torch.inf), "the weights lm_head.weight are not all finite"),
    "half inf": (lambda t: t.update({"fusion.fc.weight": t["fusion.fc.weight"].half() / 0}), "not all finite"),
    "int8": (lambda t: t.update({"fusion.fc.weight": t["fusion.fc.weight"].char()}), "weight is I8, wanted float32"),
    "bool": (lambda t: t.update({"fusion.fc.weight": t["fusion.fc.weight"].bool()}), "is BOOL, wanted float32"),
    "complex": (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].cfloat()}), "is C64, wanted float32"),
    "float8": (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}), "is F8_E4M3,"),
    "narrow ids": (lambda t: t.update({"vocab.target_ids_D": t["vocab.target_ids_D"].int()}), "is I32, wanted int64"),
    "floating ids": (lambda t: t.update({"vocab.target_ids_D": t["vocab.target_ids_D"].double()}), "is F64, wanted"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_tensors_that_are_no_weights(name: str, directory: Path) -> None:
    change, message = ODD[name]
    swap(directory, change)
    refused(directory, message)


def test_what_a_narrower_dtype_cannot_hold(directory: Path) -> None:
    swap(directory, lambda t: t["lm_head.weight"][0, 0].fill_(1e30))
    load_drafter(directory)
    with pytest.raises(ValueError, match=r"lm_head\.weight are not all finite"):
        load_drafter(directory, dtype=torch.float16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_saved(bad: float, directory: Path) -> None:
    drafter = load_drafter(directory)
    kept = (directory / "model.safetensors").read_bytes()
    drafter.layers.layers[0].mlp.down_proj.weight[0, 0] = bad
    with pytest.raises(
        ValueError, match=r"layers\.layers\.0\.mlp\.down_proj\.weight are not all finite"
    ):
        save_drafter(drafter, directory, replace=True)
    assert (directory / "model.safetensors").read_bytes() == kept
    with pytest.raises(ValueError, match="not all finite"):
        save_drafter(drafter, directory.parent / "new")
    assert [path.name for path in directory.parent.iterdir()] == ["drafter"]


def test_any_float_and_no_number_at_all_are_finite() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        check_finite(
            {"x": torch.ones(3, dtype=dtype), "none": torch.ones(0, 4), "ids": torch.arange(3)}
        )
        with pytest.raises(ValueError, match="the weights y are"):
            check_finite(
                {"x": torch.ones(3), "y": torch.tensor([1.0, torch.nan, 2.0], dtype=dtype)}
            )


def table(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADERS: dict[str, tuple[bytes, bytes, int | None]] = {
    "nothing": (b"", b"", None),
    "too long": (b"{}", b"", 2**60),
    "longer than the file": (b"{}", b"", 1000),
    "not UTF-8": (b"\xff" * 20, b"", None),
    "not JSON": (b"{" * 20, b"", None),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None),
    "a list": (b"[]", b"", None),
    "terabytes": (table(a={"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}), b"", None),
    "more than there are numbers": (
        table(a={"dtype": "F32", "shape": [2**32, 2**32, 4], "data_offsets": [0, 0]}), b"", None
    ),
    "other shape than bytes": (table(a=F4 | {"shape": [2]}), bytes(4), None),
    "negative": (table(a=F4 | {"shape": [-1]}), bytes(4), None),
    "unknown dtype": (table(a=F4 | {"dtype": "Q9"}), bytes(4), None),
    "cut off": (table(a=F4), bytes(3), None),
    "bytes behind": (table(a=F4), bytes(9), None),
    "overlapping": (table(a=F4, b=F4), bytes(4), None),
    "a name in lines": (table(**{"a\nb\x1b[31m": F4}), bytes(4), None),
}  # fmt: skip


def written(path: Path, header: bytes, body: bytes, length: int | None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)
    return path


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_contradict_their_file(name: str, directory: Path) -> None:
    weights = written(directory / "model.safetensors", *HEADERS[name])
    edit(directory, lambda stored: stored.update(weights_sha256=sha256(weights)))
    refused(directory)


@settings(max_examples=150, deadline=5000)
@given(st.data())
def test_whatever_bytes_a_header_has_is_a_table_or_one_line(
    template: Path, data: st.DataObject
) -> None:
    whole = (template / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    changed = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(1, 4))):
        if changed:
            changed[data.draw(st.integers(0, min(end, len(changed)) - 1))] = data.draw(
                st.integers(0, 255)
            )
    path = template.parent / "x.safetensors"
    path.write_bytes(changed)
    said = str(path)
    try:
        with little_memory():
            assert all(name.isprintable() for name in measure(path))
    except ValueError as error:
        said = str(error)
    assert str(path) in said and "\n" not in said and len(said) < 500


def test_the_header_says_names_dtypes_and_shapes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3).bfloat16(), "b": torch.arange(4)}, tmp_path / "x")
    assert measure(tmp_path / "x") == {"a": ("BF16", [2, 3]), "b": ("I64", [4])}
    with pytest.raises(ValueError, match="it is a directory"):
        measure(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        measure(tmp_path / "y")
    with pytest.raises(ValueError, match="/dev/zero: it is a pipe or device"):
        measure(Path("/dev/zero"))


def test_a_config_of_enormous_layers_is_no_work(directory: Path) -> None:
    """All that a config may say at most, at once."""
    largest = {
        "num_layers": 2**10,
        "hidden_size": 2**20,
        "intermediate_size": 2**22,
        "head_dim": 2**14,
    }
    edit(
        directory,
        lambda stored: stored["drafter"].update(
            largest | {"vocab_size": 2**22, "draft_vocab_size": 2**22}
        ),
    )
    refused(directory, "not as config.json says")
    shutil.rmtree(directory)
