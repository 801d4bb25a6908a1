"""Decode prompts plainly, with every draft shape and with every baseline, side by side in one process.

Baselines are what others do without a drafter of ours: transformers' ways.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specdec.decoding import (
    DraftShape,
    Generation,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
    check_length,
)
from specdec.decoding.session import Compilation
from specdec.drafter import Drafter
from specdec.evaluation.metrics import Answer, loops
from specdec.evaluation.prompts import Prompt, PromptConversation, Skipped, check_skipped, next_ids
from specdec.nn.backend import matmul_backend
from specdec.target import Target

WARM_UP_TOKENS = 8
WAVE = 4  # prompts of a wave for each sequence of a batch, so that few places stay empty at its end


def cpu_matmul_backend(target: Target) -> contextlib.AbstractContextManager[object]:
    """Inside, all that runs on a CPU takes one library for products, the same as compiled decoders do."""
    return matmul_backend() if target.device.type == "cpu" else contextlib.nullcontext()


def benchmark(
    target: Target,
    drafter: Drafter,
    shapes: Sequence[DraftShape],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    converse: Callable[[Prompt, Any], PromptConversation] = PromptConversation,
    plain: bool = True,
    baselines: Sequence["Baseline"] = (),
    batch: int = 1,
    compiled: bool = False,
    on_prompt: Callable[[], None] = lambda: None,
    on_decoder: Callable[[str], None] = lambda name: None,
    on_skip: Callable[[Skipped], None] = lambda skipped: None,
) -> list[list[Answer]]:
    """Answers of every draft shape, then of every baseline; those have no passes.

    The decoders take turns on each prompt, or wave of prompts where sequences are decoded side by side, and the first
    moves on, so that a machine that slows down slows them alike. Each decoder runs once, untimed, before the first
    prompt, and compiles untimed. The next turn of a conversation builds on the target's plain answer. Every turn has a
    seed of its own, the same for all decoders. A prompt with a turn that cannot be decoded is left out and logged.

    Args:
        converse: what makes a conversation of a prompt with the target's tokenizer: with a system prompt, say.
        plain: decode plainly too, for speed-up and identity; False saves that time.
        batch: sequences that our decoders take side by side.
        compiled: whether our decoders compile.
        on_prompt: called as each prompt is done or left out.
        on_skip: called for each that is left out.
        on_decoder: called with its name, as each decoder begins on a prompt or a wave.

    Raises:
        ValueError: drafter and target do not match, a baseline cannot serve the target, a prompt is refused by
            ``converse``, or all are left out.
    """
    if not shapes:
        raise ValueError("no draft shape given: name at least one, as chain")
    ours: list[PlainDecoder] = (
        [PlainDecoder(target, sampling, batch=batch, compiled=compiled)] if plain else []
    )
    ours += [
        SpeculativeDecoder(target, drafter, one, sampling, batch=batch, compiled=compiled)
        for one in shapes
    ]
    decoders: list[Any] = [*ours, *(one.decoder(target, sampling) for one in baselines)]
    nodes = max(decoder.nodes for decoder in ours)
    conversations = [converse(prompt, target.tokenizer) for prompt in prompts]
    # the first turns of all before anything is decoded in vain
    turns = [next_ids(one, target, max_new_tokens, nodes) for one in conversations]
    # of each turn, what every decoder made
    made: list[list[list[Generation]]] = [[] for _ in conversations]
    longest = max((len(ids) for ids in turns if isinstance(ids, list)), default=0) + max_new_tokens
    # greedy text, and what a rule that repeats plain decoding draws, can be compared token by token
    same = [not sampling.acceptance.sampled] * len(shapes) + [sampling.temperature == 0] * len(
        baselines
    )
    answers: list[list[Answer]] = [[] for _ in same]
    size = batch * WAVE if batch > 1 else 1
    first = 0  # the decoder that begins; it moves on
    for start in range(0, len(conversations), size):
        wave = range(start, min(start + size, len(conversations)))
        while live := {n: ids for n in wave if isinstance(ids := turns[n], list)}:
            requests = [
                Request(ids, max_new_tokens, sampling.seed + (n << 44) + (len(made[n]) << 32))
                for n, ids in live.items()
            ]
            try:
                with cpu_matmul_backend(target):
                    room = max(longest, *(len(ids) + max_new_tokens for ids in live.values()))
                    compilation = Compilation(sum(decoder.graphs_for(room) for decoder in ours))
                    for decoder in ours:
                        decoder.prepare(room, compilation)
                    if not first:
                        short = [Request(requests[0].prompt, min(WARM_UP_TOKENS, max_new_tokens))]
                        for one in decoders:
                            list(one.generate_all(short, target.eos_token_ids))
                    found: list[dict[int, Generation]] = [{} for _ in decoders]
                    for number in range(first, first + len(decoders)):
                        which = number % len(decoders)
                        on_decoder(decoders[which].name)
                        found[which] = dict(
                            decoders[which].generate_all(requests, target.eos_token_ids)
                        )
            except ValueError as error:
                raise ValueError(
                    f"prompt {', '.join(prompts[n].prompt_id for n in live)}: {error}"
                ) from error
            first += 1
            for number, n in enumerate(live):
                made[n].append([generations[number] for generations in found])
                conversations[n].add_answer(found[0][number].ids)
                turns[n] = next_ids(conversations[n], target, max_new_tokens, nodes)
        for n in wave:
            on_prompt()
            if isinstance(left_out := turns[n], Skipped):
                on_skip(left_out)
                continue
            for generations in made[n]:
                reference, others = (
                    (generations[0], generations[1:]) if plain else (None, generations)
                )
                for out, own, alike in zip(answers, others, same, strict=True):
                    out.append(Answer(
                        prompts[n].prompt_id, prompts[n].category, len(own.ids), own.accepted, own.drafted, own.seconds,
                        plain_seconds=reference.seconds if reference else 0.0,
                        plain_tokens=len(reference.ids) if reference else 0,
                        identical=own.ids == reference.ids if reference and alike else None,
                        draft_ms=own.draft_ms, verify_ms=own.verify_ms, loops=loops(own.ids),
                    ))  # fmt: skip
    check_skipped([one for one in turns if isinstance(one, Skipped)], len(prompts))
    return answers


class TransformersDecoder:
    """``generate`` of Hugging Face transformers, with its dynamic cache; one prompt at a time."""

    def __init__(self, target: Target, sampling: Sampling, **how: Any) -> None:
        self.name = " ".join(["transformers", *how])
        self.target = target
        self.how = {**how, "repetition_penalty": 1.0, "do_sample": False}
        if sampling.temperature > 0:
            names = ("temperature", "top_p", "top_k", "min_p")
            self.how |= {"do_sample": True, **{name: getattr(sampling, name) for name in names}}

    def generate_all(
        self, requests: Sequence[Request], end: Collection[int]
    ) -> Iterator[tuple[int, Generation]]:
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


class Baseline(NamedTuple):
    """A way to decode that is no drafter of ours: transformers' own, plainly or with drafts from elsewhere."""

    name: str
    lookup: bool = False
    """Copy three drafts from where the last tokens stood in the text before."""
    assistant: str = ""
    """Directory or Hub id of a smaller model with the target's tokenizer, which drafts."""

    def decoder(self, target: Target, sampling: Sampling) -> TransformersDecoder:
        """What decodes so; ValueError where it cannot serve the target."""
        if self.lookup:
            return TransformersDecoder(target, sampling, prompt_lookup_num_tokens=3)
        if not self.assistant:
            return TransformersDecoder(target, sampling)
        dtype = str(target.dtype).removeprefix("torch.")
        device = str(target.device)
        smaller = Target.load(self.assistant, dtype=dtype, device=device)
        if smaller.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ValueError(
                f"baseline assisted: {self.assistant} has another tokenizer than the target"
            )
        return TransformersDecoder(target, sampling, assistant_model=smaller.model)


def parse_baseline(text: str) -> Baseline:
    """``transformers``, ``prompt_lookup`` or ``assisted:DIR_OR_HUB_ID``; ValueError if it is none of these."""
    kind, _, assistant = text.partition(":")
    if text == "transformers":
        return Baseline("transformers, one at a time")
    if text == "prompt_lookup":
        return Baseline("transformers, prompt lookup of 3, one at a time", lookup=True)
    if kind == "assisted" and assistant:
        return Baseline(
            f"transformers, assisted by {assistant}, one at a time", assistant=assistant
        )
    raise ValueError(f"baseline {text!r}: expected transformers, prompt_lookup or assisted:DIR")
