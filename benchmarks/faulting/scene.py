"""What the faults befall: a tiny target, a text, and one run of every kind over them."""

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.extraction.command import main as cache

TEXT = "".join(f"def add_{n}(a, b):\n    return a + b + {n}\n\n\n" for n in range(40))


class Scene(NamedTuple):
    """Files that all runs share."""

    target: Path
    text: Path
    features: Path
    """What ``specdec cache`` stored of EAGLE-3's boundaries."""


class Variant(NamedTuple):
    """A kind of run."""

    name: str
    args: tuple[str, ...]
    """Of ``specdec fit``, beside those of :func:`arguments`."""
    processes: int = 1
    cached: bool = False
    """Features from the cache; else the target's, in the step."""


def build(folder: Path) -> Scene:
    """A random seven-layer Llama of width 32 with a byte-level tokenizer of 300 tokens, and forty short functions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(wrapped), hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # opinions worth learning
    scene = Scene(folder / "target", folder / "functions.txt", folder / "features")
    wrapped.save_pretrained(scene.target)
    model.save_pretrained(scene.target)
    scene.text.write_text(TEXT)
    assert cache([*_source(scene), *_preset("eagle3"), f"--out={scene.features}"]) == 0
    return scene


def _source(scene: Scene) -> list[str]:
    given = {
        "model.target.source": scene.target,
        "data": "TextData",
        "data.train": scene.text,
        "data.val": scene.text,
        "data.seq_len": 32,
        "data.batch_size": 2,
    }
    return [f"--{name}={value}" for name, value in given.items()]


def arguments(scene: Scene, variant: Variant, steps: int, every: int) -> list[str]:
    """Of ``specdec fit``: a run of so many steps, with a checkpoint every few."""
    given = {
        "model.ttt_steps": 2,
        "model.optimizer.lr": "1e-2",
        "trainer.max_steps": steps,
        "trainer.log_every_n_steps": 1,
        "trainer.limit_val_batches": 1,
        "trainer.num_sanity_val_steps": 0,
        "trainer.accelerator": "cpu",
        "trainer.enable_model_summary": "false",
        "trainer.enable_progress_bar": "false",
        "checkpoint.every_n_train_steps": every,
        "checkpoint.save_top_k": 2,
        "acceptance.every_n_validations": 0,
    }
    if variant.cached:
        given |= {"model.features": "Cached", "model.features.directory": scene.features}
    return [*_source(scene), *(f"--{name}={value}" for name, value in given.items()), *variant.args]


def _preset(name: str) -> tuple[str, ...]:
    vocabulary = () if name in ("eagle1", "eagle2") else ("--model.drafter.draft_vocab_size=200",)
    return (f"--model.drafter=conf/drafter/{name}.yaml", *vocabulary)


NO_VALIDATION = "--trainer.limit_val_batches=0"
NOISE = "--model.noise=UniformNoise"
ACCUMULATE = "--trainer.accumulate_grad_batches=2"
VALIDATE = "--trainer.val_check_interval=5"
WORKERS = "--data.num_workers=2"
DROPOUT = "--model.noise=benchmarks.faulting.dropout.Dropout"
VARIANTS = (
    Variant("eagle1, noise", (*_preset("eagle1"), NOISE, NO_VALIDATION)),
    Variant("eagle2, noise, accumulation", (*_preset("eagle2"), NOISE, ACCUMULATE, NO_VALIDATION)),
    Variant("eagle3, validation", (*_preset("eagle3"), VALIDATE)),
    Variant("eagle3, cached features, noise", (*_preset("eagle3"), NOISE, NO_VALIDATION), cached=True),
    Variant("eagle3_1", (*_preset("eagle3_1"), NO_VALIDATION)),
    Variant("eagle3_1, 2 workers", (*_preset("eagle3_1"), WORKERS, NO_VALIDATION)),
    Variant(
        "eagle3_1, dropout, 2 workers, accumulation, validation",
        (*_preset("eagle3_1"), DROPOUT, WORKERS, ACCUMULATE, VALIDATE),
    ),
)
DISTRIBUTED = (
    Variant(
        "eagle3_1, DDP x2, dropout",
        (*_preset("eagle3_1"), DROPOUT, "--trainer.strategy=ddp", "--trainer.devices=2", NO_VALIDATION),
        processes=2,
    ),
    Variant(
        "eagle3_1, FSDP2 x2",
        (*_preset("eagle3_1"), "--trainer.strategy=fsdp2", "--trainer.devices=2", NO_VALIDATION),
        processes=2,
    ),
)
