"""Conditions that acceptance is measured under: other templates, prompts, contexts, temperatures, and noise.

What a condition does to the text, target and drafter both see; noise is on the drafter's input alone. A condition has a
name, one of :data:`CONDITIONS`, and at most one parameter. Its texts stand in ``disturbances.yaml``.

Legend: B sequences, T nodes, H hidden.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from specdec.data.template import template_of
from specdec.decoding import Sampling
from specdec.decoding.sampling import uniform
from specdec.drafter import Drafter
from specdec.drafter.entry import InjectionEntry
from specdec.drafting import Step
from specdec.embedded.corpus import SEED, corpus
from specdec.evaluation.prompts import Prompt, PromptConversation, Skipped, next_ids
from specdec.nn.view import View
from specdec.target import Target
from specdec.utils.text import how_many

SYSTEM_PROMPTS, LANGUAGES, FAMILIES = yaml.safe_load(
    Path(__file__).with_name("disturbances.yaml").read_text(encoding="utf-8")
).values()
CONTENTS = "{% for message in messages %}{{ message.content }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
FILLER_CHARACTERS = 32  # of text for every token of filler, more than any tokenizer leaves over


@dataclass
class CleanRun:
    """The undisturbed run, that every condition changes one thing of; ``nodes`` of the largest tree, root included."""

    target: Target
    prompts: Sequence[Prompt]
    max_new_tokens: int
    nodes: int

    def first_ids(self, conversation: PromptConversation) -> list[int] | Skipped | None:
        """Return the token ids of the first turn, or the reason why it cannot be decoded."""
        return next_ids(conversation, self.target, self.max_new_tokens, self.nodes)

    @cached_property
    def asked(self) -> dict[str, list[int] | Skipped | None]:
        """The token ids of the first turn by the prompt's id, or the reason why it cannot be decoded."""
        tokenizer = self.target.tokenizer
        return {
            prompt.prompt_id: self.first_ids(PromptConversation(prompt, tokenizer))
            for prompt in self.prompts
        }

    @cached_property
    def documents(self) -> Sequence[str]:
        """Texts to fill contexts with: the standard library's sources that the embedded target did not train on."""
        return [source.text for source in corpus(SEED).held_out]

    def filler(self, tokens: int, without: str) -> str:
        """The first ``tokens`` tokens of the documents that do not hold a text; ValueError if they have fewer."""
        text = "\n\n".join(text for text in self.documents if without not in text)[
            : FILLER_CHARACTERS * tokens
        ]
        ids = self.target.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if len(ids) < tokens:
            raise ValueError(
                f"the filler has {how_many(len(ids), 'token')} together with the prompt's own text, fewer than {tokens}"
            )
        return str(self.target.tokenizer.decode(ids[:tokens], skip_special_tokens=False)).rstrip(
            "\ufffd"
        )


class WithoutStart:
    """A tokenizer that leaves out the start token wherever a text begins with it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Token ids of a text."""
        ids = list(self.inner.encode(text, **options))
        return ids[1:] if ids and ids[0] == self.inner.bos_token_id else ids


def with_template(tokenizer: Any, template: str) -> Any:
    """The tokenizer with another chat template, in Jinja, behind the start token if its own template writes one."""
    if not tokenizer.chat_template:
        return tokenizer  # whose prompts are raw texts
    other = copy.copy(tokenizer)
    text = template_of(tokenizer).prompt([{"role": "user", "content": "a"}])
    begins = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    other.chat_template = ("{{ bos_token }}" if begins else "") + template
    return other


def _without_system(prompt: Prompt) -> Prompt:
    if prompt.messages is None:
        return prompt
    others = [row for row in prompt.messages if row["role"] not in ("system", "developer")]
    return prompt._replace(messages=others)


def with_first_words(prompt: Prompt, change: Callable[[str], str]) -> Prompt:
    """Return a prompt with other words in the user's first message, or in the raw text."""
    if prompt.text is not None:
        return prompt._replace(text=change(prompt.text))
    if prompt.turns is not None:
        return prompt._replace(turns=[change(prompt.turns[0]), *prompt.turns[1:]])
    messages = [dict(message) for message in prompt.messages or []]
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is not None:
        first["content"] = change(first["content"])
    return prompt._replace(messages=messages)


