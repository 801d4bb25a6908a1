"""From answers to tables and to the claims' verdicts."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.decoding.measured import Measured, equal_tokens, ratio
from benchmarks.decoding.prompts import PromptSet, repetition
from benchmarks.decoding.systems import CHAIN, GROWN, PLAIN, VLLM_EAGLE, VLLM_PLAIN

OVERHEAD = 0.05
LEAST_PROMPTS, LEAST_TOKENS = 16, 256
SPEEDS = (
    "system", "how", "tokens/s", "after the first", f"/ {PLAIN}", "/ faster plain vLLM", "acceptance length",
    "equal texts", "equal tokens, least and mean",
)  # fmt: skip
ROUNDS = ("system", "rounds", "round ms", "draft", "verify", "of it accept", "host", "overhead", "with calls")
STARTS = ("system", "load s", "first text s", "threads", "more")


class Verdict(NamedTuple):
    """A claim and what was found."""

    claim: str
    found: str
    holds: bool


class Results(NamedTuple):
    """The systems of one dtype."""

    dtype: str
    sets: list[PromptSet]
    measured: list[Measured]
    left_out: dict[str, str]

    @property
    def reference(self) -> Measured:
        """Whose texts the others' are compared with: eager plain decoding, where it was measured."""
        return next((m for m in self.measured if m.entry.key == "specdec-eager"), self.measured[0])

    def fastest(self, keys: Sequence[str], name: str) -> Measured | None:
        """Of some systems."""
        return max((m for m in self.measured if m.entry.key in keys), key=lambda m: m.rate(name), default=None)

    def grown(self, name: str) -> Measured | None:
        """The fastest of the growths asked for."""
        return self.fastest([m.entry.key for m in self.measured if m.entry.key.startswith(GROWN)], name)

    def repetition(self, name: str) -> float:
        """Mean over the reference's texts."""
        (each,) = (one for one in self.sets if one.name == name)
        ids = self.reference.ids(name)
        return sum(map(repetition, each.prompts, ids)) / len(ids)

    def speeds(self, name: str) -> list[list[str]]:
        """A line per system, in the order of ``SPEEDS``."""
        plain, peer = self.fastest([PLAIN], name), self.fastest(VLLM_PLAIN, name)
        out = []
        for m in self.measured:
            equal, ids = equal_tokens(m.ids(name), self.reference.ids(name)), m.ids(name)
            whole = sum(n == len(text) for n, text in zip(equal, ids, strict=True))
            against = ["-" if other is None or other is m else str(ratio(m, other, name)) for other in (plain, peer)]
            out.append(
                [
                    m.entry.key, m.entry.what, f"{m.rate(name):.0f}", f"{m.rate_after(name):.0f}", *against,
                    f"{m.acceptance(name):.2f}", f"{whole} of {len(ids)}",
                    f"{min(equal)}, {sum(equal) / len(equal):.0f}",
                ]
            )  # fmt: skip
        return out

    def rounds(self, name: str) -> list[list[str]]:
        """A line per system of specdec, in the order of ``ROUNDS``."""
        out = []
        for m in self.measured:
            found = m.round(name)
            if found is None:
                continue
            accept, overhead, calls = "-", "-", "-"
            if found.accept is not None and found.overhead is not None and found.with_calls is not None:
                accept, overhead, calls = f"{found.accept:.3f}", f"{found.overhead:.1%}", f"{found.with_calls:.1%}"
            figures = [f"{x:.3f}" for x in (found.wall, found.draft, found.verify)]
            out.append([m.entry.key, str(found.count), *figures, accept, f"{found.host:.3f}", overhead, calls])
        return out

    def starts(self) -> list[list[str]]:
        """A line per system, in the order of ``STARTS``."""
        return [
            [
                m.entry.key, f"{m.about['start_seconds']:.0f}", f"{m.about['first_text_seconds']:.0f}",
                str(m.about["threads"]),
                ", ".join(f"{name} {value}" for name, value in m.about.items() if name in ("assistant", "attention")),
            ]
            for m in self.measured
        ]  # fmt: skip

    def verdicts(self, name: str) -> list[Verdict]:
        """Of what can be judged by those measured."""
        plain, chain, grown = self.fastest([PLAIN], name), self.fastest([CHAIN], name), self.grown(name)
        out = []
        for what, ours, other, least in (
            ("plain decoding", plain, self.fastest(VLLM_PLAIN, name), 1.0),
            ("the chain of 3", chain, self.fastest(VLLM_EAGLE, name), 1.15),
            (grown.entry.what if grown else "", grown, plain, 1.8),
        ):
            if ours is not None and other is not None:
                found = ratio(ours, other, name)
                claim = f"{what} at least {least} times as fast as {other.entry.key} ({other.entry.what})"
                out.append(Verdict(claim, str(found), found.value >= least))
        for m in (chain, grown):
            found = m.round(name) if m is not None else None
            if m is not None and found is not None and found.overhead is not None:
                claim = f"{m.entry.key}: at most {OVERHEAD:.0%} of a round outside the models"
                out.append(Verdict(claim, f"{found.overhead:.1%}", found.overhead <= OVERHEAD))
        return out

    def warnings(self, name: str) -> list[str]:
        """What makes the figures of a set doubtful."""
        out = []
        disturbed = {m.entry.key: n for m in self.measured if (n := m.disturbed(name))}
        if disturbed:
            names = ", ".join(f"{key} ({n})" for key, n in disturbed.items())
            out.append(f"other processes used much of the CPU during answers of {names}")
        prompts, tokens = len(self.reference.ids(name)), len(self.reference.ids(name)[0])
        if prompts < LEAST_PROMPTS or tokens < LEAST_TOKENS:
            out.append(f"{prompts} prompts of {tokens} new tokens are fewer than {LEAST_PROMPTS} of {LEAST_TOKENS}")
        return out
