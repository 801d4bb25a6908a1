"""What vLLM 0.32.0 does with a drafter's directory, in plain torch, after its documented semantics.

Written apart from the drafter: nothing of this package is imported here, and the checkpoint is read by its own tensors'
names. So it can say that a checkpoint is not the drafter that it was made of. Method ``eagle`` is EAGLE-1 and 2,
``eagle3`` EAGLE-3 and 3.1, and P-EAGLE, ``dflash`` DFlash.

Legend: T tokens, A anchors, K depths, M new nodes, S keys, H width, W input width, h query heads, g key heads, n heads,
d head width, r rotated width, V target vocabulary, D draft vocabulary.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

Raw = Mapping[str, Any]
# keys and values of every layer, (g, S, d) each; column j stands at position j
Past = list[tuple[Tensor, Tensor]]

LLAMA3 = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
QWEN3 = {"Eagle3Qwen3ForCausalLM"}
DEEPSEEK = {"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}
DFLASH = {"DFlashDraftModel"}
CLASSES = {
    "eagle": {"EagleLlamaForCausalLM"},
    "eagle3": LLAMA3 | QWEN3 | DEEPSEEK,
    "dflash": DFLASH,
}
IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps",
         "num_hidden_layers", "num_attention_heads", "num_key_value_heads")  # fmt: skip
# what a config of the speculators library has at the top and hands on
HANDED_ON = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", IDS)
OF_EAGLE3 = ("fc_norm", "norm_output")
MASK_IDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MASK = "mask_hidden"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
MAP = "d2t"
# tensors that the engine drops without a word
UNREAD = re.compile(r"t2d|rotary_emb\.inv_freq|\.bias$")


class Misread(ValueError):  # noqa: N818  a verdict
    """The engine would refuse the directory, or take it for something else without a word."""


class Settings(NamedTuple):
    """What the engine makes of a config; the first eight by the config's own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    method: str
    drafts: int
    target_width: int
    head: int
    aux_ids: tuple[
        int, ...
    ]  # id i is the state that enters the target's layer i, ascending; () the last, normed
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    head_norms: bool
    biased: str  # the attention's projections that have a bias, of q, k, v and o
    logit_scale: float
    windows: tuple[int | None, ...]
    rope: tuple[Tensor, float]  # as of :func:`rotary`
    stretch: float  # on DeepSeek's scores, where yarn stretches its rope
    latent: tuple[int, ...]  # of DeepSeek's attention, by LATENT; () for grouped queries
    mask_token: int | None  # of a parallel drafter, which reads it in place of tokens not known yet
    block_size: int  # nodes of a block drafter's pass, the root and its masks; else 0


class ServedDrafter(NamedTuple):
    """A drafter as the engine has it."""

    settings: Settings
    weights: dict[
        str, Tensor
    ]  # by the file's names; embedding and head are there, whosever they are
    target_ids_D: Tensor  # int64, the target's token for each of the drafter's


# a directory's config.json, and its tensors by their names
Files = tuple[dict[str, Any], dict[str, Tensor]]


def load(
    directory: Path, method: str, embedding_VH: Tensor, head_VH: Tensor, layers: int
) -> ServedDrafter:
    """Load a directory beside a target of so many layers, whose embedding has the dtype and device of all weights.

    Raises:
        Misread: the engine would not load it, or not as what it was.
    """
    return interpret(read_files(directory), method, embedding_VH, head_VH, layers)


def read_files(directory: Path) -> Files:
    """What a directory holds, nothing of it checked but that it can be read; :class:`Misread` if not."""
    try:
        raw = dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise Misread("config.json is missing or no JSON object") from error
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise Misread(f"{file.name} is damaged or cut off ({error})") from error
    if not tensors:
        raise Misread("there is no .safetensors file in it")
    return raw, tensors


