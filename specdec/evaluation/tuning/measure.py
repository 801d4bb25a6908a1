"""Everything that tuning measures, under progress bars."""

import functools
from collections.abc import Sequence

from specdec.decoding import PlainDecoder, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.evaluation.bars import bars
from specdec.evaluation.tuning.costs import ladder, measure_costs, timed_requests
from specdec.evaluation.tuning.model import predict
from specdec.evaluation.tuning.profile import Profile, measure_profile
from specdec.evaluation.tuning.results import Tuned
from specdec.evaluation.tuning.shape import WIDTHS, Shape
from specdec.evaluation.tuning.trial import groups, measure_trial
from specdec.target import Target


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    batch_sizes: Sequence[int],
    compiled: bool,
    max_new_tokens: int,
    repeats: int,
) -> tuple[Profile, list[Tuned]]:
    """The acceptance profile, and for every batch size costs, predictions and a run of the best shape.

    Args:
        prompts: token ids.
        compiled: what kind of decoding is meant, for costs and the run.
        repeats: timed calls of every shape.

    Raises:
        ValueError: no answer has a second token.
    """
    order = ladder(compiled, drafter.config.draft_vocab_size)
    widths = tuple(k for k in WIDTHS if k <= max(shape.top_k for shape in order))
    end = sorted(target.eos_token_ids)
    longest = max(map(len, prompts)) + max_new_tokens
    with bars() as bar:
        done = bar("acceptance at every place of the answers", len(prompts))
        profile = measure_profile(target, drafter, prompts, max_new_tokens, widths, end=end, on_prompts=done)
        answers = [text.ids for text in profile.texts]
        if not any(text.rounds for text in profile.texts):
            raise ValueError("the target ends every answer with its first token: there is no pass to tune for")

        @functools.cache
        def length(shape: Shape) -> float:
            return profile.acceptance(shape).length

        tuned = []
        for batch in batch_sizes:
            plain = PlainDecoder(target, batch=batch, compiled=compiled)
            calls = (repeats + 1) * (1 + len(order))
            done = bar(f"batch size {batch}: {'compiled ' if compiled else ''}passes of every shape", calls)
            requests = timed_requests(prompts, answers, batch, max_new_tokens)
            costs = measure_costs(target, drafter, requests, plain, repeats, functools.partial(done, 1), longest)
            predictions = predict(costs, widths, length)
            best = predictions[0]
            done = bar(f"batch size {batch}: decoding with {best.shape.text}", len(groups(prompts, batch, 1)))
            decoder = SpeculativeDecoder(target, drafter, best.shape.growth, batch=batch, compiled=compiled)
            trial = measure_trial(
                decoder, plain, prompts, max_new_tokens, best.speedup,
                end=end, on_group=functools.partial(done, 1),
            )  # fmt: skip
            tuned.append(Tuned(costs, predictions, trial))
    return profile, tuned
