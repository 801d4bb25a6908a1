"""Decoding the same prompts clean and under every condition, with every drafter."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.decoding import Growth, Sampling
from specdec.drafter import Drafter
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.conversation import Conversation
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.record import Answer
from specdec.evaluation.skipping import Skipped
from specdec.progress import progress
from specdec.robustness.conditions import Condition
from specdec.robustness.partial import Partial
from specdec.robustness.setting import Setting

CLEAN = "clean"
SLOTS = 2048  # of the caches, for each sequence of a batch: of longer texts fewer are decoded side by side


class Plan(NamedTuple):
    """What is decoded under a condition, or why nothing is."""

    condition: Condition | None  # None: clean
    prompts: list[Prompt]
    longest: int  # tokens of the longest prompt
    tokens: int  # of all prompts
    left_out: dict[str, str]  # prompt's id, and why
    skipped: str | None
    note: str = ""

    @property
    def name(self) -> str:
        """The condition's."""
        return self.condition.name if self.condition else CLEAN


class Outcome(NamedTuple):
    """What one drafter did under a condition."""

    plan: Plan
    answers: list[Answer]
    left_out: dict[str, str]  # those of the plan, and those that a later turn left out


def plan_clean(setting: Setting) -> Plan:
    """The prompts as they are.

    Raises:
        ValueError: none of them can be decoded.
    """
    left_out: dict[str, str] = {}
    for prompt in setting.prompts:
        if prompt.prompt_id not in setting.asked:
            found = setting.first_ids(setting.clean(prompt))
            assert isinstance(found, Skipped)
            left_out[prompt.prompt_id] = found.reason
    if not setting.asked:
        name, reason = next(iter(left_out.items()))
        raise ValueError(f"prompt {name}: {reason}; none of {len(setting.prompts)} can be decoded")
    prompts = [prompt for prompt in setting.prompts if prompt.prompt_id in setting.asked]
    lengths = [len(setting.asked[prompt.prompt_id]) for prompt in prompts]
    return Plan(None, prompts, max(lengths), sum(lengths), left_out, None)


def plan(condition: Condition, setting: Setting) -> Plan:
    """What of the clean run's prompts a condition can be measured on."""
    if (reason := condition.refusal(setting)) is not None:
        return Plan(condition, [], 0, 0, {}, reason)
    prompts: list[Prompt] = []
    lengths: list[int] = []
    left_out: dict[str, str] = {}
    same = 0
    for prompt in setting.prompts:
        clean = setting.asked.get(prompt.prompt_id)
        if clean is None:
            continue
        try:
            ids = setting.first_ids(condition.conversation(prompt, setting))
        except ValueError as error:
            ids = Skipped(prompt.prompt_id, str(error).removeprefix(f"prompt {prompt.prompt_id}: "))
        if not isinstance(ids, list):
            left_out[prompt.prompt_id] = ids.reason if ids else "it has no turn"
        elif condition.rewrites and ids == clean:
            same += 1
            left_out[prompt.prompt_id] = "the condition leaves it as it is"
        else:
            prompts.append(prompt)
            lengths.append(len(ids))
    if not prompts:
        why = condition.unchanged(setting) if same == len(left_out) else next(iter(left_out.values()))
        return Plan(condition, [], 0, 0, {}, why)
    return Plan(condition, prompts, max(lengths), sum(lengths), left_out, None, condition.note(setting))


def measure(
    setting: Setting,
    drafters: Sequence[Drafter],
    growth: Growth,
    plans: Sequence[Plan],
    *,
    batch: int = 8,
    seed: int = 0,
    plain: bool = False,
    partial: Partial | None = None,
) -> list[list[Outcome]]:
    """What every drafter does under every plan, drafter by drafter within a plan.

    Args:
        batch: sequences side by side; fewer where texts are long.
        seed: of temperatures and noise.
        plain: decode plainly too, and compare the outputs.
        partial: where outcomes are kept, and taken from if they are there.
    """
    out: list[list[Outcome]] = []
    work = [one.tokens + len(one.prompts) * setting.max_new_tokens for one in plans]
    with progress("robustness", "tokens", sum(work) * len(drafters)) as advance:
        for one, tokens in zip(plans, work, strict=True):
            row: list[Outcome] = []
            for index, drafter in enumerate(drafters):
                kept = partial.find(one.name, index) if partial and one.skipped is None else None
                if kept is None:
                    share = _Share(tokens, len(one.prompts), advance)
                    row.append(_under(setting, drafter, growth, one, batch, seed, plain, share))
                    if partial and one.skipped is None:
                        partial.keep(one.name, index, row[-1].answers, row[-1].left_out)
                else:
                    row.append(Outcome(one, *kept))
                    advance(tokens)
            out.append(row)
    return out


class _Share:
    """Tells progress of prompts, each with an even share of the tokens, and of all of these exactly."""

    def __init__(self, tokens: int, prompts: int, advance: Callable[[int], None]) -> None:
        self.tokens, self.prompts, self.advance, self.done = tokens, prompts, advance, 0

    def __call__(self, turn_is_last: bool) -> None:
        if turn_is_last:
            before, self.done = self.done % self.prompts, self.done + 1
            self.advance(self.tokens * (before + 1) // self.prompts - self.tokens * before // self.prompts)


def _under(
    setting: Setting, drafter: Drafter, growth: Growth, one: Plan, batch: int, seed: int, plain: bool, share: _Share
) -> Outcome:
    if one.skipped is not None:
        return Outcome(one, [], {})
    sampling, left_out = Sampling(seed=seed), dict(one.left_out)
    if one.condition is not None:
        sampling, drafter = one.condition.sampling(sampling), one.condition.drafter(drafter, seed)

    def on_skip(skipped: Skipped) -> None:
        left_out[skipped.prompt_id] = skipped.reason

    slots = one.longest + setting.max_new_tokens + setting.nodes
    (answers,) = benchmark(
        setting.target, drafter, [growth], one.prompts, setting.max_new_tokens,
        sampling=sampling, converse=functools.partial(_converse, setting, one.condition), plain=plain,
        batch=max(1, min(batch, batch * SLOTS // slots)), on_turn=lambda turn: share(turn.last), on_skip=on_skip,
    )  # fmt: skip
    return Outcome(one, answers, left_out)


def _converse(setting: Setting, condition: Condition | None, prompt: Prompt, _: object) -> Conversation:
    return setting.clean(prompt) if condition is None else condition.conversation(prompt, setting)