def interpret(
    files: Files, method: str, embedding_VH: Tensor, head_VH: Tensor, layers: int
) -> ServedDrafter:
    """The drafter that an engine makes of a config and tensors; see :func:`load`."""
    raw, tensors = files
    read = settings(raw, method)
    sizes = {"vocab_size": read.vocab_size, "target_hidden_size": read.target_width}
    for (key, size), wanted in zip(sizes.items(), embedding_VH.shape, strict=True):
        if size != wanted:
            raise Misread(f"config.json: {key} is {size}, the target has {wanted}")
    if (ids := read.aux_ids) and not 0 <= ids[0] <= ids[-1] <= layers:
        raise Misread(f"config.json names states {list(ids)} of a target with 0 to {layers}")
    known = _tensors(tensors, read)
    shared = read.hidden_size == read.target_width
    if EMBEDDING not in known and not shared:
        raise Misread(f"it lacks {EMBEDDING}, for which the target's is too wide or too narrow")
    if HEAD not in known and not (shared and read.drafts == read.vocab_size):
        raise Misread(
            f"it lacks {HEAD}: the engine would take the first {read.drafts} rows of the target's"
        )
    # a draft token's own number plus its offset
    ids_D = torch.arange(read.drafts) + known.pop(MAP, torch.zeros(read.drafts)).to(torch.int64)
    if len(outside := ((ids_D < 0) | (ids_D >= read.vocab_size)).nonzero()):
        draft = int(outside[0])
        raise Misread(
            f"d2t: draft token {draft} and its offset make {int(ids_D[draft])}, which is no token"
        )
    weights = {EMBEDDING: embedding_VH, HEAD: head_VH} | {
        name: x.to(embedding_VH) for name, x in known.items()
    }
    return ServedDrafter(read, weights, ids_D.to(embedding_VH.device))


def settings(raw: Raw, method: str) -> Settings:
    """Read a config; :class:`Misread` if the engine would not, or two of its releases or runners differently."""
    config = _flat(raw)
    fused = method != "eagle"
    found = _class(config, method)
    for key in SIZES:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise Misread(f"config.json: {key} is {value!r}, no positive number")
    if config.get("hidden_act", "silu") != "silu":
        raise Misread(
            f"config.json: hidden_act is {config['hidden_act']!r}, the engine's drafters have silu"
        )
    if config.get("bias"):
        raise Misread(
            "config.json has a key bias, for which the engine leaves the attention's biases uninitialised"
        )
    switches = {
        key: bool(config.get(key, False))
        for key in ("norm_before_residual", "fc_norm", "norm_output")
    }
    inner: Raw = config.get("eagle_config") or {}
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    latent: tuple[int, ...] = ()
    stretch = 1.0
    if found in DEEPSEEK:
        latent = tuple(int(config.get(key) or 0) for key in LATENT)
        head = latent[3]
        if not latent[0]:
            raise Misread(
                "config.json: q_lora_rank is nothing, and the engine looks for the queries' latent"
            )
        block = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = block.get("rope_type", block.get("type", "default"))
        if kind not in ("default", "yarn") or not {"attention_factor", "truncate"}.isdisjoint(
            block
        ):
            raise Misread(
                f"config.json: the rope {dict(block)}, of which this class makes DeepSeek's yarn"
            )
        if kind == "yarn":
            share = float(block.get("mscale_all_dim") or 0)
            factor = max(float(block.get("factor") or 1), 1.0)
            stretch = (
                0.1 * share * torch.tensor(factor, dtype=torch.float64).log().item() + 1
            ) ** 2
        for key in ("norm_before_fc", "attention_bias", *MASK_IDS):
            if config.get(key):
                raise Misread(
                    f"config.json: {key} is {config[key]!r}, which the class {found} does not know"
                )
    return Settings(
        **{key: config[key] for key in SIZES},
        method=method,
        drafts=(fused and config.get("draft_vocab_size")) or config["vocab_size"],
        target_width=(fused and config.get("target_hidden_size")) or config["hidden_size"],
        head=head,
        aux_ids=_block_ids(config)
        if found in DFLASH
        else _aux_ids(config, inner, found in QWEN3)
        if fused
        else (),
        norm_before_fc=bool(inner.get("norm_before_fc", config.get("norm_before_fc", False))),
        head_norms=found in QWEN3 | DFLASH,
        biased=_biased(config, found),
        logit_scale=config.get("logit_scale", 1.0),
        windows=_windows(config, fused),
        rope=rotary(config, head),
        stretch=stretch,
        latent=latent,
        mask_token=_mask_token(config),
        block_size=config["block_size"] if found in DFLASH else 0,
        **switches,
    )


