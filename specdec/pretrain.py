"""``specdec pretrain``: how the embedded target was made, a small Llama of the Python standard library's sources.

Legend: B rows of a batch, T tokens of a row, L layers, h heads.
"""

import dataclasses
import itertools
import json
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
from specdec.embedded import EmbeddedData, held_out_prompts
from specdec.embedded.corpus import ANSWERS as ANSWERS_FILE
from specdec.embedded.corpus import SEED, CorpusFile, corpus, functions, train_tokenizer
from specdec.evaluation.metrics import loops
from specdec.nn.cache import additive
from specdec.nn.optimizers import AdamW
from specdec.nn.view import View
from specdec.training.callbacks import progress as progress_of_fit
from specdec.training.checkpoint import AtomicCheckpointIO, RunCheckpoint, newest
from specdec.utils.config import runs_folder
from specdec.utils.files import staged_directory, write_json, write_text
from specdec.utils.machine import multiplies_bfloat16, provenance
from specdec.utils.numbers import (
    Count,
    Heads,
    Intermediate,
    Layers,
    NonNegative,
    Positive,
    Seed,
    Share,
    Side,
    Tokens,
    Vocabulary,
    Width,
    check_numbers,
)
from specdec.utils.progress import progress
from specdec.utils.reading import read_json, sha256

log = logging.getLogger(__name__)

