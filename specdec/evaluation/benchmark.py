"""Decode prompts plainly and with every growth, side by side in one process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specdec.decoding import Generation, Growth, PlainDecoder, SpeculativeDecoder, check_length, check_pair
from specdec.drafter import Drafter
from specdec.evaluation.prompts import Conversation, Prompt
from specdec.evaluation.record import Answer
from specdec.target import Target

WARM_UP_TOKENS = 8
Decoder = PlainDecoder | SpeculativeDecoder


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
    system: str | None = None,
    plain: bool = True,
    on_turn: Callable[[Turn], None] = lambda turn: None,
) -> list[list[Answer]]:
    """Answers of every growth, greedy, batch size 1.

    The decoders take turns on each prompt, so that a machine that slows down slows them alike. Each decoder runs
    once, untimed, before the first prompt. The next turn of a conversation builds on the target's plain answer.

    Args:
        plain: decode plainly too, for speed-up and identity; False saves that time.

    Raises:
        ValueError: drafter and target do not match, or a prompt cannot be used; the message names the prompt.
    """
    check_pair(target, drafter)
    if not growths:
        raise ValueError("no growth given: name at least one, as chain")
    baseline = PlainDecoder(target)
    decoders: list[Decoder] = [SpeculativeDecoder(target, drafter, growth) for growth in growths]
    conversations = [Conversation(prompt, target.tokenizer, system) for prompt in prompts]
    first = [conversation.next_ids() for conversation in conversations]
    for prompt, ids in zip(prompts, first, strict=True):  # before anything is decoded in vain
        with _named(prompt):
            check_length(target, ids or [], max_new_tokens)
    end = target.eos_token_ids
    warm_up = min(WARM_UP_TOKENS, max_new_tokens)
    answers: list[list[Answer]] = [[] for _ in growths]
    for number, (prompt, conversation) in enumerate(zip(prompts, conversations, strict=True)):
        ids = first[number]
        while ids is not None:
            with _named(prompt):
                if number == 0 and not answers[0]:
                    for decoder in (baseline, *decoders) if plain else decoders:
                        decoder.generate(ids, warm_up, end)
                reference = baseline.generate(ids, max_new_tokens, end) if plain else None
                made = [decoder.generate(ids, max_new_tokens, end) for decoder in decoders]
            for growth, out, generation in zip(growths, answers, made, strict=True):
                out.append(_answer(prompt, growth, generation, reference))
            best = reference or made[0]
            conversation.add_answer(best.ids)
            ids = conversation.next_ids()
            tokens = sum(len(generation.ids) for generation in made) + (len(reference.ids) if reference else 0)
            on_turn(Turn(tokens, ids is None))
    return answers


@contextlib.contextmanager
def _named(prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error


def _answer(prompt: Prompt, growth: Growth, made: Generation, plain: Generation | None) -> Answer:
    return Answer(
        prompt_id=prompt.prompt_id,
        category=prompt.category,
        tokens=len(made.ids),
        accepted=made.accepted,
        drafted=(growth.depth,) * len(made.accepted),
        seconds=made.seconds,
        plain_seconds=plain.seconds if plain else 0.0,
        plain_tokens=len(plain.ids) if plain else 0,
        identical=made.ids == plain.ids if plain else None,
    )
