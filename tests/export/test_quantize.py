"""Quantized exports: what is rounded and what stays, read by us and by the library compressed-tensors.

Legend: r rows and c columns of a weight.
"""

import json
import logging
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from torch import Tensor

from specdec.cli import main
from specdec.drafter import DrafterSpec, load_drafter, save_drafter
from specdec.export import FORMATS, export_drafter, import_checkpoint, read_checkpoint, subject_of
from specdec.export.quantize import half_steps, quantization_lines, quantized, rounding_faults
from specdec.export.tensors import dequantized
from specdec.target import NotServable, Target
from tests.export.made import made_drafter
from tests.tiny import presets, tiny_target, variants

TARGET = tiny_target(dtype=torch.float32)
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")
DESIGNS = ["eagle1", "eagle3", "eagle3_1", "dflash", "dspark", "peagle_3_1", "qwen3"]
Weights = dict[str, Tensor]
each = pytest.mark.parametrize("name", [*DTYPES])


def written(design: str, name: str | None, out: Path, format: str = "vllm") -> Weights:
    """The tensors of an export."""
    drafter = made_drafter((presets() | variants())[design], TARGET)
    export_drafter(drafter, TARGET, out, format, quantize=name)
    return load_file(out / "model.safetensors")


def is_matrix(tensor: str) -> bool:
    return tensor.endswith(tuple(f"{module}.weight" for module in MATRICES))


@each
@pytest.mark.parametrize("design", DESIGNS)
def test_matrices_are_rounded_and_the_rest_stays(design: str, name: str, tmp_path: Path) -> None:
    plain = written(design, None, tmp_path / "plain")
    small = written(design, name, tmp_path / "small")
    matrices = {tensor for tensor in plain if is_matrix(tensor)}
    assert len(matrices) >= 8
    assert small.keys() == plain.keys() | {f"{tensor}_scale" for tensor in matrices}
    for tensor, value_rc in plain.items():
        if tensor not in matrices:
            assert small[tensor].dtype == value_rc.dtype and torch.equal(small[tensor], value_rc)
            continue
        scale_r1 = small[f"{tensor}_scale"]
        assert small[tensor].dtype == DTYPES[name] and scale_r1.dtype == torch.float32
        # the largest number of every row is at the end of the range
        top = {"int8": 127.5, "fp8": 448.0}[name]
        assert torch.allclose(value_rc.abs().amax(1, keepdim=True), top * scale_r1)
        # every weight is at the nearest number
        numbers = torch.arange(-128.0, 128) if name == "int8" else fp8_numbers()
        nearest_rc = (value_rc.double() / scale_r1.double())[..., None] - numbers.double()
        apart_rc = small[tensor].double() - value_rc.double() / scale_r1.double()
        assert (apart_rc.abs() <= nearest_rc.abs().amin(-1) + 1e-4).all()


def fp8_numbers() -> Tensor:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return numbers[numbers.isfinite()]


def test_half_a_step_is_half_of_what_lies_between_two_numbers() -> None:
    """Of FP8 no more than half the wider gap, and no less than half the narrower one."""
    numbers = fp8_numbers().unique()
    stored_rc = numbers.to(torch.float8_e4m3fn)[None]
    half = half_steps(stored_rc, torch.tensor([[3.0]]))[0] / 3
    gaps = numbers.double().diff()
    assert (half[1:-1] <= torch.maximum(gaps[1:], gaps[:-1]) / 2).all()
    assert (half[1:-1] >= torch.minimum(gaps[1:], gaps[:-1]) / 2).all()
    assert half_steps(torch.ones(1, 2, dtype=torch.int8), torch.tensor([[3.0]])).tolist() == [
        [1.5, 1.5]
    ]