def _flat(raw: Raw) -> Raw:
    """The keys that the drafter's class sees."""
    if "speculators_config" not in raw:
        if raw.get("model_type") not in ("llama", "qwen3", "kimi_k2", "deepseek_v2"):
            kinds = "llama, qwen3, kimi_k2 or deepseek_v2"
            raise Misread(
                f"config.json: model_type is {raw.get('model_type')!r}, the engine loads {kinds}"
            )
        return raw
    if "model_type" in raw:
        raise Misread(
            "config.json: a speculators config with a model_type at the top is not loaded"
        )
    layer = raw["transformer_layer_config"]
    parallel = raw.get("speculators_model_type") == "peagle"
    if raw.get("speculators_model_type") == "dflash":
        of_block = {
            "mask_token_id": raw["mask_token_id"],
            "causal": not raw.get("sliding_window_non_causal", True),
        }
        of_block["target_layer_ids"] = [i - 1 for i in raw["aux_hidden_state_layer_ids"]]
        handed = {
            key: raw.get(key) for key in ("draft_vocab_size", "target_hidden_size", "block_size")
        }
        return {**layer, **handed, "dflash_config": of_block, "architectures": ["DFlashDraftModel"]}
    handed = {key: raw[key] for key in HANDED_ON + OF_EAGLE3 * (not parallel) if key in raw}
    named = "Qwen3ForCausalLM" if layer["model_type"] == "qwen3" else "LlamaForCausalLM"
    handed |= {"pard_token": raw["mask_token_id"]} if parallel else {}
    residual = raw.get("norm_before_residual", not parallel)
    return {**layer, **handed, "norm_before_residual": residual, "architectures": [named]}


def _mask_token(config: Raw) -> int | None:
    """The first that is there, as the engine looks for them."""
    holders = (
        (config.get("dflash_config") or {}, MASK_IDS[0]),
        *((config, key) for key in MASK_IDS),
    )
    return next((int(holder[key]) for holder, key in holders if key in holder), None)


def _class(config: Raw, method: str) -> str:
    """The first of the architectures that there is a class for, after the engine has rewritten the names."""
    named = config.get("architectures") or []
    prefix = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": ""}[method]
    for name in named:
        whole = name.startswith(prefix) or (method == "eagle3" and name.endswith(prefix))
        if (known := name if whole else prefix + name) in CLASSES[method]:
            return known
    raise Misread(
        f"config.json: architectures {named} name no class that the engine has for method {method}"
    )


def _biased(config: Raw, name: str) -> str:
    """The projections that the class of this name builds a bias for; EAGLE-1's alone reads ``qkv_bias``."""
    attention_bias = bool(config.get("attention_bias"))
    if name in QWEN3:
        return "qkv" * attention_bias
    if name in CLASSES["eagle"]:
        return "qkv" * bool(config.get("qkv_bias", attention_bias)) + "o" * attention_bias
    return "qkvo" * attention_bias


def _block_ids(config: Raw) -> tuple[int, ...]:
    """Of a block drafter, whose own ids are of layers' outputs; :class:`Misread` for a block that is another."""
    inner: Raw = config.get("dflash_config") or {}
    if (
        inner.get("causal")
        or config.get("is_causal")
        or inner.get("use_swa")
        or inner.get("sample_from_anchor")
    ):
        raise Misread(
            f"config.json: dflash_config {dict(inner)} is of a block that is not compared here"
        )
    if inner.get("mask_token_id") is None or not inner.get("target_layer_ids"):
        raise Misread("config.json: dflash_config lacks mask_token_id or target_layer_ids")
    if not isinstance(config.get("block_size"), int):
        raise Misread("config.json lacks block_size, the nodes that a pass was trained with")
    return tuple(i + 1 for i in inner["target_layer_ids"])


