"""Decode prompts plainly, with every draft shape and with every baseline, side by side in one process.

Baselines decode without our drafter: transformers' ways.
"""

import logging
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
from specdec.evaluation.partial import PartialResults
from specdec.evaluation.prompts import Prompt, PromptConversation, Skipped, check_skipped, next_ids
from specdec.evaluation.summary import pass_regions
from specdec.nn.backend import matmul_backend
from specdec.target import Target
from specdec.utils.progress import Advance
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
Converse = Callable[[Prompt, Any], PromptConversation]
WAVE = 4  # prompts of a wave for each sequence of a batch, so that few places stay empty at its end


class DecodedTurn(NamedTuple):
    """What every decoder generated in one turn, and the regions of its tokens."""

    generations: list[Generation]
    regions: list[list[str]]


@dataclass
class PromptRun:
    """A prompt as it is decoded, turn by turn.

    Args:
        number: the prompt's place among all, on which its seeds depend.
        next_turn: the ids to decode next; None when nothing is left, or why the prompt cannot be decoded.
        turns: decoded so far.
        answers: the same, as answers of every draft shape and baseline, once all turns are decoded.
    """

    prompt: Prompt
    number: int
    conversation: PromptConversation
    next_turn: list[int] | Skipped | None
    turns: list[DecodedTurn] = field(default_factory=list)
    answers: list[list[Answer]] = field(default_factory=list)