@each
@pytest.mark.parametrize("design", ["eagle1", "eagle3_1", "dflash"])
def test_the_library_decompresses_what_we_read(design: str, name: str, tmp_path: Path) -> None:
    """By the scheme in config.json, to the last bit."""
    small = written(design, name, tmp_path / "small")
    raw = json.loads((tmp_path / "small" / "config.json").read_text())
    config = QuantizationConfig.model_validate(raw["quantization_config"])
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    read = dequantized(small)
    matrices = [tensor for tensor in small if is_matrix(tensor)]
    for tensor in matrices:
        state = {"weight": small[tensor], "weight_scale": small[f"{tensor}_scale"]}
        theirs = compressor.decompress(state, scheme)["weight"]
        assert theirs.dtype == read[tensor].dtype and torch.equal(theirs, read[tensor])
    assert matrices and config.quant_method == "compressed-tensors"


@each
def test_it_is_imported_as_the_numbers_that_it_stands_for(name: str, tmp_path: Path) -> None:
    drafter = made_drafter(presets()["eagle3_1"], TARGET)
    written("eagle3_1", name, tmp_path / "small")
    imported = import_checkpoint(read_checkpoint(tmp_path / "small"), TARGET)
    assert imported.config == drafter.config
    layout, subject = FORMATS["vllm"], subject_of(drafter, TARGET)
    small = quantized(layout.tensors(drafter, subject), name, layout.matrices)
    found = layout.tensors(imported, subject)
    for tensor, value in dequantized(small).items():
        assert torch.equal(found[tensor], value), tensor
    assert not torch.equal(
        imported.state_dict()["fusion.fc.weight"], drafter.state_dict()["fusion.fc.weight"]
    )


@each
def test_sglang_keeps_what_its_class_builds_of_torch(name: str, tmp_path: Path) -> None:
    """Its fc would take eight-bit numbers for weights; vLLM reads the same directory by the list of what is plain."""
    small = written("eagle3", name, tmp_path / "small", "sglang")
    assert small["fc.weight"].dtype == torch.float32 and "fc.weight_scale" not in small
    assert small["midlayer.self_attn.q_proj.weight"].dtype == DTYPES[name]
    raw = json.loads((tmp_path / "small" / "config.json").read_text())
    assert raw["quantization_config"]["ignore"] == ["lm_head", r"re:(.*\.)?fc$"]
    whole = written("eagle3", name, tmp_path / "whole")
    assert whole["fc.weight"].dtype == DTYPES[name]
    raw = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert raw["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("design", "format", "name", "message"),
    [
        ("eagle3", "gguf", "int8", "llama-quantize"),
        ("eagle3", "vllm", "int4", "unknown quantization 'int4': choose from int8, fp8"),
        ("mla", "vllm", "fp8", "latent attention .MLA. in eight bits was compared with no engine"),
        ("eagle3", "mtp", "int8", "in the dtype of the target's own module; leave it out"),
    ],
)
def test_what_no_engine_reads_is_refused(
    design: str, format: str, name: str, message: str, tmp_path: Path
) -> None:
    drafter = made_drafter((presets() | variants())[design], TARGET)
    with pytest.raises((ValueError, NotServable), match=message):
        export_drafter(drafter, TARGET, tmp_path / "out", format, quantize=name)
    assert not (tmp_path / "out").exists()


Q = "midlayer.self_attn.q_proj.weight"


def neighbors_scale(w: Weights) -> None:
    scale_r1 = w[f"{Q}_scale"]
    # the row whose neighbor's scale is nearest, which is the hardest to see
    row = int((scale_r1[1:] / scale_r1[:-1]).log().abs().argmin())
    scale_r1[row] = scale_r1[row + 1]


def flipped(w: Weights) -> None:
    w[Q][3] = (-w[Q][3].float()).to(w[Q].dtype)


def head_too(w: Weights) -> None:
    w["lm_head.weight"] = (w["lm_head.weight"] * 20).to(w[Q].dtype)
    w["lm_head.weight_scale"] = torch.full((len(w["lm_head.weight"]), 1), 0.05)


