"""Sentences about an imported checkpoint: what was read from it, and what engines read differently."""

from specdec.drafter import MLA, Concat, DrafterConfig, KVInjection, Wide
from specdec.export import keys
from specdec.export import tensors as named
from specdec.export.boundaries import FEW_LAYERS
from specdec.export.checkpoint import Checkpoint
from specdec.export.formats import flat
from specdec.export.subject import EMBEDDING, HEAD
from specdec.export.tensors import Raw
from specdec.export.weights import BIAS, tied_head
from specdec.target import Target
from specdec.utils.text import how_many

FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
SPECFORGE = "SpecForge or TorchSpec"


def checkpoint_layout(checkpoint: Checkpoint) -> str:
    """Return the name of the layout, which is recognized by what tells it from the others."""
    raw = checkpoint.raw
    ours = checkpoint.ours
    inner = raw.get("eagle_config") or {}
    if ours is not None:
        return f"an export of specdec's, format {ours.get('exported_as')}"
    if "speculators_model_type" in raw:
        return "speculators"
    if "dflash_config" in raw:
        return "z-lab"
    if "markov_rank" in raw:
        return "DeepSpec"
    nvidia = not {"norm_before_fc", "use_last_layernorm"}.isdisjoint(inner)
    if nvidia or inner.get("use_aux_hidden_state") is False:
        return "NVIDIA"
    if checkpoint.layer.startswith("model."):
        return "Automodel"
    if keys.IDS in inner:
        return SPECFORGE
    return "SafeAILab" if checkpoint.layer == "midlayer." or BIAS in checkpoint.tensors else "vLLM"


def checkpoint_summary(
    checkpoint: Checkpoint, config: DrafterConfig, aux_layers_given: bool = False
) -> list[str]:
    """Return sentences about what was read from a checkpoint.

    Args:
        aux_layers_given: whether the caller named the boundaries, so that the checkpoint was not asked.
    """
    raw = flat(checkpoint.raw)
    tensors = checkpoint.tensors
    wide = isinstance(config.entry, Wide)
    block = isinstance(config.entry, KVInjection)
    family = "EAGLE-3" if wide else "EAGLE-1"
    if block:
        family = config.drafting.generation or "a block drafter"
    dtypes = {value.dtype for name, value in tensors.items() if name not in named.MAPS}
    kinds = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    inner = raw.get("eagle_config") or {}
    source = "its config names none: EAGLE-3's own"
    if not config.fusion.mixes:
        reader = "a drafter without fc" if wide else "EAGLE-1"
        source = f"the last state, which {reader} reads"
    elif aux_layers_given:
        source = "as given"
    elif block or raw.get(keys.IDS) or inner.get(keys.IDS) or inner.get("layer_ids"):
        source = "of its config"
    boundaries = ", ".join(map(str, config.aux_layers))
    lines = [
        f"layout: {family}, {checkpoint_layout(checkpoint)}; its layer is called {checkpoint.layer}*, "
        f"{how_many(len(tensors), 'tensor')} in {' and '.join(kinds)}",
        f"boundaries: {boundaries} of {config.num_target_layers} ({source})",
    ]
    if checkpoint.eight_bits:
        lines.append(
            f"matrices: in 8 bits ({checkpoint.eight_bits}), read as the numbers that they stand for; an engine also "
            "rounds what they read, token by token, which specdec does not"
        )
    if wide:
        written = keys.config_to_keys(config, "eagle3")
        on, off = (
            ", ".join(key for key in FLAGS if written[key] is state) or "none"
            for state in (True, False)
        )
        lines.append(f"switches: {on} on; {off} off")
    size = config.draft_vocab_size
    whole = config.vocab_size
    maps = " and ".join(name for name in named.MAPS if name in tensors) or "no d2t"
    parts = {"embedding": EMBEDDING, "head": HEAD}
    shared = " and ".join(part for part, name in parts.items() if name not in tensors)
    owner = f"the target's {shared}" if shared else "its own embedding and head"
    share = f"{100 * size / whole:.1f} %"
    vocabulary = (
        f"draft vocabulary: {size:,} of {how_many(whole, 'token')} ({share}), {maps}; {owner}"
    )
    return [*lines, *_design_lines(raw, config), vocabulary]


def _design_lines(raw: Raw, config: DrafterConfig) -> list[str]:
    """Return sentences about what differs between drafters of one family."""
    lines = []
    layers = raw.get("num_hidden_layers")
    if layers is not None and layers != config.num_layers:
        lines.append(
            f"layers: {config.num_layers}, as the file has; its config says {layers}, which engines go by"
        )
    positions = raw.get("max_position_embeddings")
    if positions is not None and positions < config.max_position_embeddings:
        lines.append(
            f"positions: {positions:,} in its config, raised to the target's {config.max_position_embeddings:,}"
        )
    if config.attention_bias:
        output = " and the output" if config.attention_bias is True else ""
        lines.append(f"biases: on queries, keys and values{output}")
    if config.drafting.summary:
        lines.append(config.drafting.summary)
    if isinstance(config.attention, MLA):
        lines.append(
            f"attention: MLA, keys and values from a latent of {config.attention.kv_lora_rank}"
        )
    return lines


def misread_by_engines(checkpoint: Checkpoint, config: DrafterConfig, target: Target) -> list[str]:
    """Return sentences about what engines read differently in a checkpoint, each with the way out."""
    raw = flat(checkpoint.raw)
    lines = []
    longest = target.config.max_position_embeddings
    if config.max_position_embeddings < longest:
        lines.append(
            f"its rope {config.rope['rope_type']} depends on max_position_embeddings, which is "
            f"{config.max_position_embeddings:,} here and {longest:,} in the target: engines raise it to the server's "
            "length and then rotate otherwise"
        )
    if isinstance(config.entry, Wide) and tied_head(checkpoint, target) is not None:
        lines.append(
            "tie_word_embeddings is true and the file has no lm_head: its embedding is read as its head, as SGLang "
            "does; vLLM ignores the key and takes the target's head: serve an export of this drafter in its place"
        )
    ids = raw.get(keys.IDS)
    foreign_speculators = "speculators_model_type" in checkpoint.raw and checkpoint.ours is None
    if foreign_speculators and ids and target.num_layers > FEW_LAYERS:
        usual = list(Concat().default_layers(target.num_layers))
        if [i + 1 for i in sorted(ids)] == usual and list(config.aux_layers) == sorted(ids):
            lines.append(
                f"{keys.IDS} {ids} are read as boundaries, as speculators' layout numbers them; they are EAGLE-3's "
                f"{usual} less one: if the file was converted from a layout that numbers outputs of layers, give "
                f"--aux_layers {usual}"
            )
    return lines
