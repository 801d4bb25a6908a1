"""A small chat target that has learnt its answers, and the data that it learnt them from."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.tiny import CHATML, tiny_tokenizer

SYSTEM = {"role": "system", "content": "two"}
LEARNT: list[list[str]] = [
    ["what is two plus two?", "four"],
    ["and the sky, is it green?", "the sky is blue", "fine\n", "hello there"],
    ["hello there", "what is it?", "the grass", "green and blue and green and blue"],
    ["system", "three plus three is six, and two plus two is four"],
]


def messages(said: list[str]) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]


def asked(said: list[str]) -> list[dict[str, Any]]:
    """The same before the target has answered."""
    return [
        turn if turn["role"] == "user" else {**turn, "content": "someone else's words"}
        for turn in messages(said)
    ]


def make_target(folder: Path, steps: int = 120) -> Path:
    """Its directory; its answers end with ``<|im_end|>``."""
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|eos|>"
    tokenizer.save_pretrained(folder)
    texts = [tokenizer.apply_chat_template(messages(said), tokenize=False) for said in LEARNT]
    texts += [
        tokenizer.apply_chat_template([SYSTEM, *messages(said)], tokenize=False) for said in LEARNT
    ]
    rows = tokenizer(
        texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
    for _ in range(steps):
        loss = model(
            input_ids=rows.input_ids, attention_mask=rows.attention_mask, labels=labels
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
