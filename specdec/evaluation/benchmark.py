"""Decode prompts plainly and with every growth, side by side in one process."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specdec.decoding import Generation, Growth, PlainDecoder, Sampling, SpeculativeDecoder, check_length, check_pair
from specdec.drafter import Drafter
from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.record import Answer
from specdec.target import Target

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
Decoder = PlainDecoder | SpeculativeDecoder


class Turn(NamedTuple):
    """Progress: one turn is done."""

    tokens: int  # new tokens that all decoders made for it
    last: bool  # whether its prompt is done too


class Skipped(NamedTuple):
    """A prompt that was left out, with all its turns."""

    prompt_id: str
    reason: str


def benchmark(
    target: Target,
    drafter: Drafter,
    growths: Sequence[Growth],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    system: str | None = None,
    thinking: bool | None = None,
    plain: bool = True,
    on_turn: Callable[[Turn], None] = lambda turn: None,
    on_skip: Callable[[Skipped], None] = lambda skipped: None,
) -> list[list[Answer]]:
    """Answers of every growth, batch size 1.

    The decoders take turns on each prompt, so that a machine that slows down slows them alike. Each decoder runs
    once, untimed, before the first prompt. The next turn of a conversation builds on the target's plain answer. Every
    turn has a seed of its own, the same for all decoders, so that a rule that repeats plain decoding can be seen to.

    A prompt is left out, and the log says so, if one of its turns cannot be decoded: it is too long, the chat template
    refuses it, or no tokens are left of it.

    Args:
        system: system prompt of all conversations.
        thinking: the chat template's ``enable_thinking``; None leaves it to the template.
        plain: decode plainly too, for speed-up and identity; False saves that time.

    Raises:
        ValueError: drafter and target do not match, the target has no chat template and a prompt needs one, ``system``
            or ``thinking`` does not apply to a prompt, or every prompt is left out; the message names the prompt.
    """
    check_pair(target, drafter)
    if not growths:
        raise ValueError("no growth given: name at least one, as chain")
    baseline = PlainDecoder(target, sampling)
    decoders: list[Decoder] = [SpeculativeDecoder(target, drafter, growth, sampling) for growth in growths]
    conversations = [Conversation(prompt, target.tokenizer, system, thinking) for prompt in prompts]
    # all of them before anything is decoded in vain
    first = [_next_ids(conversation, target, max_new_tokens) for conversation in conversations]
    _check_thinking([one for one, ids in zip(conversations, first, strict=True) if isinstance(ids, list)], thinking)
    end = target.eos_token_ids
    warm_up = min(WARM_UP_TOKENS, max_new_tokens)
    answers: list[list[Answer]] = [[] for _ in growths]
    skipped: list[Skipped] = []
    turns = 0
    for conversation, begin in zip(conversations, first, strict=True):
        prompt, ids = conversation.prompt, begin
        own: list[list[Answer]] = [[] for _ in growths]
        while isinstance(ids, list):
            with _named(prompt):
                if turns == 0:
                    for decoder in (baseline, *decoders) if plain else decoders:
                        decoder.generate(ids, warm_up, end)
                seed = sampling.seed + (turns << 32)
                reference = baseline.generate(ids, max_new_tokens, end, seed) if plain else None
                made = [decoder.generate(ids, max_new_tokens, end, seed) for decoder in decoders]
            for growth, out, generation in zip(growths, own, made, strict=True):
                out.append(_answer(prompt, growth, generation, reference, sampling.repeatable))
            turns += 1
            best = reference or made[0]
            conversation.add_answer(best.ids)
            ids = _next_ids(conversation, target, max_new_tokens)
            tokens = sum(len(generation.ids) for generation in made) + (len(reference.ids) if reference else 0)
            on_turn(Turn(tokens, not isinstance(ids, list)))
        if isinstance(begin, Skipped):
            on_turn(Turn(0, True))
        if isinstance(ids, Skipped):
            skipped.append(ids)
            on_skip(ids)
            continue
        for out, more in zip(answers, own, strict=True):
            out.extend(more)
    _check_skipped(skipped, len(prompts))
    return answers


def _next_ids(conversation: Conversation, target: Target, max_new_tokens: int) -> list[int] | Skipped | None:
    """The next turn's ids, None after the last, or why it cannot be decoded."""
    prompt_id = conversation.prompt.prompt_id
    try:
        ids = conversation.next_ids()
        if ids is not None:
            check_length(target, ids, max_new_tokens)
    except ValueError as error:
        return Skipped(prompt_id, str(error).removeprefix(f"prompt {prompt_id}: "))
    return ids


def _check_thinking(conversations: Sequence[Conversation], thinking: bool | None) -> None:
    if thinking is not None and conversations and not conversations[0].heeds_thinking():
        log.warning("thinking is %s, but the chat template writes the same with and without it", thinking)


def _check_skipped(skipped: Sequence[Skipped], prompts: int) -> None:
    """Warn of prompts that were left out; raise ValueError if all were."""
    if not skipped:
        return
    name, reason = skipped[0]
    if len(skipped) == prompts:
        raise ValueError(f"prompt {name}: {reason}" + (f"; none of {prompts} can be decoded" if prompts > 1 else ""))
    names = ", ".join(one.prompt_id for one in skipped[:5]) + (", ..." if len(skipped) > 5 else "")
    log.warning("%d of %d prompts were left out (%s); %s: %s", len(skipped), prompts, names, name, reason)


@contextlib.contextmanager
def _named(prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error


def _answer(prompt: Prompt, growth: Growth, made: Generation, plain: Generation | None, repeatable: bool) -> Answer:
    return Answer(
        prompt_id=prompt.prompt_id,
        category=prompt.category,
        tokens=len(made.ids),
        accepted=made.accepted,
        drafted=(growth.depth,) * len(made.accepted),
        seconds=made.seconds,
        plain_seconds=plain.seconds if plain else 0.0,
        plain_tokens=len(plain.ids) if plain else 0,
        identical=made.ids == plain.ids if plain and repeatable else None,
        context=made.context,
        draft_ms=made.draft_ms,
        verify_ms=made.verify_ms,
    )
