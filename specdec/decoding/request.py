"""What is asked of a decoder, and what it answers."""

from collections.abc import Collection
from typing import Any, NamedTuple

from specdec.target import Target
from specdec.timers import Timer


class Request(NamedTuple):
    """A text to go on with."""

    prompt: list[int]
    max_new_tokens: int
    seed: int = 0  # of this text; unread without chance


class Generation(NamedTuple):
    """Tokens generated after a prompt, and how."""

    ids: list[int]  # new tokens, at most max_new_tokens, cut after an end token
    accepted: tuple[int, ...]  # per target pass: tokens committed less one, the bonus token or an accepted end token
    seconds: float  # wall time, prompt included; of a batch, this sequence's share of it
    context: tuple[int, ...] = ()  # per target pass: tokens committed before it, the prompt's included
    draft_ms: tuple[float, ...] = ()  # per target pass: drafting for it, for the whole batch
    verify_ms: tuple[float, ...] = ()  # per target pass: the pass, its acceptance and its commit, for the whole batch
    drafted: tuple[int, ...] = ()  # per target pass: tokens of the proposal's longest path, the root left out


def check_length(target: Target, prompt: list[int], max_new_tokens: int, nodes: int = 1) -> None:
    """Raise ValueError for a request that no decoding can serve.

    Args:
        nodes: of the largest tree to verify, the root included.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
        raise ValueError(f"the prompt has token ids outside 0..{target.vocab_size - 1}: is the tokenizer the target's?")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    most = target.config.max_position_embeddings
    if len(prompt) + max_new_tokens > most:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed the target's {most} positions"
        )
    slots, most_slots = len(prompt) + max_new_tokens + nodes, target.most_slots
    if most_slots is not None and slots > most_slots:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens, {max_new_tokens} new ones and a tree of {nodes} exceed {most_slots} "
            "positions, where this target's rotary frequencies start to depend on the text's length"
        )


class Pass(NamedTuple):
    """What one target pass was to a text; see :class:`Generation`."""

    context: int
    accepted: int
    drafted: int
    marks: list[Any]  # before drafting, before the pass, after it


class Text:
    """A request on its way to a generation."""

    def __init__(self, number: int, request: Request, end: Collection[int]) -> None:
        self.number, self.request, self.end = number, request, end
        self.ids: list[int] = []
        self.seconds = 0.0
        self.passes: list[Pass] = []

    @property
    def done(self) -> bool:
        return len(self.ids) >= self.request.max_new_tokens or self.ids[-1] in self.end

    def commit(self, ids: list[int], depth: int, marks: list[Any]) -> None:
        """Take what a target pass gave to a proposal of this depth, up to an end token."""
        if self.end:
            ids = ids[: next((index for index, token in enumerate(ids, start=1) if token in self.end), len(ids))]
        self.passes.append(Pass(len(self.request.prompt) + len(self.ids), len(ids) - 1, depth, marks))
        self.ids += ids

    def generation(self, watch: Timer) -> Generation:
        """What came of it."""
        if self.passes:
            watch.wait(self.passes[-1].marks[-1])
        context, accepted, drafted, marks = zip(*self.passes, strict=True) if self.passes else ((), (), (), ())
        draft_ms = tuple(1e3 * watch.seconds(before, between) for before, between, _ in marks)
        verify_ms = tuple(1e3 * watch.seconds(between, after) for _, between, after in marks)
        ids = self.ids[: self.request.max_new_tokens]
        return Generation(ids, accepted, self.seconds, context, draft_ms, verify_ms, drafted)