class _Decoders:
    """Our decoders, the plain one first, and those of baselines; they take turns at going first."""

    def __init__(
        self,
        target: Target,
        ours: Sequence[PlainDecoder],
        baselines: Sequence["TransformersDecoder"],
        max_new_tokens: int,
        advance: Advance,
    ) -> None:
        self.target = target
        self.ours = ours
        self.all: list[Any] = [*ours, *baselines]
        self.max_new_tokens = max_new_tokens
        self.advance = advance
        self.nodes = max(decoder.nodes for decoder in ours)
        self.longest = 0  # tokens of the longest first turn with its answer
        self.calls = 0
        self.is_warm = False

    def next_turn(self, conversation: PromptConversation) -> list[int] | Skipped | None:
        """Return what is to be decoded next of a conversation."""
        return next_ids(conversation, self.target, self.max_new_tokens, self.nodes)

    def start(self, prompts: Sequence[Prompt], converse: Converse) -> list[PromptRun]:
        """Begin all conversations, so that nothing is decoded in vain."""
        runs = []
        for number, prompt in enumerate(prompts):
            conversation = converse(prompt, self.target.tokenizer)
            conversation.regions([])  # so that a template that cannot be read ends it now
            runs.append(PromptRun(prompt, number, conversation, self.next_turn(conversation)))
        lengths = [len(run.next_turn) for run in runs if isinstance(run.next_turn, list)]
        self.longest = max(lengths, default=0) + self.max_new_tokens
        return runs

    def decode_wave(self, wave: Sequence[PromptRun], seed: int) -> None:
        """Decode all turns of some prompts side by side; ValueError, with their names, if one cannot be."""
        while live := [(run, run.next_turn) for run in wave if isinstance(run.next_turn, list)]:
            requests = [
                Request(
                    ids, self.max_new_tokens, seed + (run.number << 44) + (len(run.turns) << 32)
                )
                for run, ids in live
            ]
            try:
                by_decoder = self._decode(requests)
            except ValueError as error:
                names = ", ".join(run.prompt.prompt_id for run, _ in live)
                raise ValueError(f"prompt {names}: {error}") from error
            for (run, _), generations in zip(live, zip(*by_decoder, strict=True), strict=True):
                regions = _regions_of(run.conversation, generations)
                run.turns.append(DecodedTurn([*generations], regions))
                run.conversation.add_answer(generations[0].ids)
                run.next_turn = self.next_turn(run.conversation)
        self.advance(len(wave))

    def _decode(self, requests: Sequence[Request]) -> list[list[Generation]]:
        """Return, for every decoder, what it generates after each request."""
        end = self.target.eos_token_ids
        by_decoder: list[list[Generation]] = [[] for _ in self.all]
        with matmul_backend(self.target.device):
            self._prepare(requests)
            for turn in range(self.calls, self.calls + len(self.all)):
                index = turn % len(self.all)
                self.advance(0, self.all[index].name)
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
        if not self.is_warm:
            self.is_warm = True
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
    advance: Advance = lambda more, now="": None,
    on_skip: Callable[[Skipped], None] = lambda skipped: None,
    partial: PartialResults | None = None,
) -> list[list[Answer]]:
    """Return the answers of every draft shape, then of every baseline; those have no passes.

    The decoders take turns on each prompt, or wave of prompts where sequences are decoded side by side, and the first
    moves on, so that a machine that slows down slows them alike. Each decoder runs once, untimed, before the first
    prompt, and compiles untimed. The next turn of a conversation builds on the target's plain answer. Every turn has
    its own seed, the same for all decoders. A prompt with a turn that cannot be decoded is left out and logged.

    Args:
        converse: what makes a conversation of a prompt with the target's tokenizer: with a system prompt, say.
        plain: decode plainly too, for speed-up and identity; False saves that time.
        batch: sequences that our decoders take side by side.
        compiled: whether our decoders compile.
        advance: called with how many more prompts are done or left out, and with 0 and its name as each decoder begins.
        on_skip: called for each prompt that is left out.
        partial: of this very evaluation. What it holds is not decoded again, and every wave is added to it.

    Raises:
        ValueError: drafter and target do not match, a baseline cannot serve the target, a prompt is refused by
            ``converse``, or all are left out.
    """
    if not shapes:
        raise ValueError("no draft shape given: name at least one, as chain")
    how: Any = {"batch": batch, "compiled": compiled}
    ours = [PlainDecoder(target, sampling, **how)] if plain else []
    ours += [SpeculativeDecoder(target, drafter, shape, sampling, **how) for shape in shapes]
    others = [baseline.decoder(target, sampling) for baseline in baselines]
    decoders = _Decoders(target, ours, others, max_new_tokens, advance)
    # greedy text, and what a rule that repeats plain decoding draws, can be compared token by token
    comparable = [not sampling.acceptance.sampled] * len(shapes)
    comparable += [sampling.temperature == 0] * len(others)
    runs = decoders.start(prompts, converse)
    restored = _restored(runs, decoders, partial)
    size = batch * WAVE if batch > 1 else 1
    for start in range(restored, len(runs), size):
        wave = runs[start : start + size]
        decoders.decode_wave(wave, sampling.seed)
        for run in wave:
            run.answers = _answers_of(run, plain, comparable)
            run.turns = []
        if partial is not None:
            partial.append(_entry_of(wave, restored, decoders.calls))
    turns = [answers for run in _decoded(runs, on_skip) for answers in run.answers]
    return [[answers[column] for answers in turns] for column in range(len(comparable))]


def _regions_of(
    conversation: PromptConversation, generations: Sequence[Generation]
) -> list[list[str]]:
    """Return the regions of every decoder's tokens of one turn; most decoders generate the same tokens."""
    by_ids: dict[tuple[int, ...], list[str]] = {}
    for generation in generations:
        ids = tuple(generation.ids)
        if ids not in by_ids:
            by_ids[ids] = conversation.regions(ids)
    return [by_ids[tuple(generation.ids)] for generation in generations]


def _answers_of(run: PromptRun, plain: bool, comparable: Sequence[bool]) -> list[list[Answer]]:
    """Return, for each turn, the answers of every draft shape and baseline."""
    return [
        [
            answer_of(
                run.prompt,
                generations[column],
                generations[0] if plain else None,
                same,
                regions[column],
            )
            for column, same in enumerate(comparable, start=plain)
        ]
        for generations, regions in run.turns
    ]


