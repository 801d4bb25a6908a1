"""How the embedded target was trained, a small Llama of the Python standard library's sources.

``specdec quickstart --full`` trains it again; ``benchmarks/embedded_target.py`` measures it and writes its answers too.

Legend: B rows of a batch, T tokens of a row, L layers, h heads.
"""

import dataclasses
import logging
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.data import Batch
from specdec.embedded import RECORD, SEED, EmbeddedData
from specdec.embedded.corpus import corpus, train_tokenizer
from specdec.nn.cache import additive
from specdec.nn.optimizers import AdamW
from specdec.nn.view import View
from specdec.training.checkpoint import AtomicCheckpointIO, RunCheckpoint, newest
from specdec.training.progress import progress_callback
from specdec.utils.files import staged_directory, write_json
from specdec.utils.links import refuse_links
from specdec.utils.machine import multiplies_bfloat16, provenance
from specdec.utils.reading import read_json, sha256

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
EMBEDDING_STD = 0.5  # the embedding must not drown in what the layers add
TINY = 1e-6  # under a root, whose slope at zero has no end
EVALUATED_AT_ONCE = 16  # rows


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A small Llama and its training; with the corpus, which is this Python's, it determines the weights.

    Args:
        out: the model's directory.
        vocab_size: tokens, the 256 bytes, <s> and </s> included.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        heads: attention heads of a layer.
        kv_heads: key heads of a layer.
        head_dim: width of a head.
        intermediate: width of the MLP.
        max_position_embeddings: longest text; it is trained on the first seq_len of them.
        seq_len: tokens of a training row; longer documents are cut.
        batch_size: rows of an optimizer step.
        steps: optimizer steps.
        lr: peak learning rate of AdamW, betas 0.9 and 0.95.
        weight_decay: of matrices; norms have none.
        warmup: share of the steps with a rising learning rate.
        decay: share of the steps, the last ones, in which it falls linearly to zero.
        bos_scale: how many times as long as other embeddings that of <s> begins: the state at the first token of large
            models is that much longer than at others, and with it their attention sink comes early.
        quiet: times what every head adds to the stream (RMS, summed over layers, mean over heads and tokens), added to
            the loss. As in the group lasso (https://doi.org/10.1111/j.1467-9868.2005.00532.x), a head that helps little
            at a token comes to add nothing there, which it can by resting on <s>, as heads of long-trained models do.
        seed: of the split of the corpus, the initial weights and the order of rows.
        precision: bf16-mixed, 32-true, or auto: the first where this CPU multiplies bfloat16 in hardware.
        every_n_train_steps: steps between checkpoints, from which an interrupted run resumes.
    """

    out: Path
    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 12
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    max_position_embeddings: int = 2048
    seq_len: int = 256
    batch_size: int = 4
    steps: int = 6_400
    lr: float = 1e-3
    weight_decay: float = 0.1
    warmup: float = 0.02
    decay: float = 0.3
    bos_scale: float = 20.0
    quiet: float = 0.4
    seed: int = SEED
    precision: Literal["auto", "bf16-mixed", "32-true"] = "auto"
    every_n_train_steps: int = 500

    @property
    def determinants(self) -> dict[str, Any]:
        """What the weights depend on."""
        settings = dataclasses.asdict(self)
        del settings["out"], settings["every_n_train_steps"]
        return settings


class Pretraining(pl.LightningModule):
    """Trains the Llama by next-token prediction; no document sees another one of its row.

    Args:
        config: shape and training.
        tokenizer: for the ids of ``<s>`` and ``</s>``, and for the data.
    """

    def __init__(self, config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.model = llama(config, tokenizer)
        # of each layer, what its heads add, RMS; of the forward under way
        self._added: list[Tensor] = []
        for layer in self.model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(self._listen)

    def _listen(self, o_proj: torch.nn.Module, args: tuple[Tensor]) -> None:
        """Note the RMS of W_h z, which head h adds: its square is zᵀ(W_hᵀW_h)z over the width, with d × d products."""
        if not o_proj.training:
            return
        heads = (self.config.heads, self.config.head_dim)
        weight_Hv: Any = o_proj.weight
        z_BThd = args[0].unflatten(-1, heads)
        w_Hhd = weight_Hv.unflatten(1, heads)
        gram_hde = torch.einsum("Hhd,Hhe->hde", w_Hhd, w_Hhd) / self.config.hidden_size
        square_BTh = torch.einsum("bthd,hde,bthe->bth", z_BThd, gram_hde, z_BThd)
        self._added.append((square_BTh.float().clamp(min=0) + TINY).sqrt().mean())

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of every token after its document's first; a float32 scalar."""
        logits_RV, ids_R = next_tokens(self.model, batch)
        return cross_entropy(logits_RV, ids_R)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        self._added.clear()
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss + self.config.quiet * torch.stack(self._added).sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The loss on held-out documents, in nats per token."""
        self.log("val/loss", self.loss(batch), prog_bar=True, batch_size=len(batch.ids_BT))

    def configure_optimizers(self) -> Any:
        """AdamW; the learning rate rises, stays and falls."""
        optimizer = AdamW(
            self.model.named_parameters(), self.config.lr, weight_decay=self.config.weight_decay
        )
        steps = self.config.steps
        rising = max(1, round(self.config.warmup * steps))
        falling = max(1, round(self.config.decay * steps))
        schedule = LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / rising, (steps - step) / falling)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def next_tokens(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of every token after its document's first: the logits before it, float32 (R, V), and its id, (R,). No document
    sees another."""
    ids_BT, _, documents_BT = batch
    view = View.packed(documents_BT)
    mask_B1TT = additive(view.visibility.mask_B1TS, torch.float32)
    logits_BTV = model(
        ids_BT, attention_mask=mask_B1TT, position_ids=view.positions_BT, use_cache=False
    ).logits[:, :-1]
    inside_BT = (documents_BT[:, 1:] == documents_BT[:, :-1]) & (documents_BT[:, 1:] >= 0)
    return logits_BTV[inside_BT].float(), ids_BT[:, 1:][inside_BT]


def llama(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, float32; the weights depend on ``config.seed`` alone, the global generator stays put."""
    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        intermediate_size=config.intermediate, max_position_embeddings=config.max_position_embeddings,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
        attn_implementation="eager",  # on CPUs its training is a fifth faster than with SDPA
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(shape)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.bos_token_id].mul_(config.bos_scale)
    # every layer starts as the identity, which shortens training by far
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def pretrain(config: PretrainConfig) -> int:
    """Train a small Llama on the Python standard library's sources, on one process.

    An interrupted run resumes where it was. The directory appears when it is whole: bfloat16 weights, tokenizer and
    :data:`RECORD`.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        ValueError: Python has no library sources, or the directory holds something else.
    """
    out = config.out
    if _is_begun(out / RECORD, config):
        log.info("%s is trained already", out)
        return 0
    work = out.with_name(out.name + ".partial")
    if not _is_begun(work / RECORD, config):
        write_json(work / RECORD, {"config": config.determinants})
    sources = corpus(config.seed)
    texts = [file.text for file in sources.train]
    characters = sum(map(len, texts))
    log.info("training a tokenizer of %d tokens on %d files", config.vocab_size, len(texts))
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_position_embeddings)
    data = EmbeddedData(config.seq_len, config.batch_size, config.seed)
    module = Pretraining(config, tokenizer)
    automatic = "bf16-mixed" if multiplies_bfloat16() else "32-true"
    precision = automatic if config.precision == "auto" else config.precision
    tokens = config.steps * config.batch_size * config.seq_len
    parameters = module.model.num_parameters()
    log.info(
        "training %.1fM parameters on %s tokens, %s", parameters / 1e6, f"{tokens:,}", precision
    )
    try:
        _trainer(config, work, precision).fit(
            module, datamodule=data, ckpt_path=newest(work / "checkpoints"), weights_only=True
        )
    except SystemExit as error:
        if error.code != 1:  # what Lightning does after Ctrl-C
            raise
        return 128 + signal.SIGINT
    model = module.model.to("cpu", torch.bfloat16).eval()
    with staged_directory(out) as staging:
        tokenizer.save_pretrained(staging)
        model.save_pretrained(staging)
        loss = held_out_loss(model.float(), data)  # of the rounded weights, which were saved
        record = {
            "config": config.determinants,
            "parameters": parameters,
            "tokens": tokens,
            "precision": precision,
            "corpus": {"files": len(texts), "characters": characters, "sha256": sources.sha256},
            "weights_sha256": sha256(staging / WEIGHTS),
            "held_out_loss": loss,
            "provenance": provenance(seed=config.seed),
        }
        write_json(staging / RECORD, record)
    shutil.rmtree(work)
    log.info("%s: held-out loss %.3f", out, loss)
    return 0


def _is_begun(record: Path, config: PretrainConfig) -> bool:
    """Return whether a directory is of these settings; ValueError if it exists and holds something else."""
    folder = record.parent
    if not folder.exists():
        return False
    if not record.is_file() or read_json(record).get("config") != config.determinants:
        raise ValueError(
            f"{folder} exists already and is of other settings: choose another --out or remove it"
        )
    refuse_links(folder)
    return True


def _trainer(config: PretrainConfig, work: Path, precision: Any) -> pl.Trainer:
    """The trainer, which keeps its checkpoints and its log in ``work``."""
    return pl.Trainer(
        accelerator="auto", devices=1, precision=precision, max_steps=config.steps, gradient_clip_val=1.0,
        callbacks=[RunCheckpoint(config.every_n_train_steps), progress_callback()], plugins=[AtomicCheckpointIO()],
        logger=CSVLogger(work, name="csv"), default_root_dir=work, log_every_n_steps=50, limit_val_batches=32,
        val_check_interval=config.every_n_train_steps, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        use_distributed_sampler=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, data: EmbeddedData) -> float:
    """Return the mean loss of all held-out documents, in nats per token."""
    rows = data.splits.validation.int64()
    loss = 0.0
    tokens = 0
    for columns in zip(*(column.split(EVALUATED_AT_ONCE) for column in rows), strict=True):
        logits_RV, ids_R = next_tokens(model, Batch(*columns))
        loss += float(cross_entropy(logits_RV, ids_R, reduction="sum"))
        tokens += len(ids_R)
    return loss / tokens
