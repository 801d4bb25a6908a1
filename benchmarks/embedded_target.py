"""How the embedded target was made: train a small Llama of Python's standard library, measure it, write its answers.

    python -m benchmarks.embedded_target --out runs/embedded_target

The options are those of :class:`specdec.commands.pretraining.PretrainConfig`: with the defaults, and this Python's
library, it is the target that comes with the package, in about an hour on one core. The directory holds the model, its
record ``pretrain.json``, its card and ``answers.jsonl``, the text that drafters are trained on. After an interruption
the same command resumes.
"""

import itertools
import json
import logging
import shutil
import sys
from dataclasses import replace
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.commands.pretraining import PretrainConfig, pretrain
from specdec.embedded import RECORD, EmbeddedData, held_out_prompts
from specdec.embedded.corpus import ANSWERS as ANSWERS_FILE
from specdec.embedded.corpus import CorpusFile, corpus, functions
from specdec.evaluation.metrics import loops
from specdec.utils.files import staged_directory, write_json, write_text
from specdec.utils.progress import progress
from specdec.utils.reading import read_json

CARD = "README.md"
# tokens of a function that an answer goes on from; rows
BEGINNINGS = (12, 20, 32, 48)
ANSWERED_AT_ONCE = 128
# what the card's figures are measured on
SINK_ROWS = 32
ANSWERS = 60
PROMPT_TOKENS = 32
NEW_TOKENS = 96


def make_target(config: PretrainConfig) -> int:
    """Train the model into ``config.out``, with its record, card and answers; return the exit status.

    Raises:
        ValueError: a setting is out of range, Python has no library sources, or the directory holds something else.
    """
    out = config.out
    if (out / CARD).exists():
        return pretrain(config)  # raises ValueError if the model there has other settings
    trained = out.with_name(f"{out.name}.trained")
    if out.exists():
        raise ValueError(f"{out} exists already and is no whole target: choose another --out")
    if status := pretrain(replace(config, out=trained)):
        return status
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = LlamaForCausalLM.from_pretrained(
        trained, dtype=torch.float32, attn_implementation="eager"
    )
    data = EmbeddedData(config.seq_len, config.batch_size, config.seed)
    data.prepare(tokenizer)
    rows = answer_beginnings(model, corpus(config.seed).train, tokenizer)
    record = {**read_json(trained / RECORD), **measure_habits(model, data, tokenizer)}
    record["answers"] = len(rows)
    with staged_directory(out) as staging:
        shutil.copytree(
            trained, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns("SHA256SUMS")
        )
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        write_text(staging / ANSWERS_FILE.name, "".join(f"{line}\n" for line in lines))
        write_json(staging / RECORD, record)
        write_text(staging / CARD, card(record))
    shutil.rmtree(trained)
    return 0


@torch.inference_mode()
def answer_beginnings(
    model: LlamaForCausalLM, files: list[CorpusFile], tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, Any]]:
    """What the model writes, greedily, after the first tokens of functions of these files: text to train drafters on.

    Returns:
        One ``{"text": beginning and answer, "ended": whether the model ended it}`` each; none of an answer that loops.
    """
    texts = [text for file in files for _, text in functions(file.text)]
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
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
                answers = greedy(model, ids_BT, tokenizer.eos_token_id)
                for ids, answer in zip(ids_BT.tolist(), answers, strict=True):
                    if not loops(answer):
                        text = tokenizer.decode([*ids, *answer], skip_special_tokens=True)
                        rows.append({"text": text, "ended": len(answer) < NEW_TOKENS})
                done(len(ids_BT))
    return rows


def greedy(model: LlamaForCausalLM, ids_BT: Tensor, end: int) -> list[list[int]]:
    """Up to :data:`NEW_TOKENS` tokens after each row, without the end token."""
    answers_BT = model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=end,
    )[:, ids_BT.shape[1] :]
    return [list(itertools.takewhile(lambda id_: id_ != end, ids)) for ids in answers_BT.tolist()]


@torch.inference_mode()
def measure_habits(
    model: LlamaForCausalLM, data: EmbeddedData, tokenizer: PreTrainedTokenizerFast
) -> dict[str, Any]:
    """What the card says of a trained model.

    Returns:
        ``attention_sink``: of each layer's heads, the
        mean attention on ``<s>`` of the tokens after it, over held-out documents that fill a row, and the strongest
        head's; ``state_rms``: at the first token and at the others, after each layer; ``looping``: share of greedy
        answers to held-out prompts that loop.
    """
    rows = data.splits.validation.int64()
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
    answers = greedy(model, ids_BT, tokenizer.eos_token_id)
    return {
        "attention_sink": {
            "strongest": float(sinks_Lh.max()),
            "mean": float(sinks_Lh.mean()),
            "heads": sinks_Lh.tolist(),
        },
        "state_rms": {
            "first": [float(x[:, 0].mean()) for x in rms],
            "others": [float(x[:, 1:].mean()) for x in rms],
        },
        "looping": sum(map(loops, answers)) / len(answers),
    }


def card(record: dict[str, Any]) -> str:
    """The model card, in the Hub's layout."""
    config, sink, rms, text = (
        record[name] for name in ("config", "attention_sink", "state_rms", "corpus")
    )
    run = record["provenance"]
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

- **Text**: {text["files"]} files of Python {run["python"]}'s standard library, {text["characters"]:,} characters,
  without its tests; 5 % of all files, chosen by a hash of their names, were held out. A document is a function or
  a method; each starts with `<s>` and ends with `</s>`. SHA-256 of names and texts:
  `{text["sha256"]}`.
- **Training**: `{run["command"]}`, seed {config["seed"]}: {record["tokens"]:,} tokens in {config["steps"]:,} steps of
  AdamW, {record["precision"]}; torch {run["versions"]["torch"]}, {run["cpu"]}, {run["date"]}.
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


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    parser = ArgumentParser(description=__doc__)
    parser.add_class_arguments(PretrainConfig, as_group=False)
    sys.exit(make_target(PretrainConfig(**vars(parser.parse_args()))))
