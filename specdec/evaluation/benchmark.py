"""Decode prompts plainly, with every growth and with every baseline, side by side in one process."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from specdec.decoding import (
    Generation,
    Growth,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
    check_pair,
)
from specdec.drafter import Drafter
from specdec.evaluation.baselines import Baseline
from specdec.evaluation.conversation import Conversation, Tokenizer
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.record import Answer
from specdec.evaluation.skipping import Skipped, check_skipped, next_ids
from specdec.nn.products import fast_products
from specdec.target import Target

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
WAVE = 4  # prompts of a wave for each sequence of a batch, so that few places stay empty at its end


class Decoder(Protocol):
    """What decodes."""

    def generate_all(self, requests: Sequence[Request], end: frozenset[int]) -> Iterator[tuple[int, Generation]]:
        """The generations with the numbers of their requests, in any order."""
        ...


class Turn(NamedTuple):
    """Progress: one turn is done."""

    tokens: int  # new tokens that all decoders made for it
    last: bool  # whether its prompt is done too


def benchmark(
    target: Target,
    drafter: Drafter,
    growths: Sequence[Growth],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    converse: Callable[[Prompt, Tokenizer], Conversation] = Conversation,
    plain: bool = True,
    baselines: Sequence[Baseline] = (),
    batch: int = 1,
    compiled: bool = False,
    on_turn: Callable[[Turn], None] = lambda turn: None,
    on_skip: Callable[[Skipped], None] = lambda skipped: None,
) -> list[list[Answer]]:
    """Answers of every growth, then of every baseline; those have no passes.

    The decoders take turns on each prompt, or wave of prompts where sequences are decoded side by side, and the first
    moves on, so that a machine that slows down slows them alike and none always follows the same other. Each decoder
    runs once, untimed, before the first prompt, and compiles untimed. The next turn of a conversation builds on the
    target's plain answer. Every turn has a seed of its own, the same for all decoders, so that a rule that repeats
    plain decoding can be seen to.

    A prompt is left out, and the log says so, if one of its turns cannot be decoded: it is too long, the chat template
    refuses it, or no tokens are left of it.

    Args:
        converse: what makes a conversation of a prompt with the target's tokenizer: with a system prompt, say.
        plain: decode plainly too, for speed-up and identity; False saves that time.
        batch: sequences that our decoders decode side by side; 1 for latencies.
        compiled: whether our decoders run as compiled graphs.

    Raises:
        ValueError: drafter and target do not match, the target has no chat template and a prompt needs one,
            ``converse`` refuses a prompt, a baseline cannot serve the target, or every prompt is left out; the
            message names the prompt.
    """
    check_pair(target, drafter)
    if not growths:
        raise ValueError("no growth given: name at least one, as chain")
    ours: list[PlainDecoder] = [PlainDecoder(target, sampling, batch=batch, compiled=compiled)] if plain else []
    for growth in growths:
        ours.append(SpeculativeDecoder(target, drafter, growth, sampling, batch=batch, compiled=compiled))
    run = _Run(target, max_new_tokens, sampling.seed, ours, [one.decoder(target, sampling, batch) for one in baselines])
    conversations = [converse(prompt, target.tokenizer) for prompt in prompts]
    # all of them before anything is decoded in vain
    talks = [_Talk(number, one, run.next_ids(one)) for number, one in enumerate(conversations)]
    run.longest = max((len(talk.ids) for talk in talks if isinstance(talk.ids, list)), default=0) + max_new_tokens
    _check_thinking([talk.conversation for talk in talks if isinstance(talk.ids, list)])
    same = [sampling.repeatable] * len(growths) + [sampling.temperature == 0] * len(baselines)
    skipped: list[Skipped] = []
    answers: list[list[Answer]] = [[] for _ in same]
    size = batch * WAVE if batch > 1 else 1
    for start in range(0, len(talks), size):
        wave = talks[start : start + size]
        with fast_products() if target.device.type == "cpu" else contextlib.nullcontext():
            run.wave(wave, on_turn)  # all that runs eagerly with the same library
        for talk in wave:
            if isinstance(talk.ids, Skipped):
                skipped.append(talk.ids)
                on_skip(talk.ids)
                continue
            for made in talk.turns:
                reference, others = (made[0], made[1:]) if plain else (None, made)
                for out, generation, alike in zip(answers, others, same, strict=True):
                    out.append(_answer(talk.conversation.prompt, generation, reference, alike))
    check_skipped(skipped, len(prompts))
    return answers


class _Talk:
    """A conversation on its way; ``ids`` are the next turn's, None after the last, or why it cannot be decoded."""

    def __init__(self, number: int, conversation: Conversation, ids: list[int] | Skipped | None) -> None:
        self.number, self.conversation, self.ids = number, conversation, ids
        self.turns: list[list[Generation]] = []  # of each, what every decoder made


