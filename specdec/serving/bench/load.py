"""Users who ask one thing after another, so many at a time."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import cycle, islice
from typing import NamedTuple

from specdec.evaluation.prompts import Prompt
from specdec.serving.bench.asking import Answered, Asking, ask
from specdec.serving.bench.counters import Counters, read, settled
from specdec.serving.bench.endpoint import Endpoint

log = logging.getLogger(__name__)

ROUNDS = 4  # requests of each user, at least


class Level(NamedTuple):
    """What one concurrency came to."""

    concurrency: int
    seconds: float
    """From the first request to the last token of all."""
    answers: list[Answered]
    """In the order of the requests."""
    counted: Counters


def requests(prompts: Sequence[Prompt], concurrency: int) -> list[Prompt]:
    """Every prompt once, and again from the first until each user has some requests."""
    return list(islice(cycle(prompts), max(len(prompts), ROUNDS * concurrency)))


def run_level(
    endpoint: Endpoint,
    asking: Asking,
    prompts: Sequence[Prompt],
    concurrency: int,
    on_answer: Callable[[Answered], None] = lambda answer: None,
) -> Level:
    """Ask; every user waits for the answer before the next request. One request of each goes before, untimed.

    If one fails, or this is interrupted, the others are broken off.

    Raises:
        ValueError: a prompt is not answered.
    """
    over = threading.Event()
    with ThreadPoolExecutor(concurrency) as pool:

        def all_of(asked: Sequence[Prompt], told: Callable[[Answered], None]) -> list[Answered]:
            futures = [pool.submit(ask, endpoint, asking, prompt, lambda: not over.is_set()) for prompt in asked]
            try:
                for future in as_completed(futures):
                    told(future.result())
            except BaseException:
                over.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]

        before = read(endpoint)
        warm = all_of(list(islice(cycle(prompts), concurrency)), lambda answer: None)
        before = settled(endpoint, before, sum(answer.tokens for answer in warm))
        begin = time.perf_counter()
        answers = all_of(requests(prompts, concurrency), on_answer)
        seconds = time.perf_counter() - begin
    tokens = sum(answer.tokens for answer in answers)
    counted = settled(endpoint, before, tokens).since(before)
    if counted.generated != tokens:
        log.warning(
            "%s counted %d tokens, %d came here: somebody else uses it, and acceptance and speed are of both",
            endpoint.url,
            counted.generated,
            tokens,
        )
    return Level(concurrency, seconds, answers, counted)
