"""FP8 checkpoints, in shards, are read as the numbers that they stand for, in bfloat16 or the dtype of their scales.

Legend: r rows and c columns of a weight.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.export import export_drafter, import_checkpoint, read_checkpoint
from specdec.export.tensors import dequantized, fp8_block
from tests.export.made import made_drafter
from tests.tiny import presets, tiny_target, variants

FP8 = torch.float8_e4m3fn
TARGET = tiny_target(dtype=torch.float32)
BLOCK = (8, 16)  # of the tiny drafters; DeepSeek's is 128 by 128


def by_block(weight_rc: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The quantized weight, its scales by name, and what the two stand for, block by block."""
    rows, columns = weight_rc.shape
    small, stands_for = torch.empty_like(weight_rc, dtype=FP8), torch.empty_like(weight_rc)
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight_rc[at].abs().max() / 448
            small[at] = (weight_rc[at] / scales[i, j]).to(FP8)
            stands_for[at] = small[at].float() * scales[i, j]
    return small, {"_scale_inv": scales}, stands_for.bfloat16()


def by_row(weight_rc: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    scales = weight_rc.abs().amax(1, keepdim=True) / 448
    small = (weight_rc / scales).to(FP8)
    return (
        small,
        {"_scale": scales.bfloat16()},
        (small.float() * scales.bfloat16().float()).bfloat16(),
    )


def by_matrix(weight_rc: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    scale = weight_rc.abs().max() / 448
    small = (weight_rc / scale).to(FP8)
    return small, {"_scale": scale.reshape(1)}, small.float() * scale


@pytest.mark.parametrize("quantize", [by_block, by_row, by_matrix], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["eagle3_1", "mla", "dflash"])
def test_it_is_the_drafter_of_the_numbers_that_are_meant(
    name: str,
    quantize: Callable[[Tensor], tuple[Tensor, dict[str, Tensor], Tensor]],
    tmp_path: Path,
) -> None:
    """Projections in FP8, and the rest as it was, in two shards; scales of activations are left aside."""
    drafter = made_drafter((presets() | variants())[name], TARGET)
    export_drafter(drafter, TARGET, tmp_path / "whole")
    plain, meant = load_file(tmp_path / "whole" / "model.safetensors"), tmp_path / "meant"
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    shards: list[dict[str, Tensor]] = [{}, {}]
    for number, (tensor, value) in enumerate(plain.items()):
        if not tensor.endswith("_proj.weight"):
            shards[number % 2][tensor] = value
            continue
        small, scales, stands_for = quantize(value)
        shards[number % 2] |= {
            tensor: small,
            tensor.replace("weight", "input_scale"): torch.ones(1),
        }
        # in the other file
        shards[1 - number % 2] |= {tensor + end: scale for end, scale in scales.items()}
        plain[tensor] = stands_for.float()
    for directory in (meant, tmp_path / "small"):
        directory.mkdir()
        block = {"quantization_config": {"quant_method": "fp8", "weight_block_size": BLOCK}}
        (directory / "config.json").write_text(
            json.dumps(config | (block if directory != meant else {}))
        )
    save_file(plain, meant / "model.safetensors")
    for number, shard in enumerate(shards):
        save_file(shard, tmp_path / "small" / f"model-0000{number + 1}-of-00002.safetensors")
    wanted = import_checkpoint(read_checkpoint(meant), TARGET).state_dict()
    found = import_checkpoint(read_checkpoint(tmp_path / "small"), TARGET).state_dict()
    assert (
        all(torch.equal(found[key], value) for key, value in wanted.items())
        and found.keys() == wanted.keys()
    )
    assert not any(
        torch.equal(value, drafter.state_dict()[key])
        for key, value in found.items()
        if "o_proj" in key
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"a.weight": torch.ones(4, 4).to(FP8)},
            "float8_e4m3fn of shape .4, 4., without a.weight_scale_inv",
        ),
        (
            {"a.weight": torch.ones(4).to(FP8), "a.weight_scale": torch.ones(1)},
            "of shape .4., without",
        ),
        (
            {"a.weight": torch.ones(4, 4).to(FP8), "a.weight_scale_inv": torch.ones(3, 2)},
            "fit neither its rows nor",
        ),
    ],
)
def test_scales_that_do_not_fit(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantized(tensors)


def test_a_block_of_no_size(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    for size in ([0, 128], [128], "128"):
        (tmp_path / "config.json").write_text(
            json.dumps({"quantization_config": {"weight_block_size": size}})
        )
        with pytest.raises(ValueError, match=r"a block is .*, wanted two whole numbers"):
            read_checkpoint(tmp_path)


def test_where_a_block_stands() -> None:
    groups = {
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "block_structure": [64, 32]}}}
    }
    assert fp8_block({"quantization_config": groups}) == (64, 32)
    assert fp8_block({"quantization_config": {"weight_block_size": [8, 16]}}) == (8, 16)
    assert (
        fp8_block({})
        == fp8_block({"quantization_config": {"config_groups": {"group_0": None}}})
        == (128, 128)
    )
