"""Decode prompts plainly, with every draft shape and with every baseline, side by side in one process.

Baselines are what others do without a drafter of ours: transformers' ways.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
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
Converse = Callable[[Prompt, Any], PromptConversation]
WAVE = 4  # prompts of a wave for each sequence of a batch, so that few places stay empty at its end


def cpu_matmul_backend(target: Target) -> contextlib.AbstractContextManager[object]:
    """Inside, all that runs on a CPU takes one library for products, the same as compiled decoders do."""
    return matmul_backend() if target.device.type == "cpu" else contextlib.nullcontext()


@dataclass
class PromptRun:
    """A prompt as it is decoded, turn by turn.

    Args:
        number: the prompt's place among all, on which its seeds depend.
        next_turn: the ids to decode next; None when nothing is left, or why the prompt cannot be decoded.
        turns: for each turn decoded so far, what every decoder generated.
    """

    prompt: Prompt
    number: int
    conversation: PromptConversation
    next_turn: list[int] | Skipped | None
    turns: list[list[Generation]] = field(default_factory=list)

    def request(self, ids: list[int], max_new_tokens: int, seed: int) -> Request:
        """Return the request of the next turn, with a seed of its own."""
        return Request(ids, max_new_tokens, seed + (self.number << 44) + (len(self.turns) << 32))


class _Decoders:
    """Our decoders, the plain one first, and those of baselines; they take turns at going first.

    Args:
        on_decoder: called with a decoder's name as it begins.
    """

    def __init__(
        self,
        target: Target,
        ours: Sequence[PlainDecoder],
        baselines: Sequence["TransformersDecoder"],
        max_new_tokens: int,
        on_decoder: Callable[[str], None],
    ) -> None:
        self.target = target
        self.ours = ours
        self.all: list[Any] = [*ours, *baselines]
        self.max_new_tokens = max_new_tokens
        self.on_decoder = on_decoder
        self.nodes = max(decoder.nodes for decoder in ours)
        self.longest = 0  # tokens of the longest first turn with its answer
        self.calls = 0

    def next_turn(self, conversation: PromptConversation) -> list[int] | Skipped | None:
        """Return what is to be decoded next of a conversation."""
        return next_ids(conversation, self.target, self.max_new_tokens, self.nodes)

    def start(self, prompts: Sequence[Prompt], converse: Converse) -> list[PromptRun]:
        """Begin all conversations, so that nothing is decoded in vain."""
        conversations = [converse(prompt, self.target.tokenizer) for prompt in prompts]
        first_turns = [self.next_turn(conversation) for conversation in conversations]
        lengths = [len(ids) for ids in first_turns if isinstance(ids, list)]
        self.longest = max(lengths, default=0) + self.max_new_tokens
        numbered = zip(prompts, range(len(prompts)), conversations, first_turns, strict=True)
        return [PromptRun(*parts) for parts in numbered]

    def decode_wave(self, wave: Sequence[PromptRun], seed: int) -> None:
        """Decode all turns of some prompts side by side; ValueError, with their names, if one cannot be."""
        while live := [(run, run.next_turn) for run in wave if isinstance(run.next_turn, list)]:
            requests = [run.request(ids, self.max_new_tokens, seed) for run, ids in live]
            try:
                by_decoder = self._decode(requests)
            except ValueError as error:
                names = ", ".join(run.prompt.prompt_id for run, _ in live)
                raise ValueError(f"prompt {names}: {error}") from error
            for (run, _), generations in zip(live, zip(*by_decoder, strict=True), strict=True):
                run.turns.append([*generations])
                run.conversation.add_answer(generations[0].ids)
                run.next_turn = self.next_turn(run.conversation)

    def _decode(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return, for every decoder, what it generates after each request."""
        end = self.target.eos_token_ids
        by_decoder: list[list[Generation]] = [[] for _ in self.all]
        with cpu_matmul_backend(self.target):
            self._prepare(requests)
            for turn in range(self.calls, self.calls + len(self.all)):
                index = turn % len(self.all)
                self.on_decoder(self.all[index].name)
                generated = dict(self.all[index].generate_all(requests, end))
                by_decoder[index] = [generated[number] for number in range(len(requests))]
        self.calls += 1
        return by_decoder

    def _prepare(self, requests: Sequence[Request]) -> None:
        """Compile for the longest of these requests, and before the first ones let every decoder run, untimed."""
        lengths = [len(request.prompt) + self.max_new_tokens for request in requests]
        room = max(self.longest, *lengths)
        compilation = Compilation(sum(decoder.graphs_for(room) for decoder in self.ours))
        for decoder in self.ours:
            decoder.prepare(room, compilation)
        if self.calls == 0:
            short = Request(requests[0].prompt, min(WARM_UP_TOKENS, self.max_new_tokens))
            for decoder in self.all:
                list(decoder.generate_all([short], self.target.eos_token_ids))