class ConditionKind(NamedTuple):
    """The properties that conditions of a name have in common."""

    parameter: str = ""
    # measured where none is named; all that there are, unless it is a number
    values: tuple[Any, ...] = (None,)
    number: type[int] | type[float] | None = None
    least: float = 0  # of a number
    of_text: bool = True  # whether it changes what is asked


CONDITIONS = {
    "no_bos": ConditionKind(),
    "no_template": ConditionKind(),
    "template": ConditionKind("family", tuple(FAMILIES)),
    "no_system": ConditionKind(),
    "system": ConditionKind("text", tuple(SYSTEM_PROMPTS)),
    "language": ConditionKind("code", tuple(LANGUAGES)),
    "context": ConditionKind("tokens", (512, 1024, 2048, 4096, 8192, 16384), int, 1),
    "temperature": ConditionKind("value", (0.6, 1.0), float, 0.01, of_text=False),
    "noise_hidden": ConditionKind("alpha", (0.1, 0.5, 1.0), float, of_text=False),
    "noise_embedding": ConditionKind("alpha", (0.1, 0.5, 1.0), float, of_text=False),
}
"""By their names on the command line, in the order of tables and figures."""


@dataclass(frozen=True)
class Condition:
    """One thing that is other than in the clean run; ValueError if its value is out of range."""

    kind: str = "clean"  # else one of CONDITIONS
    value: Any = None  # of the parameter, where there is one

    def __post_init__(self) -> None:
        if self.of.number and not self.of.least <= self.value < float("inf"):
            raise ValueError(
                f"{self.kind}: {self.of.parameter} must be at least {self.of.least:g}, not {self.value}"
            )

    @property
    def of(self) -> ConditionKind:
        """The properties that all conditions of its name have."""
        return CONDITIONS.get(self.kind, ConditionKind(of_text=False))

    @property
    def name(self) -> str:
        """The spelling on the command line: ``context:tokens=512``."""
        return (
            f"{self.kind}:{self.of.parameter}={_spelled(self.value)}"
            if self.of.parameter
            else self.kind
        )

    def conversation(self, prompt: Prompt, clean: CleanRun) -> PromptConversation:
        """Return the conversation that the target answers; ValueError where this prompt cannot be asked so."""
        tokenizer = clean.target.tokenizer
        system = None
        match self.kind:
            case "no_bos":  # https://arxiv.org/abs/2605.09992
                tokenizer = WithoutStart(tokenizer)
            case "no_template":
                tokenizer = with_template(tokenizer, CONTENTS)
            case "template":
                tokenizer = with_template(tokenizer, FAMILIES[self.value])
            case "no_system":  # what a template adds by itself stays
                prompt = _without_system(prompt)
            case "system" if prompt.text is not None:  # raw text has no place for one but in front
                prompt = prompt._replace(text=f"{SYSTEM_PROMPTS[self.value]}\n\n{prompt.text}")
            case "system":
                prompt = _without_system(prompt)
                system = SYSTEM_PROMPTS[self.value]
            case "language":
                prompt = with_first_words(
                    prompt, lambda words: f"{LANGUAGES[self.value]}\n\n{words}"
                )
            case "context":  # unrelated text, that does not hold the prompt's own
                prompt = with_first_words(
                    prompt, lambda words: f"{clean.filler(self.value, words.strip())}\n\n{words}"
                )
        return PromptConversation(prompt, tokenizer, system=system)

    def sampling(self, sampling: Sampling) -> Sampling:
        """How tokens are drawn; drafts stay the drafter's most likely."""
        return replace(sampling, temperature=self.value) if self.kind == "temperature" else sampling

    def drafter(self, drafter: Drafter, seed: int) -> Drafter:
        """Who drafts."""
        streams = {"noise_hidden": HIDDEN, "noise_embedding": EMBEDDING}
        return (
            NoisyDrafter(drafter, self.value, seed, streams[self.kind])
            if self.kind in streams
            else drafter
        )


