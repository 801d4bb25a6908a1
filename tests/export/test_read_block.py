"""What a published block drafter (DFlash) may have and drafters here have not, and what they share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.drafter import MaskBlock
from specdec.export import export_drafter, import_checkpoint, read_checkpoint
from specdec.target import Target
from tests.export.made import made_drafter, same_state
from tests.tiny import tiny_target, variants

Raw = dict[str, Any]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def changed(target: Target, folder: Path, change: Callable[[Raw], object]) -> Path:
    """An export of a block drafter whose config somebody else wrote."""
    export_drafter(made_drafter(variants()["dflash"], target), target, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("SHA256SUMS", "specdec.json"):
        (folder / name).unlink()
    return folder


def inner(**values: object) -> Callable[[Raw], object]:
    return lambda config: config["dflash_config"].update(values)


REFUSED: dict[str, tuple[Callable[[Raw], object], str]] = {
    "causal": (inner(causal=True), "dflash_config: causal is on"),
    "a window": (inner(use_swa=True), "dflash_config: use_swa is on"),
    "anchors that are sampled": (
        inner(sample_from_anchor=True),
        "dflash_config: sample_from_anchor is on",
    ),
    "sinks": (inner(attention_sink_bias=True), "dflash_config: attention_sink_bias is on"),
    "causal outside": (lambda config: config.update(is_causal=True), "is_causal is on"),
    "interleaved rope": (
        lambda config: config.update(is_neox_style=False),
        "is_neox_style is not the default",
    ),
    "scaled values": (inner(attention_value_scale=0.5), "attention_value_scale or use_aux"),
    "no states": (inner(use_aux_hidden_state=False), "attention_value_scale or use_aux"),
    "no mask": (
        lambda config: [config["dflash_config"].pop("mask_token_id"), config.pop("mask_token_id", 0)],
        "lacks dflash_config.mask_token_id",
    ),
    "no block": (lambda config: config.pop("block_size"), "block_size is None"),
    "a block of one": (lambda config: config.update(block_size=1), "block_size is 1"),
    "half a block": (lambda config: config.update(block_size=4.0), "block_size is 4.0"),
}  # fmt: skip
SHARED: dict[str, Callable[[Raw], object]] = {
    "as written": lambda config: None,
    "what is off": inner(causal=False, use_swa=False, sample_from_anchor=False),
    "values as they are": inner(attention_value_scale=1.0, use_aux_hidden_state=True),
    "half-split rope": lambda config: config.update(is_neox_style=True, is_causal=False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_block_drafters_here_have_not_is_refused(
    target: Target, tmp_path: Path, name: str
) -> None:
    change, message = REFUSED[name]
    checkpoint = read_checkpoint(changed(target, tmp_path / "x", change))
    with pytest.raises(ValueError, match=message):
        import_checkpoint(checkpoint, target)


@pytest.mark.parametrize("name", SHARED)
def test_what_they_share_is_read(target: Target, tmp_path: Path, name: str) -> None:
    drafter = made_drafter(variants()["dflash"], target)
    folder = changed(target, tmp_path / "x", SHARED[name])
    read = import_checkpoint(read_checkpoint(folder), target)
    assert isinstance(read.config.recurrence, MaskBlock)
    assert read.config.recurrence == drafter.config.recurrence and same_state(read, drafter)
