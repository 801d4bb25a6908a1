"""The host loop: admit prompts, run rounds, read what was committed, hand out answers.

Legend: B sequences.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence

import torch

from specdec.decoding.growth import Growth
from specdec.decoding.pair import check_pair
from specdec.decoding.request import Generation, Request, Text, check_length
from specdec.decoding.room import CompiledRoom, Room
from specdec.decoding.round import DraftedRound, PlainRound
from specdec.decoding.sampling import Sampling
from specdec.drafter import Drafter, tabled
from specdec.target import Target
from specdec.timers import timer

GREEDY = Sampling()
ROOM = 64  # compiled decoders have room for a multiple of so many tokens


def room_for(target: Target, slots: int, before: int = 0) -> int:
    """Slots that a compiled decoder makes when it needs so many and ``before`` have become too few."""
    capacity = -(-max(slots, 2 * before) // ROOM) * ROOM
    return capacity if target.most_slots is None else max(slots, min(capacity, target.most_slots))


class PlainDecoder:
    """The target alone, on the same static cache: what speculative decoding is compared with.

    Args:
        batch: B, sequences decoded side by side. Each has its own length, and its tokens are those it has alone.
        compiled: whether rounds run as compiled graphs, with room for some length. The first call compiles, and each
            call does that needs more room than any before; weights must not change afterwards.

    Raises:
        ValueError: the batch is smaller than one.
    """

    def __init__(self, target: Target, sampling: Sampling = GREEDY, *, batch: int = 1, compiled: bool = False) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        self.target, self.sampling, self.batch, self.compiled = target, sampling, batch, compiled
        self._kept: CompiledRoom | None = None
        self._calls = 0

    def generate(self, prompt: list[int], max_new_tokens: int, end: Collection[int] = (), seed: int = 0) -> Generation:
        """Generate; stops after a token of ``end``.

        Args:
            seed: of this text; unread without chance.
        """
        ((_, made),) = self.generate_all([Request(prompt, max_new_tokens, seed)], end)
        return made

    @torch.inference_mode()
    def generate_all(self, requests: Sequence[Request], end: Collection[int] = ()) -> Iterator[tuple[int, Generation]]:
        """Generate after every prompt; yields numbers of requests and what was made of them, as they are done.

        For one caller at a time.

        Raises:
            ValueError: a request cannot be served, and nothing has been generated then; or somebody has called anew
                before the end of this.
        """
        for request in requests:
            check_length(self.target, request.prompt, request.max_new_tokens, self.nodes)
        if not requests:
            return
        self._calls += 1
        call = self._calls
        room = self._room(max(len(request.prompt) + request.max_new_tokens for request in requests))
        room.check()
        for b in range(self.batch):  # whoever asked last may have left in the middle
            room.round.sequences.end(b)
        waiting = deque(Text(number, request, end) for number, request in enumerate(requests))
        texts: list[Text | None] = [None] * self.batch
        watch, last = timer(self.target.device), time.perf_counter()
        while waiting or any(texts):
            for b in range(self.batch):
                while texts[b] is None and waiting:
                    new = waiting.popleft()
                    new.ids = room.prefill(b, new.request.prompt, new.request.seed).tolist()
                    last = _charge([new], last)
                    if new.done:
                        room.round.sequences.end(b)
                        yield new.number, new.generation(watch)
                        last = self._resumed(call)
                    else:
                        texts[b] = new
            running = [text for text in texts if text]
            if not running:
                continue
            marks = [watch.mark()]
            tree = room.draft()
            marks.append(watch.mark())
            report = room.verify(tree)
            marks.append(watch.mark())
            for b, (count, *fresh, depth) in enumerate(report.tolist()):
                if text := texts[b]:
                    text.commit(fresh[:count], depth, marks)
                    if text.done:
                        texts[b] = None
                        room.round.sequences.end(b)
            last = _charge(running, last)
            for text in running:
                if text.done:
                    yield text.number, text.generation(watch)
                    last = self._resumed(call)

    def _resumed(self, call: int) -> float:
        """Now; if nobody else has used the room in the meantime."""
        if self.compiled and call != self._calls:
            raise ValueError("this decoder was asked for other texts before these were done: take one for each")
        return time.perf_counter()

    def prepare(self, longest: int) -> None:
        """Compile, if so asked, for texts of up to ``longest`` tokens, the new ones included."""
        if self.compiled:
            self._room(longest)

    def _new_round(self, longest: int) -> PlainRound:
        return PlainRound(self.target, self.sampling, longest, self.batch)

    @torch.inference_mode()
    def _room(self, longest: int) -> Room:
        if not self.compiled:
            return Room(self._new_round(longest))
        slots = longest + self.nodes
        if self._kept is None or self._kept.round.capacity < slots:
            capacity = room_for(self.target, slots, self._kept.round.capacity if self._kept else 0)
            self._kept = CompiledRoom(self._new_round(capacity - self.nodes))
        return self._kept

    @property
    def nodes(self) -> int:
        """Nodes that a pass verifies, the root included, at most."""
        return PlainRound.nodes


class SpeculativeDecoder(PlainDecoder):
    """Speculative decoding; the output is the target's own.

    Greedy, or with the rule ``one_hot``, it is plain decoding's output token for token, from the same seed; with the
    other rules it has plain decoding's law.

    Raises:
        ValueError: drafter and target do not match, or the rule cannot judge such a growth.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        growth: Growth,
        sampling: Sampling = GREEDY,
        *,
        batch: int = 1,
        compiled: bool = False,
    ) -> None:
        check_pair(target, drafter)
        growth.check(drafter.config.draft_vocab_size)
        growth.check_rule(sampling.acceptance)
        super().__init__(target, sampling, batch=batch, compiled=compiled)
        self.drafter, self.growth = drafter, growth

    def _new_round(self, longest: int) -> PlainRound:
        drafter = tabled(self.drafter) if self.compiled else self.drafter
        return DraftedRound(self.target, drafter, self.growth, self.sampling, longest, self.batch)

    @property
    def nodes(self) -> int:
        return self.growth.nodes_drafted + 1


def _charge(texts: Sequence[Text], last: float) -> float:
    """Share the time since ``last`` among texts; returns now."""
    now = time.perf_counter()
    for text in texts:
        text.seconds += (now - last) / len(texts)
    return now
