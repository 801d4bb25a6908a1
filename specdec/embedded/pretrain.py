"""Training of the embedded target: next-token prediction under Lightning, on the CPU.

Legend: B rows, T tokens, R all rows, V vocabulary.
"""

import contextlib
import logging
import math
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.progress import progress
from specdec.embedded.rows import spread, training_order
from specdec.optimizers import MuonAdamW

EMBEDDING_STD = 0.2  # the embedding must not drown in what the layers add
HELD_OUT_TOKENS = 65_536  # how much of the held-out text is scored


class Pretrained(NamedTuple):
    """A trained model."""

    model: LlamaForCausalLM
    held_out_loss: float
    """Mean cross-entropy on held-out text, nats per token."""
    seconds: float
    """Wall time of the optimiser steps."""


def llama(config: EmbeddedConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, float32; the weights depend on ``config.seed`` alone, the global generator stays put."""
    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        attn_implementation="eager",  # on CPUs its training is a fifth faster than with SDPA
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(shape)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    for layer in model.model.layers:  # every layer starts as the identity, which shortens training by far
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


class PretrainModule(pl.LightningModule):
    """Cross-entropy of the next token, Muon with AdamW, linear warm-up and decay."""

    def __init__(self, model: LlamaForCausalLM, config: EmbeddedConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    @property
    def tokens_per_step(self) -> int:
        """For progress reports."""
        return self.config.tokens_per_step

    def loss(self, rows_BT: Tensor) -> Tensor:
        """Mean cross-entropy of a row's tokens after its first; a float32 scalar."""
        logits_BTV = self.model(rows_BT[:, :-1], use_cache=False).logits
        return cross_entropy(logits_BTV.flatten(0, 1).float(), rows_BT[:, 1:].flatten())

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        """Loss of one batch of rows."""
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor]) -> None:
        """Log the loss of held-out rows."""
        self.log("held_out_loss", self.loss(batch[0]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        """Muon for the layers' matrices, AdamW for embedding, head and norms, one schedule for both."""
        optimizer = MuonAdamW(self.model.named_parameters(), lr=self.config.lr, lr_rest=self.config.lr_rest)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate(self, step: int) -> float:
        rising = math.ceil(self.config.warmup * self.config.steps)
        if step < rising:
            return (step + 1) / rising
        return (self.config.steps - step) / (self.config.steps - rising)


def pretrain(
    config: EmbeddedConfig, tokenizer: PreTrainedTokenizerFast, train_RT: Tensor, held_out_RT: Tensor
) -> Pretrained:
    """Train a model on ``config.steps`` batches of rows, then score it on held-out rows.

    Args:
        config: shape and training.
        tokenizer: for the ids of ``<s>`` and ``</s>``.
        train_RT: int64 rows, as :func:`specdec.embedded.rows.stream_rows` cuts them.
        held_out_RT: rows that are only scored; about :data:`HELD_OUT_TOKENS` tokens of them, evenly spaced.
    """
    order = training_order(len(train_RT), config.steps * config.batch_size, config.seed)
    batches = train_RT[order].view(config.steps, config.batch_size, -1)
    module = PretrainModule(llama(config, tokenizer), config)
    bar = progress()
    with _without_tips(), _plain_interrupt():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed" if config.precision == "bf16-mixed" else "32-true",
            max_steps=config.steps,
            gradient_clip_val=1.0,
            callbacks=[bar],
            enable_progress_bar=isinstance(bar, ProgressBar),
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        started = time.monotonic()
        trainer.fit(module, _loader(batches, None))
        seconds = time.monotonic() - started
        scored_RT = spread(held_out_RT, max(1, HELD_OUT_TOKENS // config.seq_len))
        scores = trainer.test(module, _loader(scored_RT, config.batch_size), verbose=False)
    return Pretrained(module.model.eval(), scores[0]["held_out_loss"], seconds)


def _loader(rows: Tensor, batch_size: int | None) -> DataLoader[Any]:
    own = torch.Generator()  # an iterator would draw on the global one otherwise
    return DataLoader(TensorDataset(rows), batch_size=batch_size, generator=own)


@contextlib.contextmanager
def _without_tips() -> Iterator[None]:
    """Keep Lightning's notes on what it has not found, and on a part of torch it still uses, to itself."""
    chatter = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = chatter.level
    chatter.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        chatter.setLevel(level)


@contextlib.contextmanager
def _plain_interrupt() -> Iterator[None]:
    """Let Ctrl-C be a KeyboardInterrupt: Lightning turns it into a SystemExit and leaves SIGINT ignored."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise error.__context__ from None
