"""A small chat target from conversations: a stand-in for an instruction-tuned model where none can be had.

Its template is ChatML behind ``<s>``; ``<|im_end|>`` ends a turn. It learns whole conversations, the user's words
included, and answers in the style of its data; it knows nothing.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from specdec.data.conversations import Conversation, read_conversations, tell_left_out
from specdec.data.split import split
from specdec.embedded.build import save_target
from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.pretrain import pretrain
from specdec.embedded.rows import stream_rows
from specdec.embedded.tokenizer import train_tokenizer

log = logging.getLogger(__name__)

BEGIN, END = "<|im_start|>", "<|im_end|>"
TURN = "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
CHATML = (
    "{{ bos_token }}{% for message in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELD_OUT = 0.05


def chat_tokenizer(texts: Sequence[str], config: EmbeddedConfig) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``config.vocab_size`` tokens, the two of ChatML among them, with the template.

    Raises:
        ValueError: the texts are too short for so many tokens.
    """
    tokenizer = train_tokenizer(texts, config.vocab_size - 2, config.max_position_embeddings)
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN, END]})
    tokenizer.split_special_tokens = False  # the template writes them as text
    tokenizer.chat_template = CHATML
    return tokenizer


def build_chat_target(
    files: Sequence[str], config: EmbeddedConfig, path: Path, left_out: list[str] | None = None
) -> None:
    """Train a chat target on conversations in any layout that ``ChatData`` reads, into the existing directory ``path``.

    Args:
        left_out: takes what is wrong with each broken row, which is left out then; None stops at the first.

    Raises:
        ValueError: a file or a row is wrong, or there is too little text for the vocabulary or for a row.
    """
    started, started_cpu = time.monotonic(), time.process_time()
    train, held_out = split(read_conversations(files, left_out=left_out), HELD_OUT, config.seed)
    tell_left_out(left_out or ())
    tokenizer = chat_tokenizer([message.get("content") or "" for one in train for message in one.messages], config)
    texts, held_out_texts = (_rendered(tokenizer, part) for part in (train, held_out))
    train_RT, held_out_RT = (stream_rows(tokenizer, part, config.seq_len) for part in (texts, held_out_texts))
    log.info("pretraining on %d conversations, %d are held out", len(train), len(held_out))
    trained = pretrain(config, tokenizer, train_RT, held_out_RT)
    trained.model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    more = {
        "data": list(files),
        "conversations": {"train": len(train), "held_out": len(held_out), "left_out": len(left_out or ())},
        "text_sha256": hashlib.sha256("\n".join([*texts, *held_out_texts]).encode()).hexdigest(),
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - started_cpu,
    }
    save_target(path, config, tokenizer, trained, more)


def _rendered(tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Conversation]) -> list[str]:
    """As the template writes them, without the ``<s>`` that every row begins with."""
    texts = [tokenizer.apply_chat_template(one.messages, tokenize=False) for one in conversations]
    return [text.removeprefix(str(tokenizer.bos_token)) for text in texts]