class _Run:
    """The decoders at work; the first makes the answers that conversations go on with."""

    def __init__(
        self, target: Target, most: int, seed: int, ours: Sequence[PlainDecoder], others: Sequence[Decoder]
    ) -> None:
        self.target, self.most, self.seed, self.ours, self.others = target, most, seed, ours, others
        self.longest = 0  # tokens of a text, as far as is known
        self.warm = False
        self.turns = 0

    def next_ids(self, conversation: Conversation) -> list[int] | Skipped | None:
        """See :func:`skipping.next_ids`."""
        return next_ids(conversation, self.target, self.most, max(decoder.nodes for decoder in self.ours))

    def wave(self, talks: Sequence[_Talk], on_turn: Callable[[Turn], None]) -> None:
        """Hold conversations, turn by turn."""
        for talk in talks:
            if isinstance(talk.ids, Skipped):
                on_turn(Turn(0, True))
        while live := [talk for talk in talks if isinstance(talk.ids, list)]:
            for talk, made in zip(live, self._turn(live), strict=True):
                talk.turns.append(made)
                talk.conversation.add_answer(made[0].ids)
                talk.ids = self.next_ids(talk.conversation)
                on_turn(Turn(sum(len(one.ids) for one in made), not isinstance(talk.ids, list)))

    def _turn(self, talks: Sequence[_Talk]) -> list[list[Generation]]:
        prompts = [talk.ids for talk in talks if isinstance(talk.ids, list)]
        seeds = [self.seed + (talk.number << 44) + (len(talk.turns) << 32) for talk in talks]
        requests = [Request(ids, self.most, seed) for ids, seed in zip(prompts, seeds, strict=True)]
        everybody: list[Decoder] = [*self.ours, *self.others]
        end = self.target.eos_token_ids
        with _named(talks):
            for decoder in self.ours:
                decoder.prepare(max(self.longest, max(map(len, prompts)) + self.most))
            if not self.warm:
                short = [Request(prompts[0], min(WARM_UP_TOKENS, self.most))]
                for one in everybody:
                    list(one.generate_all(short, end))
                self.warm = True
            first = self.turns % len(everybody)
            moved = [dict(one.generate_all(requests, end)) for one in everybody[first:] + everybody[:first]]
        self.turns += 1
        found = moved[-first:] + moved[:-first]
        return [[made[number] for made in found] for number in range(len(talks))]


def _check_thinking(conversations: Sequence[Conversation]) -> None:
    thinking = conversations[0].thinking if conversations else None
    if thinking is not None and not conversations[0].heeds_thinking():
        log.warning("thinking is %s, but the chat template writes the same with and without it", thinking)


@contextlib.contextmanager
def _named(talks: Sequence[_Talk]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        names = ", ".join(talk.conversation.prompt.prompt_id for talk in talks)
        raise ValueError(f"prompt {names}: {error}") from error


def _answer(prompt: Prompt, made: Generation, plain: Generation | None, repeatable: bool) -> Answer:
    return Answer(
        prompt_id=prompt.prompt_id,
        category=prompt.category,
        tokens=len(made.ids),
        accepted=made.accepted,
        drafted=made.drafted,
        seconds=made.seconds,
        plain_seconds=plain.seconds if plain else 0.0,
        plain_tokens=len(plain.ids) if plain else 0,
        identical=made.ids == plain.ids if plain and repeatable else None,
        context=made.context,
        draft_ms=made.draft_ms,
        verify_ms=made.verify_ms,
    )
