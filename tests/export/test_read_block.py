"""What a published block drafter (DFlash, DSpark) may have and drafters here have not, and what they share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.drafter import MarkovBlock, MaskBlock
from specdec.export import export_drafter, import_checkpoint, read_checkpoint
from specdec.target import Target
from tests.export.made import made_drafter, same_state
from tests.tiny import tiny_target, variants

Raw = dict[str, Any]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def changed(
    target: Target, folder: Path, change: Callable[[Raw], object], design: str = "dflash"
) -> Path:
    """An export of a block drafter whose config somebody else wrote."""
    export_drafter(made_drafter(variants()[design], target), target, folder)
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
        "sample_from_anchor is on",
    ),
    "anchors that are sampled, outside": (
        lambda config: config.update(sample_from_anchor=True),
        "sample_from_anchor is on",
    ),
    "a block that is no table": (
        lambda config: config.update(dflash_config=[1]),
        r"dflash_config is \[1\], wanted a table",
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


def setting(**values: object) -> Callable[[Raw], object]:
    return lambda config: config.update(values)


def without(*names: str) -> Callable[[Raw], object]:
    return lambda config: [config.pop(name) for name in names]


REFUSED_OF_DSPARK: dict[str, tuple[Callable[[Raw], object], str]] = {
    "a gated Markov head": (setting(markov_head_type="gated"), "markov_head_type is 'gated'"),
    "no rank": (without("markov_rank"), "markov_rank is None"),
    "half a rank": (setting(markov_rank=6.0), "markov_rank is 6.0"),
    "another rank": (setting(markov_rank=5), "markov_head.markov_w1.weight"),
    "a flag that is a number": (setting(sample_from_anchor=1), "sample_from_anchor is 1"),
    "confidence of the state alone": (
        setting(confidence_head_with_markov=False),
        "confidence_head_with_markov is not true",
    ),
    "no mask": (without("mask_token_id"), r"\(DSpark\) has a mask: it lacks mask_token_id"),
    "no block": (without("block_size"), "block_size is None"),
    "no states": (without("target_layer_ids"), "^(?!dflash_config).*target_layer_ids is None"),
    "causal": (setting(is_causal=True), "is_causal is on"),
    "causal inside": (setting(dflash_config={"causal": True}), "dflash_config: causal is on"),
    "a window inside": (setting(dflash_config={"use_swa": True}), "dflash_config: use_swa is on"),
    "scaled values": (
        setting(dflash_config={"attention_value_scale": 0.5}),
        "attention_value_scale or use_aux",
    ),
    "interleaved rope": (setting(is_neox_style=False), "is_neox_style is not the default"),
    "the root elsewhere": (
        setting(dflash_config={"sample_from_anchor": False}),
        "dflash_config has sample_from_anchor",
    ),
    "a huge block": (setting(block_size=10**12), r"MarkovBlock\.?masks|masks must be at most 64"),
    "no head where the file has one": (setting(enable_confidence_head=False), "confidence_head"),
}


@pytest.mark.parametrize("name", REFUSED_OF_DSPARK)
def test_what_a_dspark_drafter_here_has_not_is_refused(
    target: Target, tmp_path: Path, name: str
) -> None:
    change, message = REFUSED_OF_DSPARK[name]
    checkpoint = read_checkpoint(changed(target, tmp_path / "x", change, "dspark"))
    with pytest.raises(ValueError, match=message):
        import_checkpoint(checkpoint, target)


def test_a_dspark_checkpoint_as_its_authors_write_it_is_read(
    target: Target, tmp_path: Path
) -> None:
    """Their config has the target's other keys too, and does not say that the root drafts."""

    def as_published(config: Raw) -> None:
        config.pop("sample_from_anchor")
        config |= {"use_cache": True, "eos_token_id": 2, "dtype": "bfloat16", "num_anchors": 512}

    drafter = made_drafter(variants()["dspark"], target)
    read = import_checkpoint(
        read_checkpoint(changed(target, tmp_path / "x", as_published, "dspark")), target
    )
    assert isinstance(read.config.recurrence, MarkovBlock)
    assert read.config.recurrence == drafter.config.recurrence and same_state(read, drafter)


def test_the_authors_dflash_which_drafts_at_the_root_is_refused(
    target: Target, tmp_path: Path
) -> None:
    """Their DFlash is DSpark's class without a Markov head: read as z-lab's it would draft one place off."""

    def as_published(config: Raw) -> None:
        block = config.pop("dflash_config")
        config |= {"markov_rank": 0, "architectures": ["Qwen3DSparkModel"]}
        config |= {key: block[key] for key in ("mask_token_id", "target_layer_ids")}

    checkpoint = read_checkpoint(changed(target, tmp_path / "x", as_published))
    with pytest.raises(ValueError, match="markov_rank is 0, and the file has no Markov head"):
        import_checkpoint(checkpoint, target)


def test_a_speculators_config_must_say_whether_the_root_drafts(
    target: Target, tmp_path: Path
) -> None:
    drafter = made_drafter(variants()["dspark"], target)
    export_drafter(drafter, target, tmp_path / "x", "speculators")
    path = tmp_path / "x" / "config.json"
    config = json.loads(path.read_text())
    assert config["speculators_model_type"] == "dspark" and config["sample_from_anchor"] is True
    assert config["aux_hidden_state_layer_ids"] == list(drafter.config.aux_layers)
    del config["sample_from_anchor"]
    path.write_text(json.dumps(config))
    for name in ("SHA256SUMS", "specdec.json"):
        (tmp_path / "x" / name).unlink()
    with pytest.raises(ValueError, match="sample_from_anchor is absent, which vLLM takes for fal"):
        import_checkpoint(read_checkpoint(tmp_path / "x"), target)
