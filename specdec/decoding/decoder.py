"""Decoders, the host loop of decoding: admit prompts, run rounds, read what was committed, hand out answers.

Legend: B sequences.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from specdec.decoding.accept import Sampling
from specdec.decoding.checks import check_length, check_pair
from specdec.decoding.generation import (
    Chunk,
    Generation,
    PromptLike,
    Request,
    TextStream,
    request_ids,
)
from specdec.decoding.round import PlainRound, SpeculativeRound
from specdec.decoding.session import Compilation, DecodeSession, graphs_of, slots_for
from specdec.decoding.shapes import Chain, DraftShape
from specdec.drafter import Drafter
from specdec.target import Target
from specdec.utils.numbers import Side, check_numbers

GREEDY = Sampling()


class PlainDecoder:
    """The target alone, on the same static cache: what speculative decoding is compared with.

    Args:
        batch: B, sequences decoded side by side. Each has its own length, and its tokens are those it has alone.
        compiled: whether rounds run as compiled graphs, made for texts up to some length. The first call compiles, and
            each call does that has longer texts than any before.

    Raises:
        ValueError: the batch is smaller than one.
    """

    def __init__(
        self,
        target: Target,
        sampling: Sampling = GREEDY,
        *,
        batch: Side = 1,
        compiled: bool = False,
    ) -> None:
        check_numbers(PlainDecoder.__init__, {"batch": batch})
        self.target = target
        self.sampling = sampling
        self.batch = batch
        self.compiled = compiled
        self.name = PlainRound.name
        self.nodes = PlainRound.nodes  # verified in a pass at most, the root included
        self.graphs = graphs_of(PlainRound.sizes)  # of a compiled session
        self._idle_session: DecodeSession | None = None  # compiled, while no call uses it

    def generate(
        self,
        prompt: PromptLike,
        max_new_tokens: int = 128,
        end: Collection[int] | None = None,
        seed: int = 0,
    ) -> Generation:
        """Generate after text, a conversation (messages with ``role`` and ``content``) or token ids.

        Args:
            end: tokens to stop after; None for the target's own, ``Target.eos_token_ids``.
            seed: this text's, unread where nothing is drawn.

        Raises:
            ValueError: it is no prompt, or one that cannot be served.
        """
        request = Request(request_ids(prompt, self.target), max_new_tokens, seed)
        ((_, generation),) = self.generate_all([request], end)
        return generation

    def stream(
        self,
        prompt: PromptLike,
        max_new_tokens: int = 128,
        end: Collection[int] | None = None,
        seed: int = 0,
    ) -> Iterator[Chunk]:
        """Generate as :meth:`generate` does, chunk by chunk: the prompt's pass gives the first token, and every further
        pass its accepted drafts and a token of the target's own.

        Raises:
            ValueError: as of :meth:`generate`, at the call; or the target has no tokenizer.
        """
        request = Request(request_ids(prompt, self.target), max_new_tokens, seed)
        check_length(self.target, request.prompt, max_new_tokens, self.nodes)
        return self._chunks(request, TextStream(self.target.tokenizer, request.prompt), end)

    def _chunks(
        self, request: Request, text: TextStream, end: Collection[int] | None
    ) -> Iterator[Chunk]:
        for answer in self._passes([request], end):
            earlier = len(answer.ids) - len(answer.fresh)
            ids = answer.fresh[: request.max_new_tokens - earlier]
            texts = [text.add(token) for token in ids]
            if answer.done:
                texts[-1] += text.rest()
            yield Chunk(ids, texts, min(len(answer.fresh) - 1, len(ids)))

    def generate_all(
        self, requests: Sequence[Request], end: Collection[int] | None = None
    ) -> Iterator[tuple[int, Generation]]:
        """Generate after every prompt; yields numbers of requests and what was made of them, as they are done.

        Raises:
            ValueError: a request cannot be served, and nothing has been generated then.
        """
        for answer in self._passes(requests, end):
            if answer.done:
                yield answer.number, answer.generation(self.target)

    def passes(self, request: Request, end: Collection[int] | None = None) -> Iterator[Generation]:
        """Generate after one prompt, and yield after each target pass what has been generated so far.

        Raises:
            ValueError: the request cannot be served.
        """
        for answer in self._passes([request], end):
            yield answer.generation(self.target)

    @torch.inference_mode()
    def _passes(
        self, requests: Sequence[Request], end: Collection[int] | None
    ) -> Iterator["ServedRequest"]:
        """Serve the requests; yields an answer each time that a pass has added to it."""
        for request in requests:
            check_length(self.target, request.prompt, request.max_new_tokens, self.nodes)
        if not requests:
            return
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        session = self._session(longest)
        self._idle_session = None  # another call in the meantime gets a session of its own
        end_tokens = self.target.eos_token_ids if end is None else end
        try:
            yield from self._serve(session, requests, end_tokens)
        finally:
            if self.compiled:
                self._idle_session = session

    def _serve(
        self, session: DecodeSession, requests: Sequence[Request], end: Collection[int]
    ) -> Iterator["ServedRequest"]:
        for b in range(self.batch):  # the last caller may have left in the middle
            session.round.end(b)
        waiting = deque(
            ServedRequest(number, request, end) for number, request in enumerate(requests)
        )
        answers: list[ServedRequest | None] = [None] * self.batch
        device = self.target.device
        last = time.perf_counter()
        while waiting or any(answers):
            # admit: whatever is free takes a prompt, whose pass gives the first token
            while waiting and (free := [b for b in range(self.batch) if answers[b] is None]):
                b, answer = self._next(waiting, free, session)
                request = answer.request
                answer.sequence = b
                answer.ids = session.round.prefill(b, request.prompt, request.seed).tolist()
                answer.fresh = answer.ids
                last = _split_time([answer], last)
                if answer.done:
                    session.round.end(b)
                else:
                    answers[b] = answer
                yield answer
                last = time.perf_counter()
            running = [answer for answer in answers if answer]
            if not running:
                continue
            # a round: draft, then verify, accept and commit
            start = _timestamp(device)
            tree = session.draft()
            drafted = _timestamp(device)
            report = session.verify(tree)
            verified = _timestamp(device)
            # read what was committed: the round's last wait for the device
            rows = report.tolist()
            draft_ms = _ms(start, drafted)
            verify_ms = _ms(drafted, verified)
            for b, (count, *fresh, depth) in enumerate(rows):
                served = answers[b]
                if served is None:
                    continue
                served.commit(fresh[:count], draft_ms, verify_ms, depth)
                if served.done:
                    answers[b] = None
                    session.round.end(b)
            last = _split_time(running, last)
            yield from running
            last = time.perf_counter()

    def _next(
        self, waiting: deque["ServedRequest"], free: Sequence[int], session: DecodeSession
    ) -> tuple[int, "ServedRequest"]:
        """Choose a free sequence and the request that it takes, which waits no longer."""
        return free[0], waiting.popleft()

    def graphs_for(self, longest: int) -> int:
        """How many graphs :meth:`prepare` will compile."""
        idle = self._idle_session
        ready = idle is not None and idle.round.capacity >= longest + self.nodes
        return self.graphs if self.compiled and not ready else 0

    def prepare(self, longest: int, compilation: Compilation | None = None) -> None:
        """Compile, if so asked, for texts of up to ``longest`` tokens, the new ones included.

        ``compilation`` is of all decoders that are prepared together; it tells how far they are.
        """
        if self.compiled:
            self._session(longest, compilation)

    def _new_round(self, longest: int) -> PlainRound:
        return PlainRound(self.target, self.sampling, longest, self.batch)

    @torch.inference_mode()
    def _session(self, longest: int, compilation: Compilation | None = None) -> DecodeSession:
        if not self.compiled:
            return DecodeSession(self._new_round(longest))
        slots = longest + self.nodes
        idle = self._idle_session
        if idle is not None and idle.round.capacity >= slots:
            return idle
        slots = slots_for(self.target, slots, idle.round.capacity if idle else 0)
        self._idle_session = DecodeSession(self._new_round(slots - self.nodes), True, compilation)
        return self._idle_session


class SpeculativeDecoder(PlainDecoder):
    """Speculative decoding; the output is the target's own.

    A chain of five drafts is the shape if none is given: every rule judges it, and every engine serves it.

    Greedy, or with the rule ``one_hot``, it is plain decoding's output token for token, from the same seed; with
    ``without_replacement`` and ``block`` it has plain decoding's distribution.

    Raises:
        ValueError: drafter and target do not match, or the rule cannot judge such a shape.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        shape: DraftShape = Chain(),  # noqa: B008  frozen
        sampling: Sampling = GREEDY,
        *,
        batch: int = 1,
        compiled: bool = False,
    ) -> None:
        check_pair(target, drafter)
        shape.check(drafter.config)
        shape.check_rule(sampling.acceptance)
        if target.recurrent and not shape.in_order:
            raise ValueError(
                f"{target.source} has recurrent layers, whose state cannot branch: draft a chain, not {shape.name}"
            )
        if compiled and len(shape.sizes) > 1 and not shape.in_order:
            raise ValueError(
                f"{shape.name} branches and ends at a depth that is known only as it grows, for which there are no "
                "graphs: use --compile off"
            )
        super().__init__(target, sampling, batch=batch, compiled=compiled)
        self.drafter = drafter
        self.shape = shape
        self.name = shape.name
        self.nodes = shape.nodes_drafted + 1
        self.graphs = graphs_of(shape.sizes)

    def _new_round(self, longest: int) -> PlainRound:
        return SpeculativeRound(
            self.target, self.drafter, self.shape, self.sampling, longest, self.batch
        )


