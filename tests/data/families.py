"""Tiny tokenizers with the templates and the special tokens of real families of models."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.tiny import tiny_tokenizer

LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
           "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]  # fmt: skip
PHI = [
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|im_start|>",
    "<|im_sep|>",
    "<|im_end|>",
]
GPT_OSS = [
    "<|startoftext|>",
    "<|return|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|call|>",
]

# special tokens, beginning, end of sequence
FAMILIES: dict[str, tuple[list[str], str | None, str]] = {
    "llama3": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "llama3_1": (LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen2_5": (QWEN, None, "<|im_end|>"),
    "qwen3": (QWEN, None, "<|im_end|>"),
    "qwq": (QWEN, None, "<|im_end|>"),
    "gemma2": (GEMMA, "<bos>", "<eos>"),
    "gemma3": (GEMMA, "<bos>", "<eos>"),
    "mistral_v3": (MISTRAL, "<s>", "</s>"),
    "mistral_v7": (MISTRAL, "<s>", "</s>"),
    "phi3": (PHI, None, "<|endoftext|>"),
    "phi4": (PHI, None, "<|im_end|>"),
    "gpt_oss": (GPT_OSS, "<|startoftext|>", "<|return|>"),
}
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # tokens of Qwen's, and not special


def family_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of that family."""
    special, bos, eos = FAMILIES[name]
    template = Path(__file__).parent / "templates" / f"{name}.jinja"
    tokenizer = tiny_tokenizer(template.read_text(encoding="utf-8"), **options)
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens(WORDS)
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    return tokenizer


def in_default_run(names: Iterable[str], *quick_ones: str) -> list[Any]:
    """Parameters of which only these are tried without ``-m slow``."""
    return [
        name if name in quick_ones else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]