def parse_conditions(texts: Sequence[str]) -> list[Condition]:
    """Conditions by name: ``no_bos``, ``noise_hidden:alpha=0.5``, ``context:tokens=4096``, ``system:text=long``.

    A name without its parameter stands for the usual ones; no name at all for all there are. ValueError for an unknown
    condition or parameter, or a value that it cannot have.
    """
    conditions = [condition for text in texts or CONDITIONS for condition in _parse(text)]
    return list(dict.fromkeys(conditions))


def _parse(text: str) -> list[Condition]:
    name, colon, parameters = text.partition(":")
    if name not in CONDITIONS:
        every = ", ".join(CONDITIONS)
        raise ValueError(
            f"condition {text!r}: expected one of {every}, with parameters as noise_hidden:alpha=0.5"
        )
    kind = CONDITIONS[name]
    if not colon:
        return [Condition(name, value) for value in kind.values]
    key, _, word = parameters.partition("=")
    known = {_spelled(value): value for value in kind.values}
    value = known.get(word)
    if kind.number:
        with contextlib.suppress(ValueError):
            value = kind.number(word)
    if value is None or key != kind.parameter:
        form = "no parameter"
        if kind.parameter:
            form = f"{kind.parameter}={'NUMBER' if kind.number else '|'.join(known)}"
        raise ValueError(f"condition {text!r}: expected {form}, not {parameters!r}")
    return [Condition(name, value)]


def _spelled(value: object) -> str:
    """Return a value as on the command line, with all digits of a number, as results are found by the name."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value).lower()


# Streams of random numbers apart from decoding's, which has those from DRAFT on.
HIDDEN = 11
EMBEDDING = 12


def gaussian(seed: int, ids_BT: Tensor, place_BT: Tensor, stream: int, width: int) -> Tensor:
    """Return standard normal numbers, float64 (B, T, width), that depend on seed, token and place alone.

    Neither the batch matters nor which pass comes to a place; texts that have the same token at a place share it.
    """
    seeds_N = (ids_BT + (seed << 32)).flatten()
    uniform_N1H = uniform(seeds_N, place_BT.flatten()[:, None], stream, width).double() + 2**-25
    return torch.special.ndtri(uniform_N1H).view(*ids_BT.shape, width)


def blurred(x_BTH: Tensor, alpha: float, z_BTH: Tensor) -> Tensor:
    """Return ``x + alpha rms(x) z`` with each token's own RMS, in the dtype of x (https://arxiv.org/abs/2605.09992)."""
    rms_BT1 = x_BTH.double().square().mean(-1, keepdim=True).sqrt()
    return x_BTH + (alpha * rms_BT1 * z_BTH).to(x_BTH.dtype)


class NoisyDrafter(Drafter):
    """A drafter with all parts and weights of another, whose input is noisy. Inference only.

    With stream HIDDEN noise is on every feature that enters a step, fused or recurrent, before the norm and where the
    residual path starts; with EMBEDDING on every token embedding, before its norm.
    """

    def __init__(self, drafter: Drafter, alpha: float, seed: int, stream: int) -> None:
        nn.Module.__init__(self)
        for name, part in drafter.named_children():
            self.add_module(name, part)
        self.config = drafter.config
        self.alpha = alpha
        self.seed = seed
        self.stream = stream

    def step(self, ids_BT: Tensor, h_BTH: Tensor, view: View) -> Step:
        tokens_BT = ids_BT
        at_BT = view.positions_BT
        # features, which have no token beside them, and then the tokens
        if isinstance(self.entry, InjectionEntry):
            features_BC, at_BT = at_BT.tensor_split([h_BTH.shape[1]], 1)
            if self.stream == HIDDEN:
                tokens_BT = torch.zeros_like(features_BC)
                at_BT = features_BC
        z_BTH = gaussian(self.seed, tokens_BT, at_BT, self.stream, self.config.hidden_size)
        if self.stream == HIDDEN:
            return super().step(ids_BT, blurred(h_BTH, self.alpha, z_BTH), view)
        hook = self.embed_tokens.register_forward_hook(
            lambda _, __, e_BTH: blurred(e_BTH, self.alpha, z_BTH)
        )
        try:
            return super().step(ids_BT, h_BTH, view)
        finally:
            hook.remove()