FAULTS = {
    "the scale of the neighboring channel": (neighbors_scale, "rows are not within half a step"),
    "scales in a row": (
        lambda w: w.update({f"{Q}_scale": w[f"{Q}_scale"].T.contiguous()}),
        r"with scales \[1, 48\], wanted .* and \[48, 1\]",
    ),
    "a channel's sign flipped": (flipped, "1 of 48 rows are not .* the first is row 3"),
    "the head quantized too": (head_too, "lm_head.weight is .*, and engines have no scales for it"),
    "a scale of zero": (lambda w: w[f"{Q}_scale"][5].zero_(), "the scale of row 5 is 0"),
    "no scale": (lambda w: w.pop(f"{Q}_scale"), "has no scale"),
    "one number too far": (
        lambda w: w[Q].view(torch.uint8)[0, 0].add_(1),
        "1 of 48 rows are not within half a step",
    ),
    "a norm moved by its last bit": (
        lambda w: w["norm.weight"].mul_(1 + 2**-22),
        "norm.weight is another tensor",
    ),
    "a scale without a matrix": (
        lambda w: w.update({"norm.weight_scale": torch.ones(1, 1)}),
        "norm.weight is .*, and engines have no scales for it",
    ),
    "a matrix is missing": (lambda w: w.pop("fc.weight"), "fc.weight is in one of the two alone"),
}


@each
@pytest.mark.parametrize("fault", [*FAULTS])
def test_a_planted_fault_is_found(fault: str, name: str) -> None:
    drafter = made_drafter(presets()["eagle3"], TARGET)
    layout = FORMATS["vllm"]
    plain = layout.tensors(drafter, subject_of(drafter, TARGET))
    small = quantized(plain, name, layout.matrices)
    assert rounding_faults(plain, small) == []
    plant, message = FAULTS[fault]
    plant(faulty := {tensor: value.clone() for tensor, value in small.items()})
    found = rounding_faults(plain, faulty)
    assert len(found) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(found[0])


def test_an_int8_matrix_without_scales_is_no_weight() -> None:
    with pytest.raises(ValueError, match=r"a.weight is int8 of shape .2, 2., without"):
        dequantized({"a.weight": torch.ones(2, 2, dtype=torch.int8)})
    vocabulary = {"t2d": torch.ones(4, dtype=torch.int8)}
    assert dequantized(vocabulary) == vocabulary


def test_the_command_says_what_it_cost(
    target_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    target = Target.load(target_directory)
    here, there, back = (str(tmp_path / name) for name in ("drafter", "served", "back"))
    drafter = made_drafter(DrafterSpec(draft_vocab_size=200), target)
    save_drafter(drafter, here)
    of = ["--target", str(target_directory)]
    line = ["export", "--drafter", here, *of, "--out", there]
    assert main([*line, "--quantize", "int8"]) == 0
    assert capsys.readouterr().out.startswith("vllm serve")
    record = json.loads((tmp_path / "served" / "specdec.json").read_text())["quantization"]
    said = [record.getMessage() for record in caplog.records]
    for sentence in quantization_lines(record):
        assert sentence in said
    assert record["name"] == "int8" and record["bytes"] < record["bytes_before"]
    assert set(record["largest_relative_errors"]) == {*MATRICES}
    assert all(0 < error < 0.02 for error in record["largest_relative_errors"].values())
    card = (tmp_path / "served" / "README.md").read_text()
    assert "8-bit integers (W8A8, compressed-tensors)" in card and "before quantization" in card
    assert main(["import", "--checkpoint", there, *of, "--out", back]) == 0
    said = [record.getMessage() for record in caplog.records]
    assert any("in 8 bits (int8)" in sentence for sentence in said)
    weight = load_drafter(back).state_dict()["fusion.fc.weight"]
    saved = drafter.state_dict()["fusion.fc.weight"]
    assert 0 < float((weight - saved).abs().max() / saved.abs().max()) < 1 / 254 + 1e-6
