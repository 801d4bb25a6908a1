"""Plain decoding that records the target's states of every token, as the passes that generate the text compute them.

The pass over a prompt gives the states of its tokens, and each later pass those of the token that it reads. The last
token of an answer is read by no pass, so it has no states. A prompt that begins with a text that is still in the cache,
as the next turn of a conversation does, is read from where the two differ; the states before that are there.

Legend: B sequences, S slots, R tokens with states, N boundaries, H hidden.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.decoding.accept import DraftTree, Sampling
from specdec.decoding.decoder import PlainDecoder, ServedRequest
from specdec.decoding.generation import Generation, Request
from specdec.decoding.round import PlainRound
from specdec.decoding.session import Compilation, DecodeSession
from specdec.nn.view import View
from specdec.target import Target, TargetOutput


class RecordedText(NamedTuple):
    """A prompt and its answer, with the states of all tokens but the answer's last, on the CPU."""

    generation: Generation
    aux_RNH: Tensor
    final_RH: Tensor


class RecordingRound(PlainRound):
    """A round of plain decoding that keeps the states of every token in its sequence's slots.

    Args:
        layers: boundaries whose states are kept; the final state is kept in any case.
    """

    def __init__(
        self, target: Target, sampling: Sampling, longest: int, batch: int, layers: Sequence[int]
    ) -> None:
        self.aux_layers = tuple(layers)  # before the base, which sizes its buffers by it
        super().__init__(target, sampling, longest, batch)
        shape = (batch, self.capacity, len(layers) + 1, target.hidden_size)
        # boundary by boundary, the final state last
        self.states_BSNH = torch.zeros(shape, dtype=target.dtype, device=target.device)
        # what is in each sequence's slots
        self.texts = [np.zeros(0, np.int64) for _ in range(batch)]
        self._out: TargetOutput | None = None  # of the last pass

    def grow(self, longest: int) -> None:
        """Make room for texts of up to ``longest`` tokens; what is in the slots stays."""
        more = longest + self.nodes - self.capacity
        if more <= 0:
            return
        self.capacity += more
        self.cache.grow(self.capacity)
        self.states_BSNH = F.pad(self.states_BSNH, (0, 0, 0, 0, 0, more))

    def shared(self, b: int, prompt: Sequence[int]) -> int:
        """How many of a prompt's first tokens need no pass, since they are in the slots; never all."""
        if self.target.recurrent:  # its states are those after a text's last token
            return 0
        text = self.texts[b]
        length = min(len(text), len(prompt) - 1)
        differs = np.flatnonzero(text[:length] != np.asarray(prompt[:length]))
        return int(differs[0]) if len(differs) else length

    def run_target(self, ids_BT: Tensor, view: View) -> TargetOutput:
        self._out = super().run_target(ids_BT, view)
        return self._out

    def read_prompt(self, b: int, prompt: list[int]) -> TargetOutput:
        """Read the part of a prompt that is not in the slots, and keep its states."""
        first = self.shared(b, prompt)
        self.texts[b] = self.texts[b][:first]  # if the pass fails, the rest is no text
        out = self.read_chain(b, prompt[first:], first)
        self.states_BSNH[b, first : len(prompt)] = _joined(out)[0]
        self.texts[b] = np.asarray(prompt)
        return out

    def verify(self, tree: DraftTree) -> Tensor:
        """As plain decoding does, and keep the states of the tokens that the pass has read."""
        # a sequence that is not live gets another's states behind its text, where nothing stands
        place_B = self.length_B.clone()
        report = super().verify(tree)
        assert self._out is not None
        rows_B = torch.arange(len(place_B), device=place_B.device)
        self.states_BSNH[rows_B, place_B] = _joined(self._out)[:, 0]
        return report

    def end(self, b: int) -> None:
        """Sequence ``b`` is done; its text stays in its slots until another one takes them."""
        self.live_B[b] = False
        self.count_B[b] = 0

    def recorded(self, b: int, generation: Generation) -> RecordedText:
        """Return what sequence ``b``, which is done, has in its slots, and note its text."""
        self.texts[b] = np.asarray([*generation.prompt, *generation.ids[:-1]])
        states_RNH = self.states_BSNH[b, : len(self.texts[b])].to("cpu", copy=True)
        return RecordedText(generation, states_RNH[:, :-1], states_RNH[:, -1])


class RecordingDecoder(PlainDecoder):
    """The target alone, with the states of what it reads and writes.

    It keeps its sequences between calls, and a request takes the one whose text has most of its prompt. The tokens are
    those of :class:`PlainDecoder`; a shared beginning that is not read again moves them by no more than rounding does.

    Args:
        layers: boundaries 0..L whose states are kept.
    """

    def __init__(
        self, target: Target, sampling: Sampling, batch: int, layers: Sequence[int]
    ) -> None:
        super().__init__(target, sampling, batch=batch)
        self.layers = tuple(layers)
        self._round: RecordingRound | None = None

    def record(
        self, requests: Sequence[Request], end: Collection[int] | None = None
    ) -> Iterator[tuple[int, RecordedText]]:
        """As :meth:`generate_all`, with the states.

        Raises:
            ValueError: a request cannot be served, and nothing has been generated then.
        """
        for answer in self._passes(requests, end):
            if answer.done:
                assert self._round is not None
                generation = answer.generation(self.target)
                yield answer.number, self._round.recorded(answer.sequence, generation)

    def forget(self) -> None:
        """Let go of all texts, and of their memory."""
        self._round = None

    def _session(self, longest: int, compilation: Compilation | None = None) -> DecodeSession:
        if self._round is None:
            self._round = RecordingRound(
                self.target, self.sampling, longest, self.batch, self.layers
            )
        self._round.grow(longest)
        return DecodeSession(self._round)

    def _next(
        self, waiting: deque[ServedRequest], free: Sequence[int], session: DecodeSession
    ) -> tuple[int, ServedRequest]:
        assert self._round is not None
        shared = self._round.shared
        # of equal ones the first
        b, answer = max(
            product(free, waiting), key=lambda pair: shared(pair[0], pair[1].request.prompt)
        )
        waiting.remove(answer)
        return b, answer


def _joined(out: TargetOutput) -> Tensor:
    """The states at the boundaries and the final one behind them, (B, T, N + 1, H)."""
    return torch.cat([out.aux_BTNH, out.final_BTH[:, :, None]], dim=2)