RECORD = "pretrain.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
EMBEDDING_STD = 0.5  # the embedding must not drown in what the layers add
# tokens of a function that an answer goes on from; rows
BEGINNINGS = (12, 20, 32, 48)
ANSWERED_AT_ONCE = 128
TINY = 1e-6  # under a root, whose slope at zero has no end
# what the card's figures are measured on
SINK_ROWS = 32
ANSWERS = 60
PROMPT_TOKENS = 32
NEW_TOKENS = 96


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A small Llama and its training; with the corpus, which is this Python's, it determines the weights.

    Args:
        out: the model's directory; by default runs/pretrain.
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
        every_n_train_steps: steps between checkpoints, with which an interrupted run goes on.
    """

    out: Path | None = None
    vocab_size: Vocabulary = 2048
    hidden_size: Width = 256
    num_layers: Layers = 12
    heads: Heads = 4
    kv_heads: Heads = 2
    head_dim: Heads = 64
    intermediate: Intermediate = 704
    max_position_embeddings: Tokens = 2048
    seq_len: Tokens = 256
    batch_size: Side = 4
    steps: Count = 6_400
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.1
    warmup: Share = 0.02
    decay: Share = 0.3
    bos_scale: Positive = 20.0
    quiet: NonNegative = 0.4
    seed: Seed = SEED
    precision: Literal["auto", "bf16-mixed", "32-true"] = "auto"
    every_n_train_steps: Count = 500

    def __post_init__(self) -> None:
        check_numbers(type(self), vars(self))
        if self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup {self.warmup} and decay {self.decay} are shares of the steps: their sum is over 1"
            )

    @property
    def determinants(self) -> dict[str, Any]:
        """What the weights depend on."""
        left_out = {"out", "every_n_train_steps"}
        return {
            name: value for name, value in dataclasses.asdict(self).items() if name not in left_out
        }


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
        warmup = self.config.warmup
        decay = self.config.decay
        rising = max(1, round(warmup * steps))
        falling = max(1, round(decay * steps))
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

    The embedded target was made so: its record, pretrain.json, has the command, seed and hashes. An interrupted run
    goes on where it was; the directory appears when it is whole.

    Example: specdec pretrain --out runs/pretrain

    Raises:
        ValueError: a setting is out of range, Python has no library sources, or the directory holds something else.
    """
    out = config.out or runs_folder() / "pretrain"
    if out.exists():
        if not (out / RECORD).is_file() or read_json(out / RECORD)["config"] != config.determinants:
            raise ValueError(
                f"{out} exists already and is no model of these settings: choose another --out"
            )
        log.info("%s is trained already", out)
        return 0
    work = out.with_name(out.name + ".partial")
    if not (work / RECORD).exists():
        write_json(work / RECORD, config.determinants)
    elif read_json(work / RECORD) != config.determinants:
        raise ValueError(
            f"{work} holds a training of other settings: choose another --out or remove it"
        )
    sources = corpus(config.seed)
    texts = [file.text for file in sources.train]
    log.info("training a tokenizer of %d tokens on %d files", config.vocab_size, len(texts))
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_position_embeddings)
    data = EmbeddedData(config.seq_len, config.batch_size, config.seed)
    module = Pretraining(config, tokenizer)
    precision = config.precision
    if precision == "auto":
        precision = "bf16-mixed" if multiplies_bfloat16() else "32-true"
    log.info(
        "training %.1fM parameters on %s tokens, %s",
        module.model.num_parameters() / 1e6, f"{config.steps * config.batch_size * config.seq_len:,}", precision,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="auto", devices=1, precision=precision, max_steps=config.steps, gradient_clip_val=1.0,
        callbacks=[RunCheckpoint(config.every_n_train_steps), progress_of_fit()], plugins=[AtomicCheckpointIO()],
        logger=CSVLogger(work, name="csv"), default_root_dir=work, log_every_n_steps=50, limit_val_batches=32,
        val_check_interval=config.every_n_train_steps, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        use_distributed_sampler=False, enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    try:
        trainer.fit(
            module, datamodule=data, ckpt_path=newest(work / "checkpoints"), weights_only=True
        )
    except SystemExit as error:
        if error.code == 1:  # what Lightning does after Ctrl-C
            return 128 + signal.SIGINT
        raise
    model = module.model.to("cpu", torch.bfloat16).eval()
    with staged_directory(out) as staging:
        tokenizer.save_pretrained(staging)
        model.save_pretrained(staging)
        model.float()  # of what was saved
        record = {
            "config": config.determinants,
            "parameters": model.num_parameters(),
            "tokens": config.steps * config.batch_size * config.seq_len,
            "precision": precision,
            "corpus": {
                "files": len(texts),
                "characters": sum(map(len, texts)),
                "sha256": sources.sha256,
            },
            "weights_sha256": sha256(staging / WEIGHTS),
            **measure(model, data, tokenizer),
            "provenance": provenance(seed=config.seed),
        }
        rows = answers(model, sources.train, tokenizer)
        write_text(
            staging / ANSWERS_FILE.name,
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        )
        record["answers"] = len(rows)
        write_json(staging / RECORD, record)
        write_text(staging / CARD, card(record))
    shutil.rmtree(work)
    log.info("%s: held-out loss %.3f", out, record["held_out_loss"])
    return 0


@torch.inference_mode()
def answers(
    model: LlamaForCausalLM, files: list[CorpusFile], tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, Any]]:
    """What the model writes, greedily, after the first tokens of functions of these files: text to train drafters on.

    Returns:
        One ``{"text": beginning and answer, "ended": whether the model ended it}`` each; none of an answer that loops.
    """
    whole = [text for file in files for _, text in functions(file.text)]
    encoded = tokenizer(whole, return_attention_mask=False, verbose=False)["input_ids"]
    rows = []
    lengths = itertools.cycle(BEGINNINGS)
    beginnings = [
        ids[:length] for ids, length in zip(encoded, lengths, strict=False) if len(ids) > length
    ]
    with progress("answering", "function", len(beginnings)) as done:
        for length in BEGINNINGS:  # those of one length at once: no padding
            alike = [ids for ids in beginnings if len(ids) == length]
            for start in range(0, len(alike), ANSWERED_AT_ONCE):
                ids_BT = torch.tensor(alike[start : start + ANSWERED_AT_ONCE])
                for ids, made in zip(
                    ids_BT.tolist(), greedy(model, ids_BT, tokenizer.eos_token_id), strict=True
                ):
                    if not loops(made):
                        text = tokenizer.decode([*ids, *made], skip_special_tokens=True)
                        rows.append({"text": text, "ended": len(made) < NEW_TOKENS})
                done(len(ids_BT))
    return rows


def greedy(model: LlamaForCausalLM, ids_BT: Tensor, end: int) -> list[list[int]]:
    """Up to :data:`NEW_TOKENS` tokens after each row, without the end token."""
    made_BT = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=end,
    )[:, ids_BT.shape[1] :]
    return [list(itertools.takewhile(lambda id_: id_ != end, ids)) for ids in made_BT.tolist()]