class ServedRequest:
    """A request being served."""

    def __init__(self, number: int, request: Request, end: Collection[int]) -> None:
        self.number = number
        self.request = request
        self.end = end
        self.sequence = 0  # of the round, once it is served
        self.ids: list[int] = []
        self.fresh: list[int] = []  # what the last pass added
        self.seconds = 0.0
        self.passes: list[tuple[int, float, float, int]] = []  # what Generation has per target pass

    @property
    def done(self) -> bool:
        return len(self.ids) >= self.request.max_new_tokens or self.ids[-1] in self.end

    def commit(self, ids: list[int], draft_ms: float, verify_ms: float, depth: int) -> None:
        """Take what a target pass gave to a proposal of this depth, up to an end token."""
        ends = [place for place, token in enumerate(ids) if token in self.end]
        if ends:
            ids = ids[: ends[0] + 1]
        self.passes.append((len(ids) - 1, draft_ms, verify_ms, depth))
        self.ids = self.ids + ids
        self.fresh = ids

    def generation(self, target: Target) -> Generation:
        columns = zip(*self.passes, strict=True) if self.passes else [()] * 4
        accepted, draft_ms, verify_ms, drafted = columns
        ids = self.ids[: self.request.max_new_tokens]
        tokenizer = target.tokenizer if target.has_tokenizer else None
        timed = (accepted, self.seconds, draft_ms, verify_ms, drafted)
        return Generation(ids, *timed, self.request.prompt, tokenizer)


def _split_time(answers: Sequence[ServedRequest], last: float) -> float:
    """Share the time since ``last`` among the answers that a pass served, and return the present time."""
    now = time.perf_counter()
    for answer in answers:
        answer.seconds += (now - last) / len(answers)
    return now


def _timestamp(device: torch.device) -> Any:
    """Now; on a GPU, an event that the device passes when it has done everything before, without a wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(start: Any, end: Any) -> float:
    """Milliseconds between two marks that the device has passed."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)
