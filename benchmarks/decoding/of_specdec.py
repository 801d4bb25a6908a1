"""specdec's decoders."""

import time
from typing import Any
from unittest.mock import patch

from benchmarks.decoding.outside import Outside
from benchmarks.decoding.worker import Job, Made, System
from specdec.decoding import Generation, PlainDecoder, SpeculativeDecoder, parse_growth
from specdec.decoding.decoder import Request
from specdec.decoding.room import Room
from specdec.drafter import load
from specdec.target import Target


class Measured(System):
    """Options: ``compiled``, and ``growth`` unless decoding is plain."""

    packages = ("specdec-lightning", "transformers")

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.prompt_ms, prefill = 0.0, Room.prefill

        def timed(room: Room, *args: Any) -> Any:
            begin = time.perf_counter()
            out = prefill(room, *args)
            self.prompt_ms = 1e3 * (time.perf_counter() - begin)
            return out

        self._prefill = timed
        self.compiled = bool(job.options["compiled"])
        self.outside: Outside | None = None
        self.target, self.drafter, self.growth = Target.load(job.target, dtype=job.dtype), None, None
        self.decoder = PlainDecoder(self.target, compiled=self.compiled)
        if "growth" in job.options:
            assert job.drafter is not None
            self.growth = parse_growth(job.options["growth"])
            self.drafter = load(job.drafter, dtype=self.target.dtype)
            self.decoder = SpeculativeDecoder(self.target, self.drafter, self.growth, compiled=self.compiled)
            self.more["growth"] = self.growth.name

    def generate(self, prompt: list[int], tokens: int) -> Generation:
        with patch.object(Room, "prefill", self._prefill):  # takes microseconds
            return self.decoder.generate(prompt, tokens)

    def made(self, raw: Generation) -> Made:
        passes = len(raw.accepted)
        committed = passes + sum(raw.accepted)
        return Made(raw.ids, passes, committed, self.prompt_ms, sum(raw.draft_ms), sum(raw.verify_ms))

    def first(self, prompt: list[int], tokens: int) -> None:
        requests = [Request(prompt, 1), Request(prompt, tokens)]  # the longer one decides which graph is taken
        next(self.decoder.generate_all(requests))

    def accept(self, prompt: list[int], tokens: int) -> dict[str, float] | None:
        if not self.compiled:
            return None
        if self.outside is None:
            self.outside = Outside(self.target, self.drafter, self.growth, prompt, tokens)
        return self.outside.measure()
