"""The keys of block drafters in a checkpoint's ``config.json``: DFlash's and DSpark's, written and read."""

from typing import Any

from specdec.drafter import DrafterConfig, MarkovBlock, MaskBlock
from specdec.export.tensors import Raw

# vLLM looks for these, in this order.
MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def _inner(raw: Raw) -> Raw:
    """Return the block of DFlash's keys, empty if there is none."""
    inner = raw.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise ValueError(f"dflash_config is {inner!r:.60}, wanted a table")
    return inner


def mask_token(raw: Raw) -> int | None:
    """Return the first mask token that is there, in the order in which vLLM looks for them."""
    inner = _inner(raw)
    tokens = [inner.get(MASKS[0]), *map(raw.get, MASKS)]
    token = next((token for token in tokens if token is not None), None)
    if token is not None and type(token) is not int:
        raise ValueError(f"mask_token_id is {token!r}, wanted a whole number")
    return token


def dflash_config(config: DrafterConfig) -> Raw:
    """Return the block that DFlash adds to Qwen3's config, where ids count the outputs of layers."""
    token = config.recurrence.mask_token_id  # type: ignore[attr-defined]
    return {
        "mask_token_id": token,
        "target_layer_ids": [b - 1 for b in config.aux_layers],
        "causal": False,
    }


def _check_attention(raw: Raw) -> None:
    """Raise ValueError for attention that a published block drafter may have and drafters here have not."""
    inner = _inner(raw)
    on = [key for key in ("causal", "use_swa", "attention_sink_bias") if inner.get(key)]
    if raw.get("is_causal"):
        on.append("is_causal")
    if on:
        raise ValueError(f"dflash_config: {on[0]} is on; block drafters here have no such thing")
    if raw.get("is_neox_style", True) is not True:
        raise ValueError("is_neox_style is not the default; block drafters here have no such thing")
    scale = inner.get("attention_value_scale")
    if scale not in (1.0, None) or inner.get("use_aux_hidden_state") is False:
        raise ValueError(
            "dflash_config: attention_value_scale or use_aux_hidden_state is not the default"
        )


def read_block(raw: Raw, hf: Any) -> Raw:
    """Read a block drafter's mask; ValueError for what a published one may have and drafters here have not."""
    _check_attention(raw)
    if _inner(raw).get("sample_from_anchor") or raw.get("sample_from_anchor"):
        raise ValueError(
            "sample_from_anchor is on; without a Markov head, block drafters here do not draft at the root"
        )
    if "markov_rank" in raw:
        raise ValueError(
            f"markov_rank is {raw['markov_rank']!r:.60}, and the file has no Markov head; without one, block drafters "
            "here do not draft at the root"
        )
    token, masks = _masks(raw, "DFlash", "dflash_config.mask_token_id")
    return {"recurrence": MaskBlock(token, masks)}


def _masks(raw: Raw, family: str, key: str) -> tuple[int, int]:
    """Return the mask's token and how many masks a block has."""
    token = mask_token(raw)
    if token is None:
        raise ValueError(f"a block drafter ({family}) has a mask: it lacks {key}")
    size = raw.get("block_size")
    if type(size) is not int or size < 2:
        raise ValueError(
            f"block_size is {size!r:.60}, wanted the nodes of a block, a whole number above 1"
        )
    return token, size - 1


def read_markov(raw: Raw, hf: Any) -> Raw:
    """Read DSpark's block and its heads; ValueError for what a published one may have and drafters here have not."""
    _check_attention(raw)
    if _inner(raw).get("sample_from_anchor") is not None:
        raise ValueError(
            "dflash_config has sample_from_anchor, which engines do not read there for DSpark: write it at the top"
        )
    kind = raw.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise ValueError(
            f"markov_head_type is {kind!r:.60}; drafters here have the vanilla Markov head only"
        )
    rank = raw.get("markov_rank")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"markov_rank is {rank!r:.60}, wanted a whole number above 0")
    flags = ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
    if odd := [key for key in flags if not isinstance(raw.get(key, True), bool)]:
        raise ValueError(f"{odd[0]} is {raw[odd[0]]!r:.60}, wanted true or false")
    confidence = raw.get("enable_confidence_head", False)
    if confidence and not raw.get("confidence_head_with_markov", False):
        raise ValueError(
            "confidence_head_with_markov is not true; confidence heads here read the token before the draft too"
        )
    token, masks = _masks(raw, "DSpark", "mask_token_id")
    root_drafts = raw.get("sample_from_anchor", True)
    return {"recurrence": MarkovBlock(token, masks, rank, confidence, root_drafts)}