def _entry_of(wave: Sequence[PromptRun], begun_at: int, calls: int) -> dict[str, Any]:
    """Return what is kept of a wave; ``begun_at`` is the number of the first prompt of this process."""
    prompts = []
    for run in wave:
        skipped = run.next_turn.reason if isinstance(run.next_turn, Skipped) else None
        turns = [[answer._asdict() for answer in answers] for answers in run.answers]
        prompts.append({"prompt": run.prompt.prompt_id, "skipped": skipped, "turns": turns})
    return {"begun_at": begun_at, "calls": calls, "prompts": prompts}


def _restored(
    runs: Sequence[PromptRun], decoders: _Decoders, partial: PartialResults | None
) -> int:
    """Give the first prompts what was kept of them, and return how many these are."""
    if partial is None or not partial.entries:
        return 0
    kept_prompts = [entry for wave in partial.entries for entry in wave["prompts"]]
    for run, entry in zip(runs, kept_prompts, strict=False):
        if entry["prompt"] != run.prompt.prompt_id:
            raise ValueError(f"{partial.path}: of other prompts: remove it")
        skipped = entry["skipped"]
        run.next_turn = None if skipped is None else Skipped(run.prompt.prompt_id, skipped)
        run.answers = [[Answer.read(columns) for columns in answers] for answers in entry["turns"]]
    decoders.calls = partial.entries[-1]["calls"]
    count = len(kept_prompts)
    log.warning("evaluation continues after %s of %d", how_many(count, "prompt"), len(runs))
    decoders.advance(count)
    return count


def _decoded(runs: Sequence[PromptRun], on_skip: Callable[[Skipped], None]) -> list[PromptRun]:
    """Return the prompts that were decoded, and report the others."""
    skipped = [run.next_turn for run in runs if isinstance(run.next_turn, Skipped)]
    for prompt in skipped:
        on_skip(prompt)
    check_skipped(skipped, len(runs))
    return [run for run in runs if not isinstance(run.next_turn, Skipped)]


def answer_of(
    prompt: Prompt,
    generation: Generation,
    plain: Generation | None = None,
    comparable: bool = False,
    token_regions: Sequence[str] = (),
) -> Answer:
    """Return what a decoder's generation says, together with the plain one if there is one.

    Args:
        token_regions: of every token of the generation; empty if nothing is known of them.
    """
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
        regions=pass_regions(generation.accepted, token_regions),
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
    """A way to decode without our drafter: transformers' own, plainly or with drafts from elsewhere."""

    name: str
    lookup: bool = False
    """Copy three drafts from where the last tokens stood in the text before."""
    assistant: str = ""
    """Directory or Hub id of a smaller model with the target's tokenizer, which drafts."""

    def decoder(self, target: Target, sampling: Sampling) -> TransformersDecoder:
        """Return the decoder; raise ValueError where it cannot serve the target."""
        if not self.assistant:
            how = {"prompt_lookup_num_tokens": 3} if self.lookup else {}
            return TransformersDecoder(target, sampling, **how)
        dtype = str(target.dtype).removeprefix("torch.")
        smaller = Target.load(self.assistant, dtype=dtype, device=str(target.device))
        if smaller.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ValueError(
                f"baseline assisted: {self.assistant} has another tokenizer than the target"
            )
        return TransformersDecoder(target, sampling, assistant_model=smaller.model)


def parse_baseline(text: str) -> Baseline:
    """``transformers``, ``prompt_lookup`` or ``assisted:DIR_OR_HUB_ID``; ValueError if it is none of these."""
    if text == "transformers":
        return Baseline("transformers, one at a time")
    if text == "prompt_lookup":
        return Baseline("transformers, prompt lookup of 3, one at a time", lookup=True)
    kind, _, assistant = text.partition(":")
    if kind != "assisted" or not assistant:
        raise ValueError(f"baseline {text!r}: expected transformers, prompt_lookup or assisted:DIR")
    return Baseline(f"transformers, assisted by {assistant}, one at a time", assistant=assistant)
