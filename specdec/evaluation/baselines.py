"""What others do without a drafter of ours, decoded in the same run: transformers' own generation.

``plain`` and ``prompt_lookup`` need nothing else, ``assisted:DIR`` an assistant, a smaller model with the target's
tokenizer.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from specdec.decoding import Generation, PlainDecoder, Request, Sampling, check_length
from specdec.target import Target


@dataclass(frozen=True)
class Baseline:
    """Base: a way to decode that is no drafter of ours."""

    def decoder(self, target: Target, sampling: Sampling, batch: int) -> Any:
        """What decodes so; ``batch`` sequences side by side if it can.

        Raises:
            ValueError: it cannot serve this target.
        """
        raise TypeError(f"{type(self).__name__} must make a decoder")

    @property
    def name(self) -> str:
        """Short name for tables."""
        raise TypeError(f"{type(self).__name__} must have a name")


@dataclass(frozen=True)
class PlainEager(Baseline):
    """Our own plain decoding without compilation."""

    name: ClassVar[str] = "plain, eager"

    def decoder(self, target: Target, sampling: Sampling, batch: int) -> PlainDecoder:
        return PlainDecoder(target, sampling, batch=batch)


class TransformersDecoder:
    """``generate`` of Hugging Face transformers, with its dynamic cache; one prompt at a time."""

    def __init__(self, target: Target, sampling: Sampling, **how: Any) -> None:
        self.target, self.how = target, how
        if sampling.temperature > 0:
            names = ("temperature", "top_p", "top_k", "min_p")
            self.how |= {"do_sample": True, **{name: getattr(sampling, name) for name in names}}
        else:
            self.how |= {"do_sample": False}
        self.how |= {"repetition_penalty": sampling.repetition_penalty}

    def generate_all(self, requests: Sequence[Request], end: Collection[int]) -> Iterator[tuple[int, Generation]]:
        """Generate after every prompt, in order."""
        for number, request in enumerate(requests):
            check_length(self.target, request.prompt, request.max_new_tokens)
            begin = time.perf_counter()
            ids_1T = torch.tensor([request.prompt], device=self.target.device)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(request.seed)
                out_1T = self.target.model.generate(
                    input_ids=ids_1T,
                    attention_mask=torch.ones_like(ids_1T),
                    max_new_tokens=request.max_new_tokens,
                    eos_token_id=sorted(end) or None,
                    pad_token_id=0,
                    **self.how,
                )
            ids = out_1T[0, len(request.prompt) :].tolist()
            yield number, Generation(ids, (), time.perf_counter() - begin)


@dataclass(frozen=True)
class PlainTransformers(Baseline):
    """Plain generation of transformers."""

    name: ClassVar[str] = "transformers, one at a time"

    def decoder(self, target: Target, sampling: Sampling, batch: int) -> TransformersDecoder:
        return TransformersDecoder(target, sampling)


@dataclass(frozen=True)
class PromptLookup(Baseline):
    """Drafts copied from where the last tokens stood in the text before.

    Args:
        tokens: drafts per target pass.
    """

    tokens: int = 3

    @property
    def name(self) -> str:
        return f"transformers, prompt lookup of {self.tokens}, one at a time"

    def decoder(self, target: Target, sampling: Sampling, batch: int) -> TransformersDecoder:
        return TransformersDecoder(target, sampling, prompt_lookup_num_tokens=self.tokens)


@dataclass(frozen=True)
class Assisted(Baseline):
    """Drafts from a smaller model.

    Args:
        source: the assistant, a directory or a Hub id.
    """

    source: str

    @property
    def name(self) -> str:
        return f"transformers, assisted by {self.source}, one at a time"

    def decoder(self, target: Target, sampling: Sampling, batch: int) -> TransformersDecoder:
        dtype = str(target.dtype).removeprefix("torch.")
        assistant = Target.load(self.source, dtype=dtype, device=str(target.device))
        if assistant.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ValueError(f"baseline assisted: {self.source} has another tokenizer than the target")
        return TransformersDecoder(target, sampling, assistant_model=assistant.model)


def parse_baseline(text: str) -> Baseline:
    """``plain_eager``, ``transformers``, ``prompt_lookup``, ``prompt_lookup:tokens=5`` or ``assisted:DIR_OR_HUB_ID``.

    Raises:
        ValueError: it is none of these.
    """
    kind, _, rest = text.partition(":")
    name, _, value = rest.partition("=")
    if kind == "assisted" and rest:
        return Assisted(rest)
    if kind == "prompt_lookup" and (not rest or (name == "tokens" and value.isdecimal() and int(value))):
        return PromptLookup(int(value)) if rest else PromptLookup()
    plain: dict[str, Baseline] = {"plain_eager": PlainEager(), "transformers": PlainTransformers()}
    if text in plain:
        return plain[text]
    raise ValueError(
        f"baseline {text!r}: expected plain_eager, transformers, prompt_lookup, prompt_lookup:tokens=5 or assisted:DIR"
    )