def benchmark(
    target: Target,
    drafter: Drafter,
    shapes: Sequence[DraftShape],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    converse: Converse = PromptConversation,
    plain: bool = True,
    baselines: Sequence["Baseline"] = (),
    batch: int = 1,
    compiled: bool = False,
    on_prompt: Callable[[], None] = lambda: None,
    on_decoder: Callable[[str], None] = lambda name: None,
    on_skip: Callable[[Skipped], None] = lambda skipped: None,
) -> list[list[Answer]]:
    """Return the answers of every draft shape, then of every baseline; those have no passes.

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
    ours: list[PlainDecoder] = []
    if plain:
        ours.append(PlainDecoder(target, sampling, batch=batch, compiled=compiled))
    decoder_of = functools.partial(SpeculativeDecoder, batch=batch, compiled=compiled)
    ours += [decoder_of(target, drafter, shape, sampling) for shape in shapes]
    others = [baseline.decoder(target, sampling) for baseline in baselines]
    decoders = _Decoders(target, ours, others, max_new_tokens, on_decoder)
    runs = decoders.start(prompts, converse)
    size = batch * WAVE if batch > 1 else 1
    for start in range(0, len(runs), size):
        wave = runs[start : start + size]
        decoders.decode_wave(wave, sampling.seed)
        for run in wave:
            on_prompt()
            if isinstance(run.next_turn, Skipped):
                on_skip(run.next_turn)
    return _answers(runs, sampling, len(shapes), len(others), plain)


def _answers(
    runs: Sequence[PromptRun], sampling: Sampling, shapes: int, baselines: int, plain: bool
) -> list[list[Answer]]:
    """Return the answers of every decoder but the plain one; warn of prompts left out, ValueError if all are."""
    # greedy text, and what a rule that repeats plain decoding draws, can be compared token by token
    comparable = [not sampling.acceptance.sampled] * shapes
    comparable += [sampling.temperature == 0] * baselines
    answers: list[list[Answer]] = [[] for _ in comparable]
    skipped = []
    for run in runs:
        if isinstance(run.next_turn, Skipped):
            skipped.append(run.next_turn)
            continue
        for generations in run.turns:
            reference = generations[0] if plain else None
            compared = generations[1:] if plain else generations
            for column, generation, same in zip(answers, compared, comparable, strict=True):
                column.append(_answer(run.prompt, generation, reference, same))
    check_skipped(skipped, len(runs))
    return answers


def _answer(
    prompt: Prompt, generation: Generation, plain: Generation | None, comparable: bool
) -> Answer:
    """Return what a decoder's generation says beside the plain one."""
    return Answer(
        prompt.prompt_id,
        prompt.category,
        len(generation.ids),
        generation.accepted,
        generation.drafted,
        generation.seconds,
        plain_seconds=plain.seconds if plain else 0.0,
        plain_tokens=len(plain.ids) if plain else 0,
        identical=generation.ids == plain.ids if plain and comparable else None,
        draft_ms=generation.draft_ms,
        verify_ms=generation.verify_ms,
        loops=loops(generation.ids),
    )


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
        """Return the decoder; raise ValueError where it cannot serve the target."""
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
