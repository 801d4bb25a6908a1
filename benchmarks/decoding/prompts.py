"""The prompts: held-out text as it comes, a block of lines repeated, and text that goes on without repeating itself."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.decoding import PlainDecoder
from specdec.decoding.decoder import Request
from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.data import held_out_prompts
from specdec.target import Target

LENGTH = 128  # tokens of a prompt
POOL = 4  # times as many prompts as the varied set holds are decoded to choose it
BLOCK = (24, 48)  # tokens of a repeated block: at least, and at most
GRAM = 4
BATCH = 8


class PromptSet(NamedTuple):
    """Prompts of one kind."""

    name: str
    what: str
    names: list[str]
    prompts: list[list[int]]


class Prompts(NamedTuple):
    """All of them."""

    warm_up: list[int]  # of no set
    sets: list[PromptSet]

    @property
    def longest(self) -> int:
        """Tokens."""
        return max(len(prompt) for each in self.sets for prompt in each.prompts)


def repetition(prompt: Sequence[int], ids: Sequence[int]) -> float:
    """The share of the new tokens that end a 4-gram which stands earlier in the text, prompt included."""
    text, seen, repeated = [*prompt, *ids], set(), 0
    for end in range(GRAM, len(text) + 1):
        gram = tuple(text[end - GRAM : end])
        repeated += end > len(prompt) and gram in seen
        seen.add(gram)
    return repeated / len(ids)


def read(file: Path) -> Prompts:
    """A JSON object of sets: name to lists of token ids. The first prompt of all warms up.

    Raises:
        ValueError: the file is no such thing.
    """
    try:
        found = json.loads(file.read_text())
        sets = [
            PromptSet(str(name), f"read from {file.name}", [str(n) for n in range(len(prompts))], prompts)
            for name, prompts in found.items()
        ]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"--prompts {file}: not a JSON object of lists of token ids: {error}") from error
    if (
        not all(each.prompts and all(isinstance(ids, list) and ids for ids in each.prompts) for each in sets)
        or not sets
    ):
        raise ValueError(f"--prompts {file}: every set wants at least one prompt of at least one token id")
    return Prompts(sets[0].prompts[0], sets)


def held_out(target: Target, count: int, tokens: int) -> Prompts:
    """The three sets, ``count`` prompts each, of text that the embedded target was not trained on.

    Args:
        target: in float32; it decodes plainly what the varied set is chosen from.
        tokens: new tokens, as they will be measured.
    """
    tokenizer = target.tokenizer
    rows = held_out_prompts((1 + POOL) * count + 1, LENGTH, EmbeddedConfig().seed, tokenizer)
    ids = [tokenizer.encode(row["prompt"]) for row in rows]
    names = [str(row["prompt_id"]) for row in rows]
    pool = range(count, (1 + POOL) * count)
    shares = dict(zip(pool, _repetitions(target, [ids[k] for k in pool], tokens), strict=True))
    varied = sorted(sorted(pool, key=lambda k: shares[k])[:count])
    texts = f"the first {LENGTH} tokens of a file, function or class of the standard library held out of the training"
    block = f"`<s>` and the first lines of the same prompt, {BLOCK[0]} to {BLOCK[1]} tokens, over and over"
    chosen = (
        f"of {POOL * count} further prompts of that kind those whose plain greedy text in float32 repeats itself least"
    )
    return Prompts(
        ids[-1],
        [
            PromptSet("held-out", texts, names[:count], ids[:count]),
            PromptSet("repeated", block, names[:count], [repeated(row["prompt"], tokenizer) for row in rows[:count]]),
            PromptSet("varied", chosen, [names[k] for k in varied], [ids[k] for k in varied]),
        ],
    )


def repeated(text: str, tokenizer: Any) -> list[int]:
    """The text's first lines over and over, as many tokens as a prompt has."""
    block: list[int] = []
    for line in text.splitlines(keepends=True):
        block += tokenizer.encode(line, add_special_tokens=False)
        if len(block) >= BLOCK[0]:
            break
    block = block[: BLOCK[1]]
    ids = [tokenizer.bos_token_id]
    while len(ids) < LENGTH:
        ids += block
    return ids[:LENGTH]


def _repetitions(target: Target, prompts: list[list[int]], tokens: int) -> list[float]:
    decoder, out = PlainDecoder(target, batch=min(BATCH, len(prompts))), [0.0] * len(prompts)
    with torch.inference_mode():
        for number, made in decoder.generate_all([Request(prompt, tokens) for prompt in prompts]):
            out[number] = repetition(prompts[number], made.ids)
    return out
