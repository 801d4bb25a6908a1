"""Conditions that acceptance is measured under: other templates, prompts, contexts, temperatures, and noise.

What a condition does to the text, target and drafter both see; noise is on the drafter's input alone. A condition has a
name, one of :data:`CONDITIONS`, and at most one parameter; :meth:`Condition.conversation` says what each does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from specdec.data.rows import read_text
from specdec.decoding import Sampling
from specdec.diagnostics.disturbances import (
    EMBEDDING,
    FAMILIES,
    HIDDEN,
    LANGUAGES,
    SYSTEM_PROMPTS,
    NoisyDrafter,
    OtherTokenizer,
)
from specdec.drafter import Drafter
from specdec.embedded.build import EmbeddedConfig
from specdec.embedded.corpus import corpus
from specdec.evaluation.prompts import Prompt, PromptConversation, Skipped, next_ids
from specdec.target import Target


class CleanRun:
    """The undisturbed run, that every condition changes one thing of.

    Args:
        max_new_tokens: of every answer.
        nodes: of the largest draft tree, the root included.
        system: of all conversations.
        thinking: the chat template's ``enable_thinking``; None leaves it to the template.
        filler: a file whose text contexts are filled with; by default the standard library's sources that the embedded
            target did not train on.

    Raises:
        ValueError: the file cannot be read.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        nodes: int,
        *,
        system: str | None = None,
        thinking: bool | None = None,
        filler: str | None = None,
    ) -> None:
        self.target, self.prompts, self.max_new_tokens, self.nodes = target, prompts, max_new_tokens, nodes
        self.usual = {"tokenizer": target.tokenizer, "system": system, "thinking": thinking}
        self._filler = None if filler is None else [read_text(Path(filler))]
        self._encoded = lru_cache(maxsize=4)(self._encode)

    def first_ids(self, conversation: PromptConversation) -> list[int] | Skipped | None:
        """What the target is asked first, or why that cannot be decoded."""
        return next_ids(conversation, self.target, self.max_new_tokens, self.nodes)

    @cached_property
    def asked(self) -> dict[str, list[int] | Skipped | None]:
        """What the target is asked first, by the prompt's id, or why it cannot be."""
        return {one.prompt_id: self.first_ids(PromptConversation(one, **self.usual)) for one in self.prompts}

    @cached_property
    def documents(self) -> Sequence[str]:
        """Texts to fill contexts with."""
        return self._filler or [source.text for source in corpus(EmbeddedConfig().seed).held_out]

    def filler(self, tokens: int, without: str) -> str:
        """The first ``tokens`` tokens of the documents that do not hold a text.

        Raises:
            ValueError: they have fewer.
        """
        whole = "\n\n".join(text for text in self.documents if without not in text)
        for some in (whole[: 16 * tokens], whole):  # more text than so many tokens take, as a rule
            if len(ids := self._encoded(some)) >= tokens:
                text = self.target.tokenizer.decode(ids[:tokens], skip_special_tokens=False)
                return str(text).rstrip("\ufffd")
        raise ValueError(f"the filler has {len(ids)} tokens beside the prompt's own text, fewer than {tokens}")

    def _encode(self, text: str) -> list[int]:
        return list(self.target.tokenizer.encode(text, add_special_tokens=False, verbose=False))


class ConditionKind(NamedTuple):
    """What conditions of a name have in common."""

    group: str
    """Under which they stand in figures."""
    label: str
    """What tables call them."""
    parameter: str = ""
    values: tuple[Any, ...] = (None,)
    """Those that are measured where none is named; all that there are, unless it is a number."""
    number: type[int] | type[float] | None = None
    least: float = 0
    """Of a number."""


NOISE = "noise on the drafter's input"
CONDITIONS = {
    "no_bos": ConditionKind("template", "no BOS"),
    "no_template": ConditionKind("template", "no template"),
    "bare": ConditionKind("template", "no template, no BOS"),
    "template": ConditionKind("template", "template of {value}", "family", tuple(FAMILIES)),
    "no_system": ConditionKind("system prompt", "no system prompt"),
    "system": ConditionKind("system prompt", "system prompt: {value}", "text", tuple(SYSTEM_PROMPTS)),
    "language": ConditionKind("language", "instruction in {value}", "code", tuple(LANGUAGES)),
    "thinking": ConditionKind("thinking", "enable_thinking={value}", "on", (True, False)),
    "context": ConditionKind(
        "context", "{value:,} tokens of context", "tokens", (512, 1024, 2048, 4096, 8192, 16384), int, 1
    ),
    "temperature": ConditionKind("temperature", "temperature {value:g}", "value", (0.6, 1.0), float, 0.01),
    "noise_hidden": ConditionKind(NOISE, "hidden + {value:g} RMS", "alpha", (0.1, 0.5, 1.0), float),
    "noise_embedding": ConditionKind(NOISE, "embedding + {value:g} RMS", "alpha", (0.1, 0.5, 1.0), float),
}
"""By their names on the command line, in the order of tables and figures."""