def _aux_ids(config: Raw, inner: Raw, qwen3: bool) -> tuple[int, ...]:
    if not inner.get("use_aux_hidden_state", True):
        return ()  # it reads the target's final state, as EAGLE-1 does
    named = config.get(IDS)
    if not isinstance(named, list) or not named or not all(isinstance(i, int) for i in named):
        raise Misread(
            f"config.json: {IDS} is {named!r}: the engine's two runners would take different states"
        )
    ids = tuple(sorted(set(named)))
    count = config.get("num_aux_hidden_states") or len(inner.get(IDS) or ()) or 3
    if qwen3:
        count = config.get("num_aux_layers") or len(named)
    if count != len(ids):
        raise Misread(
            f"config.json: {IDS} names {len(ids)} states and fc is made for {count} (num_aux_hidden_states)"
        )
    return ids


def _windows(config: Raw, fused: bool) -> tuple[int | None, ...]:
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers:
        raise Misread(f"config.json: layer_types names {len(kinds)} layers of {layers}")
    if "sliding_attention" in kinds and not fused and "target_layer_count" not in config:
        raise Misread(
            "config.json: method eagle reads layer_types of the target's first layers and fails"
        )
    return tuple(
        config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds
    )


def rotary(config: Raw, head_dim: int) -> tuple[Tensor, float]:
    """The rope that a config names: inverse frequencies, (r / 2,) float32, and the factor on cosine and sine.

    By transformers' formulas; where both spellings stand, ``rope_parameters`` wins.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    old = config.get("rope_scaling") or {}
    block = dict(config.get("rope_parameters") or {"rope_type": old.get("type", "default"), **old})
    theta = block.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise Misread("config.json lacks rope_theta")
    if block.get("rope_type", "default") == "default":
        share = float(
            block.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
        )
        width = int(head_dim * share)
        return 1.0 / (float(theta) ** (torch.arange(0, width, 2, dtype=torch.float32) / width)), 1.0
    block["rope_theta"], longest = float(theta), config["max_position_embeddings"]
    sizes = {"hidden_size": head_dim, "head_dim": head_dim, "num_attention_heads": 1}
    try:
        scaled = LlamaConfig(**sizes, max_position_embeddings=longest, rope_parameters=block)
        inverse, factor = ROPE_INIT_FUNCTIONS[block["rope_type"]](
            scaled, torch.device("cpu"), seq_len=longest
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Misread(
            f"config.json: no frequencies can be made of the rope {block}: {error!r}"
        ) from error
    return inverse, float(factor)


def _tensors(tensors: Mapping[str, Tensor], read: Settings) -> dict[str, Tensor]:
    """All tensors of the config and no other; the engine itself does not miss one."""
    H = read.hidden_size
    wanted = dict(_wanted(read))
    found = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    found |= {MASK: found[MASK].flatten()} if MASK in found else {}  # of any shape
    found = {name: x for name, x in found.items() if name in wanted or not UNREAD.search(name)}
    # the target's stand in for these, or nothing reads them
    optional: dict[str, tuple[int, ...]] = {EMBEDDING: (read.vocab_size, H)}
    if read.method != "eagle":
        optional[HEAD] = (read.drafts, H)
        optional |= {
            f"layers.{i}.hidden_norm.weight": (H,) for i in range(1, read.num_hidden_layers)
        }
    for name, value in found.items():
        if (shape := (wanted | optional).get(name)) is None:
            raise Misread(f"{name}: the engine has no such tensor for this config and fails")
        if tuple(value.shape) != shape:
            raise Misread(f"{name} is {list(value.shape)}, the config says {list(shape)}")
        if not bool(value.isfinite().all()):
            raise Misread(f"{name} holds NaN or infinities")
    if missing := [name for name in wanted if name not in found]:
        left = (
            "at the first tokens"
            if missing[0] == MAP
            else "at ones"
            if "norm" in missing[0]
            else "uninitialised"
        )
        raise Misread(f"it lacks {missing[0]}, which the engine leaves {left} without a word")
    return found


def _wanted(read: Settings) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape."""
    H = read.hidden_size
    inner = read.intermediate_size
    n = len(read.aux_ids)
    fused = read.method != "eagle"
    block = read.method == "dflash"
    queries = read.num_attention_heads * read.head
    keys = read.num_key_value_heads * read.head
    for i in range(read.num_hidden_layers):
        at = f"layers.{i}."
        into = 2 * H if fused and i == 0 and not block else H
        if read.latent:
            yield from (
                (f"{at}self_attn.{name}.weight", shape)
                for name, shape in _latent(read, into).items()
            )
        grouped = {"q": (queries, into), "k": (keys, into), "v": (keys, into), "o": (H, queries)}
        for name, shape in {} if read.latent else grouped.items():
            yield f"{at}self_attn.{name}_proj.weight", shape
            if name in read.biased:
                yield f"{at}self_attn.{name}_proj.bias", shape[:1]
        if read.head_norms:
            yield from ((f"{at}self_attn.{name}_norm.weight", (read.head,)) for name in "qk")
        for name, shape in {"gate": (inner, H), "up": (inner, H), "down": (H, inner)}.items():
            yield f"{at}mlp.{name}_proj.weight", shape
        yield f"{at}post_attention_layernorm.weight", (H,)
        if i or fused:
            yield f"{at}input_layernorm.weight", (H,)
    if n or not fused:
        yield "fc.weight", (H, n * read.target_width if fused else 2 * H)
    if fused:
        yield from (
            ("hidden_norm.weight" if block else "layers.0.hidden_norm.weight", (H,)),
            ("norm.weight", (H,)),
        )
        if read.fc_norm:
            yield from ((f"fc_norm.{index}.weight", (read.target_width,)) for index in range(n))
        if read.norm_before_fc:
            yield "input_norm.weight", (n * read.target_width,)
        if read.mask_token is not None and not block:
            yield MASK, (n * read.target_width,)
        if read.drafts != read.vocab_size:
            yield MAP, (read.drafts,)