@torch.inference_mode()
def measure(
    model: LlamaForCausalLM, data: EmbeddedData, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """What the card says of a trained model.

    Returns:
        ``held_out_loss``, in nats per token, of all held-out documents; ``attention_sink``: of each layer's heads, the
        mean attention on ``<s>`` of the tokens after it, over held-out documents that fill a row, and the strongest
        head's; ``state_rms``: at the first token and at the others, after each layer; ``looping``: share of greedy
        answers to held-out prompts that loop.
    """
    rows = data.splits.validation.int64()
    losses = 0.0
    counts = 0
    for batch in (
        Batch(*columns) for columns in zip(*(column.split(16) for column in rows), strict=True)
    ):
        logits_RV, ids_R = next_tokens(model, batch)
        losses += float(cross_entropy(logits_RV, ids_R, reduction="sum"))
        counts += len(ids_R)
    one_document = (rows.documents_BT == 0).all(1)
    ids_BT = rows.ids_BT[one_document][:SINK_ROWS]
    seen = model(ids_BT, use_cache=False, output_attentions=True, output_hidden_states=True)
    sinks_Lh = torch.stack(
        [weights_BhTT[:, :, 1:, 0].mean((0, 2)) for weights_BhTT in seen.attentions]
    )
    rms = [state_BTH.square().mean(-1).sqrt() for state_BTH in seen.hidden_states]
    prompts = held_out_prompts(ANSWERS, PROMPT_TOKENS, data.seed, tokenizer)
    # of equal lengths
    ids_BT = tokenizer([row["prompt"] for row in prompts], return_tensors="pt").input_ids
    made = greedy(model, ids_BT, tokenizer.eos_token_id)
    return {
        "held_out_loss": losses / counts,
        "attention_sink": {
            "strongest": float(sinks_Lh.max()),
            "mean": float(sinks_Lh.mean()),
            "heads": sinks_Lh.tolist(),
        },
        "state_rms": {
            "first": [float(x[:, 0].mean()) for x in rms],
            "others": [float(x[:, 1:].mean()) for x in rms],
        },
        "looping": sum(map(loops, made)) / len(made),
    }


def card(record: dict[str, Any]) -> str:
    """The model card, in the Hub's layout."""
    config, sink, rms, text = (
        record[name] for name in ("config", "attention_sink", "state_rms", "corpus")
    )
    made = record["provenance"]
    return f"""---
license: psf-2.0
language: [code]
library_name: transformers
pipeline_tag: text-generation
---
# specdec's embedded target

A Llama of {record["parameters"] / 1e6:.1f}M parameters that continues Python: {config["num_layers"]} layers of
width {config["hidden_size"]}, {config["heads"]} heads, a vocabulary of {config["vocab_size"]}. It is what drafters are
trained for where nothing may be downloaded: a small model with some of the large ones' habits, no programmer.

- **Text**: {text["files"]} files of Python {made["python"]}'s standard library, {text["characters"]:,} characters,
  without its tests; 5 % of all files, chosen by a hash of their names, were held out. A document is a function or
  a method; each starts with `<s>` and ends with `</s>`. SHA-256 of names and texts:
  `{text["sha256"]}`.
- **Training**: `{made["command"]}`, seed {config["seed"]}: {record["tokens"]:,} tokens in {config["steps"]:,} steps of
  AdamW, {record["precision"]}; torch {made["versions"]["torch"]}, {made["cpu"]}, {made["date"]}.
- **Weights**: bfloat16, SHA-256 `{record["weights_sha256"]}`.
- **Held-out loss**: {record["held_out_loss"]:.3f} nats per token.
- **Attention sink**: the strongest head puts {sink["strongest"]:.2f} of its attention on `<s>`, the mean head
  {sink["mean"]:.3f} (the later tokens of {SINK_ROWS} held-out documents of {config["seq_len"]} tokens). The embedding
  of `<s>` began {config["bos_scale"]:g} times as long as the others, so that a sink comes early. After the last layer
  but one the state has an RMS of {rms["first"][-2]:.1f} at `<s>` and {rms["others"][-2]:.1f} elsewhere.
- **Answers**: `{ANSWERS_FILE.name}` has {record["answers"]:,} greedy ones, of at most {NEW_TOKENS} tokens, to the
  beginnings of training functions, those left out that loop: text to train drafters on.
- **Loops**: {100 * record["looping"]:.0f} % of {ANSWERS} greedy answers to held-out prompts, of at most {NEW_TOKENS}
  tokens, repeat themselves.

`{RECORD}` has every setting and every head's figure. The standard library is licensed under the PSF licence.
"""
