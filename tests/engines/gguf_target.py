"""A target as a GGUF file, written after llama.cpp's tables: its own converter knows only tokenizers of real models."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}


def write_target_gguf(model: PreTrainedModel, path: Path) -> Path:
    """Write a model in its own dtype (float32 or float16), with numbers for tokens."""
    config = model.config
    architecture = ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    _add_tokens(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        if architecture == gguf.MODEL_ARCH.LLAMA:
            value = _reordered(name, value, config)
        array = value.detach().numpy()
        writer.add_tensor(stored, array.astype(np.float32) if array.ndim == 1 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(config.vocab_size)


def _add_tokens(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"[{number}]" for number in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["[ ]"])
    writer.add_add_bos_token(False)


def _reordered(name: str, value: Tensor, config: Any) -> Tensor:
    """Return queries and keys in the order that the architecture llama rotates: neighbors."""
    heads = {
        "q_proj.weight": config.num_attention_heads,
        "k_proj.weight": config.num_key_value_heads,
    }
    for ending, number in heads.items():
        if name.endswith(ending):
            half = len(value) // number // 2
            return value.reshape(number, 2, half, -1).swapaxes(1, 2).reshape(value.shape)
    return value