def _latent(read: Settings, into: int) -> dict[str, tuple[int, ...]]:
    """The tensors of DeepSeek's attention."""
    q_rank, kv_rank, plain, turned, values = read.latent
    h = read.num_attention_heads
    return {
        "q_a_proj": (q_rank, into), "q_a_layernorm": (q_rank,), "q_b_proj": (h * (plain + turned), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + turned, into), "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (h * (plain + values), kv_rank), "o_proj": (read.hidden_size, h * values),
    }  # fmt: skip


def draft(
    served: ServedDrafter, ids_T: Tensor, features_TH: Tensor, anchors: Sequence[int], depth: int,
    given_AK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What is read and predicted at every anchor and depth: the text once over its features, then chains from anchors.

    An anchor is a place whose feature is the target's own; at depth k its chain has read k tokens that are given, by
    default the text's next ones, instead of drafts of its own. Gives features read (A, K, H), and log-probabilities
    (A, K, V) of the token after next, -inf where the drafter has no such token.

    A parallel drafter (https://arxiv.org/abs/2602.01469) reads at depth k its mask token and learned states instead.
    """
    read_by = served.settings
    latent = served.settings.latent
    if read_by.method == "dflash":
        return draft_blocks(served, ids_T, features_TH, anchors, depth)
    keys, values = (
        (read_by.head, read_by.head) if not latent else (latent[2] + latent[3], latent[4])
    )
    empty = [
        features_TH.new_empty(read_by.num_key_value_heads, 0, width) for width in (keys, values)
    ]
    past = [(empty[0], empty[1])] * read_by.num_hidden_layers
    # chains may leave the text behind
    places_T = torch.arange(len(ids_T) + depth, device=ids_T.device)
    feedback_TH, hidden_TH = step(
        served, ids_T[1:], features_TH[:-1], places_T[: len(ids_T) - 1], past
    )
    read = []
    log_probs = []
    if (mask := read_by.mask_token) is not None:
        learned_1H = fuse(
            served, list(served.weights[MASK].view(1, -1).split(read_by.target_width, -1))
        )
    for row, anchor in enumerate(anchors):
        own = [(k_gSd[:, : anchor + 1], v_gSd[:, : anchor + 1]) for k_gSd, v_gSd in past]
        given_K = ids_T[anchor + 2 : anchor + 2 + depth] if given_AK is None else given_AK[row]
        feature_1H = feedback_TH[anchor : anchor + 1] if mask is None else learned_1H
        read.append(features_TH[anchor])
        log_probs.append(_log_probs(served, hidden_TH[anchor]))
        for at in range(anchor + 1, anchor + depth + 1):
            read.append(feature_1H[0])
            token = at - anchor - 1
            token_1 = (
                given_K[token : token + 1] if mask is None else torch.full_like(ids_T[:1], mask)
            )
            fed_1H, hidden_1H = step(served, token_1, feature_1H, places_T[at : at + 1], own)
            feature_1H = fed_1H if mask is None else feature_1H
            log_probs.append(_log_probs(served, hidden_1H[0]))
    shape = (len(anchors), depth + 1)
    return torch.stack(read).unflatten(0, shape), torch.stack(log_probs).unflatten(0, shape)


def draft_blocks(
    served: ServedDrafter, ids_T: Tensor, features_TH: Tensor, anchors: Sequence[int], depth: int
) -> tuple[Tensor, Tensor]:
    """:func:`draft` of a block drafter (https://arxiv.org/abs/2602.06036): behind every anchor its next token and
    the masks, which see each other and, in every layer, keys and values of the features up to the anchor."""
    read_by = served.settings
    context_TH = rms(served, "hidden_norm", features_TH)
    places_T = torch.arange(len(ids_T), device=ids_T.device)
    layers = range(read_by.num_hidden_layers)
    past = [heads(served, f"layers.{i}.self_attn", context_TH, places_T)[1:] for i in layers]
    read = []
    log_probs = []
    for anchor in anchors:
        own = [(k_gSd[:, : anchor + 1], v_gSd[:, : anchor + 1]) for k_gSd, v_gSd in past]
        masks = torch.full_like(ids_T[:1], read_by.mask_token or 0).expand(read_by.block_size - 1)
        x_MH = served.weights[EMBEDDING][torch.cat([ids_T[anchor + 1 : anchor + 2], masks])]
        places_M = anchor + 1 + torch.arange(read_by.block_size, device=ids_T.device)
        for i in layers:
            block_MH = rms(served, f"layers.{i}.input_layernorm", x_MH)
            x_MH = x_MH + attention(served, i, block_MH, places_M, own, whole=True)
            x_MH = x_MH + feed_forward(served, i, x_MH)
        read += [features_TH[anchor], *x_MH[1 : depth + 1]]
        log_probs += [
            _log_probs(served, hidden_H) for hidden_H in rms(served, "norm", x_MH)[1 : depth + 2]
        ]
    shape = (len(anchors), depth + 1)
    return torch.stack(read).unflatten(0, shape), torch.stack(log_probs).unflatten(0, shape)


def _log_probs(served: ServedDrafter, hidden_H: Tensor) -> Tensor:
    """(V,), float32 at least."""
    logits_D = project(served, "lm_head", hidden_H) * served.settings.logit_scale
    log_D = logits_D.log_softmax(-1, dtype=torch.promote_types(logits_D.dtype, torch.float32))
    return log_D.new_full((served.settings.vocab_size,), float("-inf")).index_copy(
        0, served.target_ids_D, log_D
    )


def fuse(served: ServedDrafter, states: list[Tensor]) -> Tensor:
    """The feature (M, H) out of the target's states, each (M, H of the target); only once, not of what is fed back."""
    read = served.settings
    if not read.aux_ids:
        (final_MH,) = states
        return final_MH
    joined = torch.cat(states, -1)
    if read.norm_before_fc:
        joined = rms(served, "input_norm", joined)
    if read.fc_norm:
        chunks = joined.chunk(len(states), -1)
        joined = torch.cat(
            [rms(served, f"fc_norm.{n}", chunk) for n, chunk in enumerate(chunks)], -1
        )
    return project(served, "fc", joined)


def step(
    served: ServedDrafter, tokens_M: Tensor, features_MH: Tensor, positions_M: Tensor, past: Past
) -> tuple[Tensor, Tensor]:
    """M nodes, each a token and the feature of the place before it, at the feature's position.

    They see each other causally, and whatever was kept before them. Gives the next step's features (M, H), and what the
    head multiplies (M, H).
    """
    read = served.settings
    embedded_MH = served.weights[EMBEDDING][tokens_M]
    # https://arxiv.org/abs/2401.15077: no norm on the way in, none on the way out
    if read.method == "eagle":
        start_MH = beside_MW = project(served, "fc", torch.cat([embedded_MH, features_MH], -1))
    else:  # https://arxiv.org/abs/2503.01840
        hidden_MH = rms(served, "layers.0.hidden_norm", features_MH)
        beside_MW = torch.cat([rms(served, "layers.0.input_layernorm", embedded_MH), hidden_MH], -1)
        start_MH = hidden_MH if read.norm_before_residual else features_MH
    h_MH = start_MH + attention(served, 0, beside_MW, positions_M, past)
    h_MH = h_MH + feed_forward(served, 0, h_MH)
    for i in range(1, read.num_hidden_layers):  # plain layers, each normalised on its way in
        h_MH = h_MH + attention(
            served, i, rms(served, f"layers.{i}.input_layernorm", h_MH), positions_M, past
        )
        h_MH = h_MH + feed_forward(served, i, h_MH)
    if read.method == "eagle":
        return h_MH, h_MH
    normed_MH = rms(served, "norm", h_MH)
    # EAGLE-3.1: https://arxiv.org/abs/2605.09992
    return normed_MH if read.norm_output else h_MH, normed_MH


def rms(served: ServedDrafter, name: str, x: Tensor) -> Tensor:
    """Unit root mean square over the last axis, in float32 at least, times the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide / (wide.square().mean(-1, keepdim=True) + served.settings.rms_norm_eps).sqrt()
    return unit.to(x.dtype) * served.weights[f"{name}.weight"]


def project(served: ServedDrafter, name: str, x: Tensor) -> Tensor:
    """A matrix, and a bias where there is one."""
    return F.linear(x, served.weights[f"{name}.weight"], served.weights.get(f"{name}.bias"))


def heads(
    served: ServedDrafter, at: str, x_MW: Tensor, positions_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (h, M, d), keys and values (g, M, d)."""
    read = served.settings
    q_hMd, k_gMd, v_gMd = (
        project(served, f"{at}.{name}_proj", x_MW).unflatten(-1, (-1, read.head)).transpose(0, 1)
        for name in "qkv"
    )
    if read.head_norms:
        q_hMd = rms(served, f"{at}.q_norm", q_hMd)
        k_gMd = rms(served, f"{at}.k_norm", k_gMd)
    return rotate(q_hMd, positions_M, read.rope), rotate(k_gMd, positions_M, read.rope), v_gMd


def attention(
    served: ServedDrafter,
    i: int,
    x_MW: Tensor,
    positions_M: Tensor,
    past: Past,
    whole: bool = False,
) -> Tensor:
    """Layer ``i``'s attention, (M, H); the new keys are added to ``past``. ``whole``: later nodes are seen too."""
    read = served.settings
    at = f"layers.{i}.self_attn"
    q_hMd, k_gMd, v_gMd = (latent_heads if read.latent else heads)(served, at, x_MW, positions_M)
    past[i] = torch.cat([past[i][0], k_gMd], 1), torch.cat([past[i][1], v_gMd], 1)
    k_hSd, v_hSd = (
        x.repeat_interleave(read.num_attention_heads // read.num_key_value_heads, 0)
        for x in past[i]
    )
    back_MS = positions_M[:, None] - torch.arange(k_hSd.shape[1], device=positions_M.device)
    window = read.windows[i]
    hidden_MS = (back_MS < 0) & (not whole)
    if window is not None:
        hidden_MS = hidden_MS | (back_MS >= window)
    scores_hMS = (q_hMd @ k_hSd.mT / q_hMd.shape[-1] ** 0.5).masked_fill(hidden_MS, float("-inf"))
    shares_hMS = scores_hMS.softmax(-1, dtype=torch.promote_types(scores_hMS.dtype, torch.float32))
    return project(
        served, f"{at}.o_proj", (shares_hMS.to(v_hSd.dtype) @ v_hSd).transpose(0, 1).flatten(1)
    )


def latent_heads(
    served: ServedDrafter, at: str, x_MW: Tensor, positions_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of DeepSeek's attention (https://arxiv.org/abs/2405.04434), (h, M, their width) each.

    Positions turn neighbours, 2j and 2j + 1, not channels that lie half a head apart.
    """
    read = served.settings
    _, kv_rank, plain, turned, values = read.latent
    q_hMd = project(
        served,
        f"{at}.q_b_proj",
        rms(served, f"{at}.q_a_layernorm", project(served, f"{at}.q_a_proj", x_MW)),
    )
    q_hMd = q_hMd.unflatten(-1, (-1, plain + turned)).transpose(0, 1)
    latent, shared = project(served, f"{at}.kv_a_proj_with_mqa", x_MW).split([kv_rank, turned], -1)
    kv_hMd = project(served, f"{at}.kv_b_proj", rms(served, f"{at}.kv_a_layernorm", latent))
    kv_hMd = kv_hMd.unflatten(-1, (-1, plain + values)).transpose(0, 1)
    inverse, factor = read.rope
    angles_Mr = positions_M.float()[:, None] * inverse.to(positions_M.device)
    cos_Mr, sin_Mr = ((f(angles_Mr) * factor).to(x_MW.dtype) for f in (torch.cos, torch.sin))

    def turn(x_nMr: Tensor) -> Tensor:
        even = x_nMr[..., 0::2]
        odd = x_nMr[..., 1::2]
        return torch.stack(
            [even * cos_Mr - odd * sin_Mr, odd * cos_Mr + even * sin_Mr], -1
        ).flatten(-2)

    q_hMd = torch.cat([q_hMd[..., :plain], turn(q_hMd[..., plain:])], -1)
    k_hMd = torch.cat([kv_hMd[..., :plain], turn(shared[None]).expand(len(q_hMd), -1, -1)], -1)
    return q_hMd * read.stretch, k_hMd, kv_hMd[..., plain:]


def rotate(x_nMd: Tensor, positions_M: Tensor, rope: tuple[Tensor, float]) -> Tensor:
    """Channel j and channel j + r/2 turn together; the table is made in float32 and used in the dtype of ``x``."""
    inverse, factor = rope
    angles_Mr = (positions_M.float()[:, None] * inverse.to(positions_M.device)).repeat(1, 2)
    cos_Mr, sin_Mr = ((f(angles_Mr) * factor).to(x_nMd.dtype) for f in (torch.cos, torch.sin))
    r = angles_Mr.shape[1]
    one = x_nMd[..., : r // 2]
    two = x_nMd[..., r // 2 : r]
    turned = x_nMd[..., :r] * cos_Mr + torch.cat([-two, one], -1) * sin_Mr
    return torch.cat([turned, x_nMd[..., r:]], -1)


def feed_forward(served: ServedDrafter, i: int, x_MH: Tensor) -> Tensor:
    """Layer ``i``'s, gated by SiLU, behind its norm."""
    at = f"layers.{i}.mlp"
    x_MH = rms(served, f"layers.{i}.post_attention_layernorm", x_MH)
    gate = F.silu(project(served, f"{at}.gate_proj", x_MH))
    return project(served, f"{at}.down_proj", gate * project(served, f"{at}.up_proj", x_MH))
