"""Names of what is otherwise in a file."""

from pathlib import Path

import pytest
import torch

from specdec.parity.differences import differences
from tests.parity_command.made import Weights, drafter, drops, edit, exported, sets, target


def told(directory: Path) -> list[str]:
    return [finding.text for finding in differences(directory, drafter("eagle3_1"), target())]


def test_keys(tmp_path: Path) -> None:
    directory = exported("eagle3_1", tmp_path / "out")
    edit(directory, sets(rms_norm_eps=1e-5, bos_token_id=0, bias=True), None)
    edit(directory, drops("fc_norm"), None)
    assert told(directory) == [
        "config.json: rms_norm_eps is 1e-05, for this drafter 1e-06",
        "config.json lacks fc_norm, which is true for this drafter",
        "config.json has also bias, bos_token_id",
    ]


def test_tensors(tmp_path: Path) -> None:
    def change(w: Weights) -> None:
        w["fc.weight"][0, :3] += 1
        w["norm.weight"] = torch.ones(31)
        w["layers.0.mlp.up_proj.weight"] = w.pop("midlayer.mlp.up_proj.weight")  # the same by another name
        w["fc.bias"] = torch.zeros(32)
        del w["t2d"]

    directory = exported("eagle3_1", tmp_path / "out")
    edit(directory, None, change)
    assert sorted(told(directory)) == [
        "fc.bias is in the file, this drafter exports no such tensor",
        "fc.weight differs in 3 of 3072 numbers",
        "norm.weight is [31], of this drafter [32]",
        "t2d is not in the file",
    ]


def test_a_narrower_dtype_is_no_difference(tmp_path: Path) -> None:
    directory = exported("eagle3_1", tmp_path / "out")
    edit(directory, None, lambda w: w.update({n: x.bfloat16() for n, x in w.items() if x.is_floating_point()}))
    assert told(directory) == []


@pytest.mark.parametrize("damage", ["config", "weights"])
def test_what_cannot_be_read_says_why(damage: str, tmp_path: Path) -> None:
    directory = exported("eagle3_1", tmp_path / "out")
    if damage == "config":
        (directory / "config.json").write_text("{")
    else:
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    (line,) = told(directory)
    assert ("not valid JSON" if damage == "config" else "deserializing") in line