@dataclass(frozen=True)
class Condition:
    """One thing that is other than in the clean run.

    Args:
        kind: one of :data:`CONDITIONS`, or ``clean``.
        value: of the parameter, where there is one.

    Raises:
        ValueError: the value is out of its range.
    """

    kind: str = "clean"
    value: Any = None

    def __post_init__(self) -> None:
        if self.of.number and not self.of.least <= self.value < float("inf"):
            raise ValueError(f"{self.kind}: {self.of.parameter} must be at least {self.of.least:g}, not {self.value}")

    @property
    def of(self) -> ConditionKind:
        """What it has in common with others of its name."""
        return CONDITIONS.get(self.kind, ConditionKind("clean", "clean"))

    @property
    def name(self) -> str:
        """As on the command line: ``context:tokens=512``."""
        return f"{self.kind}:{self.of.parameter}={_spelled(self.value)}" if self.of.parameter else self.kind

    @property
    def title(self) -> str:
        """For tables and figures."""
        return self.of.label.format(value=self.value)

    @property
    def rewrites(self) -> bool:
        """Whether it changes what is asked: a prompt left as it was is not counted then."""
        return self.of.group not in ("clean", "temperature", NOISE)

    def conversation(self, prompt: Prompt, clean: CleanRun) -> PromptConversation:
        """What the target is asked; ValueError where this prompt cannot be asked so."""
        raw, how, tokenizer = prompt.text is not None, dict(clean.usual), clean.target.tokenizer
        match self.kind:
            case "no_bos":  # https://arxiv.org/abs/2605.09992
                how["tokenizer"] = OtherTokenizer(tokenizer, bos=False)
            case "no_template" | "bare" if not raw:  # the messages' contents alone
                bos = self.kind == "no_template"
                how |= {"tokenizer": OtherTokenizer(tokenizer, bos=bos, template=""), "thinking": None}
            case "template" if not raw:
                how |= {"tokenizer": OtherTokenizer(tokenizer, template=FAMILIES[self.value]), "thinking": None}
            case "no_system":
                prompt, how["system"] = without_system(prompt), None
            case "system" if raw:  # which has no place for one
                prompt = prompt._replace(text=f"{SYSTEM_PROMPTS[self.value]}\n\n{prompt.text}")
            case "system":
                prompt, how["system"] = without_system(prompt), SYSTEM_PROMPTS[self.value]
            case "language":
                prompt = with_first_words(prompt, f"{LANGUAGES[self.value]}\n\n{first_words(prompt)}")
            case "thinking" if not raw:
                how["thinking"] = self.value
            case "context":  # of text that does not hold the prompt
                words = first_words(prompt)
                filler = clean.filler(self.value, without=words.strip())
                prompt = with_first_words(prompt, f"{filler}\n\n{words}")
        return PromptConversation(prompt, **how)

    def sampling(self, sampling: Sampling) -> Sampling:
        """How tokens are drawn; drafts stay the drafter's most likely."""
        return replace(sampling, temperature=self.value) if self.kind == "temperature" else sampling

    def drafter(self, drafter: Drafter, seed: int) -> Drafter:
        """Who drafts."""
        streams = {"noise_hidden": HIDDEN, "noise_embedding": EMBEDDING}
        return NoisyDrafter(drafter, self.value, seed, streams[self.kind]) if self.kind in streams else drafter


def parse_conditions(texts: Sequence[str]) -> list[Condition]:
    """Conditions by name: ``no_bos``, ``noise_hidden:alpha=0.5``, ``context:tokens=4096``, ``system:text=long``.

    A name without its parameter stands for the usual ones; no name at all for all there are. A condition that is named
    twice is measured once.

    Raises:
        ValueError: an unknown condition or parameter, or a value that it cannot have.
    """
    return list(dict.fromkeys(one for text in texts or CONDITIONS for one in _parse(text)))


def _parse(text: str) -> list[Condition]:
    name, colon, given = text.partition(":")
    if name not in CONDITIONS:
        every = ", ".join(CONDITIONS)
        raise ValueError(f"condition {text!r}: expected one of {every}, with parameters as noise_hidden:alpha=0.5")
    of = CONDITIONS[name]
    if not colon:
        return [Condition(name, value) for value in of.values]
    key, _, word = given.partition("=")
    known = {_spelled(one): one for one in of.values}
    try:
        value = of.number(word) if of.number else known[word]
    except (KeyError, ValueError):
        value = None
    if value is None or key != of.parameter:
        form = f"{of.parameter}={'NUMBER' if of.number else '|'.join(known)}"
        raise ValueError(f"condition {text!r}: expected {form if of.parameter else 'no parameter'}, not {given!r}")
    return [Condition(name, value)]


def _spelled(value: object) -> str:
    """As on the command line; all digits of a number, since results are found again by the name."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value).lower()


def without_system(prompt: Prompt) -> Prompt:
    """The same prompt without its own system messages; what a template adds by itself stays."""
    own = [one for one in prompt.messages or [] if one["role"] not in ("system", "developer")]
    return prompt if prompt.messages is None else prompt._replace(messages=own)


def first_words(prompt: Prompt) -> str:
    """What the user says first, or the raw text."""
    if prompt.text is not None:
        return prompt.text
    if prompt.turns is not None:
        return prompt.turns[0]
    return next((message["content"] for message in prompt.messages or [] if message["role"] == "user"), "")


def with_first_words(prompt: Prompt, text: str) -> Prompt:
    """The same prompt with other words of what :func:`first_words` gives."""
    if prompt.text is not None:
        return prompt._replace(text=text)
    if prompt.turns is not None:
        return prompt._replace(turns=[text, *prompt.turns[1:]])
    messages = [dict(message) for message in prompt.messages or []]
    for message in [one for one in messages if one["role"] == "user"][:1]:
        message["content"] = text
    return prompt._replace(messages=messages)
