"""What others do without a drafter of ours, decoded in the same run: our eager plain decoding, and transformers'."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specdec.decoding import Generation, PlainDecoder, Request, Sampling, check_length
from specdec.target import Target


class Baseline(NamedTuple):
    """A way to decode that is no drafter of ours."""

    name: str
    decoder: Callable[[Target, Sampling, int], Any]
    """Of target, sampling and batch makes what decodes so; raises ValueError where it cannot serve the target."""


def parse_baseline(text: str) -> Baseline:
    """``plain_eager``, ``transformers``, ``prompt_lookup``, ``prompt_lookup:tokens=5`` or ``assisted:DIR_OR_HUB_ID``.

    Prompt lookup copies drafts from where the last tokens stood in the text before; an assistant is a smaller model
    with the target's tokenizer.

    Raises:
        ValueError: it is none of these.
    """
    if text == "plain_eager":
        return Baseline("plain, eager", lambda target, sampling, batch: PlainDecoder(target, sampling, batch=batch))
    kind, _, rest = text.partition(":")
    tokens = rest.removeprefix("tokens=") if rest else "3"
    name, how = "", {}
    if text == "transformers":
        name = "transformers"
    elif kind == "prompt_lookup" and rest in ("", f"tokens={tokens}") and tokens.isdecimal() and int(tokens):
        name, how = f"transformers, prompt lookup of {tokens}", {"prompt_lookup_num_tokens": int(tokens)}
    elif kind == "assisted" and rest:
        name = f"transformers, assisted by {rest}"
    if not name:
        known = "plain_eager, transformers, prompt_lookup, prompt_lookup:tokens=5 or assisted:DIR"
        raise ValueError(f"baseline {text!r}: expected {known}")

    def decoder(target: Target, sampling: Sampling, batch: int) -> TransformersDecoder:
        more = {"assistant_model": _assistant(rest, target)} if kind == "assisted" else how
        return TransformersDecoder(target, sampling, **more)

    return Baseline(f"{name}, one at a time", decoder)


def _assistant(source: str, target: Target) -> Any:
    assistant = Target.load(source, dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))
    if assistant.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ValueError(f"baseline assisted: {source} has another tokenizer than the target")
    return assistant.model


class TransformersDecoder:
    """``generate`` of Hugging Face transformers, with its dynamic cache; one prompt at a time."""

    def __init__(self, target: Target, sampling: Sampling, **how: Any) -> None:
        self.target, self.how = target, {**how, "repetition_penalty": sampling.repetition_penalty, "do_sample": False}
        if sampling.temperature > 0:
            names = ("temperature", "top_p", "top_k", "min_p")
            self.how |= {"do_sample": True, **{name: getattr(sampling, name) for name in names}}

    def generate_all(self, requests: Sequence[Request], end: Collection[int]) -> Iterator[tuple[int, Generation]]:
        """Generate after every prompt, in order."""
        for number, request in enumerate(requests):
            check_length(self.target, request.prompt, request.max_new_tokens)
            begin = time.perf_counter()
            ids_1T = torch.tensor([request.prompt], device=self.target.device)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(request.seed)
                out_1T = self.target.model.generate(
                    input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=request.max_new_tokens,
                    eos_token_id=sorted(end) or None, pad_token_id=0, **self.how,
                )  # fmt: skip
            ids = out_1T[0, len(request.prompt) :].tolist()
            yield number, Generation(ids, (), time.perf_counter() - begin)
