"""A small target that vLLM can run on a CPU, and drafters that ``specdec fit`` trains for it."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.cli import main

TEXT = "".join(f"def add_{n}(a, b):\n    return a + b + {n}\n\n\n" for n in range(200))
PROMPTS = ["def add_7(", "def add_150(a, b):\n", "    return a + b", "def sub"]
VOCAB, LONGEST = 300, 256
DRAFTERS = {
    "eagle1": ["--config", "conf/train/eagle1.yaml"],
    "eagle3": ["--config", "conf/train/eagle3.yaml", "--model.drafter.draft_vocab_size", "200"],
    "eagle3_1": ["--config", "conf/train/eagle3_1.yaml", "--model.drafter.draft_vocab_size", "200"],
}
METHODS = {"eagle1": "eagle", "eagle3": "eagle3", "eagle3_1": "eagle3"}


def make_target(path: Path, steps: int = 120) -> Path:
    """Seven layers of width 128 with heads of 64, trained on :data:`TEXT`; its chat template joins the messages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>"]
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    wrapped.save_pretrained(path)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(wrapped),
            hidden_size=128,
            intermediate_size=192,
            num_hidden_layers=7,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=LONGEST,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    ids_N = torch.tensor(wrapped.encode(TEXT, add_special_tokens=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(ids_N) - 64, (8,)).tolist()
        rows_BT = torch.stack([ids_N[start : start + 64] for start in starts])
        model(input_ids=rows_BT, labels=rows_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(path)
    return path


def train_drafter(name: str, target: Path, out: Path, steps: int = 100) -> Path:
    """One of :data:`DRAFTERS`; its directory."""
    text, config = out.with_suffix(".txt"), out.with_suffix(".yaml")
    text.write_text(TEXT)
    data = {"train": str(text), "val": str(text), "seq_len": 64, "batch_size": 8}
    small = {
        "model": {
            "target": {"source": str(target)},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-3}},
        },
        "data": {"class_path": "TextData", "init_args": data},
        "trainer": {
            "max_steps": steps,
            "accelerator": "cpu",
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "limit_val_batches": 0,
            "log_every_n_steps": 8,
        },
    }
    config.write_text(yaml.safe_dump(small))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specdec"])
        assert main(["fit", "--config", str(config), *DRAFTERS[name], "--out", str(out)]) == 0
    return out / "drafter"
