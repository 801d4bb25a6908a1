# ruff: noqa: RUF001  DeepSeek's tokens have fullwidth bars
"""TRL's chat templates and a small tokenizer for each, with the special tokens that the model's own tokenizer has."""

import importlib.metadata
import importlib.resources
import re
from functools import cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from tests.data.tiny import tiny_tokenizer

TWIN = "_training"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
SPECIAL = re.compile(r"<\|[^<>|\s]{1,30}\|?>|<[a-z_]+\|>|<｜[^<>｜]+｜>")
PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")


class Family(NamedTuple):
    """What the templates of a family leave to their tokenizer, and the tokens at which its models stop."""

    bos: str | None
    eos: str
    stops: tuple[str, ...] = ()  # of the generation config, beside eos
    special: tuple[str, ...] = ()  # tokens without the usual brackets
    ordinary: tuple[str, ...] = ()  # added tokens that the tokenizer does not call special


FAMILIES = {  # by the beginning of a template's name; the longest one counts
    "cohere": Family("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": Family(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ordinary=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁"),
    ),
    "diffusion_gemma": Family("<bos>", "<eos>", ("<turn|>", "<|tool_response>")),
    "gemma": Family("<bos>", "<eos>", ("<end_of_turn>",), ("<start_of_turn>", "<start_of_image>")),
    "gemma4": Family("<bos>", "<eos>", ("<turn|>", "<|tool_response>")),
    "glm": Family(None, "<|endoftext|>", ("<|user|>", "<|observation|>"), ("[gMASK]", "<sop>")),
    "gptoss": Family("<|startoftext|>", "<|return|>", ("<|call|>", "<|endoftext|>")),
    "idefics3": Family(
        "<|begin_of_text|>", "<|end_of_text|>", ("<end_of_utterance>",), ("<image>",)
    ),
    "lfm2": Family("<|startoftext|>", "<|im_end|>", special=("<image>",)),
    "llama": Family("<|begin_of_text|>", "<|eot_id|>", ("<|eom_id|>", "<|end_of_text|>")),
    "llava": Family("<s>", "</s>", special=("<image>",)),
    "muse": Family("<|begin_of_text|>", "<|eot|>"),
    "nemotron": Family("<s>", "<|im_end|>"),
    "phi3": Family("<s>", "<|endoftext|>", ("<|end|>",)),
    "qwen": Family(None, "<|im_end|>", ("<|endoftext|>",)),
    "smolvlm": Family("<|im_start|>", "<end_of_utterance>", special=("<image>",)),
}


@cache
def sources() -> dict[str, str]:
    """The text of every template in TRL's package, by its name."""
    folder = importlib.resources.files("trl") / "chat_templates"
    files = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".jinja")),
        key=lambda file: file.name,
    )
    return {file.name.removesuffix(".jinja"): file.read_text(encoding="utf-8") for file in files}


def templates() -> list[str]:
    """The names of the models' own templates."""
    return [name for name in sources() if not name.endswith(TWIN)]


def twin_of(name: str) -> str | None:
    """The text of the template's twin; the template itself where it has tags; None without either."""
    own = sources()[name]
    return own if GENERATION_TAG.search(own) else sources().get(name + TWIN)


def family_of(name: str) -> Family:
    """The family of a template."""
    return FAMILIES[max((start for start in FAMILIES if name.startswith(start)), key=len)]


def stops_of(name: str) -> tuple[str, ...]:
    """The tokens at which the models of a template stop."""
    family = family_of(name)
    return (family.eos, *family.stops)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with a template and all the tokens that it and its twin write."""
    family = family_of(name)
    text = sources()[name] + (twin_of(name) or "")
    tokens = {
        *SPECIAL.findall(text),
        *family.special,
        *family.stops,
        family.eos,
        family.bos or family.eos,
    }
    ordinary = {token for token in tokens if token.startswith(family.ordinary or ("\0",))}
    tokenizer = tiny_tokenizer(sources()[name])
    tokenizer.add_tokens(sorted(tokens - ordinary), special_tokens=True)
    tokenizer.add_tokens(sorted(ordinary | set(PLAIN.findall(text))))
    tokenizer.bos_token = family.bos
    tokenizer.eos_token = family.eos
    return tokenizer


def versions() -> dict[str, str]:
    """The versions that the table depends on."""
    return {name: importlib.metadata.version(name) for name in ("trl", "transformers")}


def variables(tokenizer: Any) -> dict[str, str]:
    """The special tokens that a template may read."""
    return dict(tokenizer.special_tokens_map)
