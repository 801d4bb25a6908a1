"""Tiny tokenizers and chat templates, made on the spot."""

import json
import tempfile
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specdec.data import Document
from specdec.data.chat import encode
from specdec.data.layouts import ChatConversation
from specdec.data.token_cache import TOKENS
from specdec.data.tokens import Encoded, TokenFiles, write_tokens

SPECIAL = [
    "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TAGGED_CONTENT_ONLY = CHATML_TAGGED.replace(
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{%- generation -%}{{ m['content'] }}{%- endgeneration -%}{{ '<|im_end|>' }}",
)
LLAMA3 = (
    "{{ '<|bos|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
    + CHATML
)
DROPS_THINKING = (  # every answer but the last loses what stands before </think>
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHUFFLES = (  # answers but the last stand in the next question, cut
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>user\\n' }}"
    "{% for n in messages[:loop.index0] %}{{ n['content'][1:] }}{% endfor %}{{ m['content'] + '<|im_end|>' }}"
    "{% elif loop.last %}{{ '<|im_start|>assistant\\n' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
NO_END_OF_TURN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must\\nalternate') }}{% endif %}{% endfor %}" + CHATML
)

CORPUS = [
    "the sky is blue and the grass is green",
    "two plus two is four, and three plus three is six",
    "system user assistant hello there\n\n\n\n what is it?\n\nfine\n",
] * 4

TWO_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "what is two plus two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and the sky, is it green?"},
    {"role": "assistant", "content": "the sky is blue\n"},
]


@cache
def _backend(trim_offsets: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [word for line in CORPUS for word in line.split(" ")] + ["\n\n"] * 50, trainer
    )
    return tokenizer.to_str()


def tiny_tokenizer(
    chat_template: str | None = None, trim_offsets: bool = False, eos: bool = True
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in which two line ends merge into one token."""
    backend = Tokenizer.from_str(_backend(trim_offsets))
    extra = {"eos_token": "<|eos|>"} if eos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", **extra)
    tokenizer.chat_template = chat_template
    return tokenizer


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def supervised_texts(document: Document, tokenizer: Any) -> list[str]:
    """The supervised runs of a document, decoded: what to look at before trusting a mask."""
    mask = [False, *document.loss_mask_T.tolist(), False]
    edges = [i for i, (left, right) in enumerate(pairwise(mask)) if left != right]
    return [
        tokenizer.decode(document.ids_T[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def encoded(conversations: Iterable[ChatConversation], tokenizer: Any, max_length: int) -> Encoded:
    """Conversations as ChatData has them: in a file, which is mapped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / TOKENS
        write_tokens(encode(conversations, tokenizer, max_length), path)
        return TokenFiles([path], "").all()
