"""From measurements to the lines of a table: ratios, headlines, warnings."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.serving import OTHERS
from benchmarks.training_step.agreement import compare, objections
from benchmarks.training_step.measured import Measured
from benchmarks.training_step.systems import FLOOR, FULL, SPECDEC, Group

COLUMNS = (
    "system", "variant", "trains", "float32 products", "median s [min, max]", "growth MB", "after warm-up",
    "time / faster peer", "growth / its", "time / floor",
)  # fmt: skip


class Result(NamedTuple):
    """A group and what it says."""

    group: Group
    measured: list[Measured]
    objections: list[str]  # why no ratio to a peer is given

    @classmethod
    def of(cls, group: Group, measured: Sequence[Measured]) -> "Result":
        """Checks that the systems agree."""
        return cls(group, list(measured), objections(measured, group.dtype))

    def get(self, key: str) -> Measured | None:
        """A measurement by its name."""
        return next((m for m in self.measured if m.entry.key == key and m.steps), None)

    @property
    def faster_peer(self) -> Measured | None:
        """The peer with the least median, of those that have steps."""
        peers = [m for m in self.measured if m.entry.peer and m.steps]
        return min(peers, key=lambda m: m.median, default=None)

    def lines(self) -> list[list[str]]:
        """A line per measurement, in the order of ``COLUMNS``; what is not known yet is a dash."""
        return [self._line(m) for m in self.measured]

    def _line(self, m: Measured) -> list[str]:
        is_floor, is_full = m.entry.key == FLOOR, m.entry.key == FULL
        peer, floor = self.faster_peer, self.get(FLOOR)
        products = m.about["products"] if self.group.dtype == "float32" else "-"
        head = [m.entry.system, m.entry.variant, "-" if is_floor else m.entry.rows, products]
        if not m.steps:
            return [*head, *["-"] * 6]
        time = memory = over = "-"
        if peer is not None and not is_floor and not is_full:
            refused = bool(self.objections)
            time = "refused" if refused else f"{m.median / peer.median:.2f}"
            memory = "refused" if refused else f"{m.growth / peer.growth:.2f}"
        if floor is not None and not is_full:
            over = f"{m.median / floor.median:.2f}"
        seconds = f"{m.median:.3f} [{min(m.seconds):.3f}, {max(m.seconds):.3f}]"
        grown = ["-", "-"] if is_floor else [f"{m.growth:.0f}", f"{m.growth_after:.0f}"]
        return [*head, seconds, *grown, time, memory, over]

    def headline(self) -> list[str]:
        """Sentences: specdec against the faster peer, the leanest, the floor and the fully supervised step."""
        ours, peer, floor, full = self.get(SPECDEC), self.faster_peer, self.get(FLOOR), self.get(FULL)
        out = []
        if ours is None:
            return out
        if peer is not None and self.objections:
            out.append("no ratio to a peer, for the systems do not agree: " + "; ".join(self.objections))
        elif peer is not None:
            leanest = min((m for m in self.measured if m.entry.peer), key=lambda m: m.growth)
            out.append(
                f"{ours.median / peer.median:.2f} of the time and {ours.growth / peer.growth:.2f} of the memory growth "
                f"of the faster peer, {peer.entry.system} ({peer.entry.variant}); {ours.growth / leanest.growth:.2f} "
                f"of the growth of the leanest, {leanest.entry.system} ({leanest.entry.variant})"
            )
        if floor is not None:
            rate = floor.about["operations"] / floor.median / 1e9
            out.append(f"{ours.median / floor.median:.2f} times the matrix products alone ({rate:.0f} GFLOP/s there)")
        if full is not None:
            out.append(f"{ours.median / full.median:.2f} of the time of its step with all rows supervised")
        return out

    def agreement(self) -> list[str]:
        """What was compared, and how far it lies apart."""
        return [
            f"{c.key} with {c.with_key} ({c.rows}): {c.worst:.1e}"
            for c in compare(self.measured)
            if c.with_key is not None
        ]

    def warnings(self, steps: int) -> list[str]:
        """What makes the figures doubtful."""
        out = []
        disturbed = {m.entry.key: m.disturbed for m in self.measured if m.disturbed}
        if disturbed:
            names = ", ".join(f"{key} ({n})" for key, n in disturbed.items())
            out.append(f"other processes used more than {OTHERS:.0%} of the CPU during measured steps of {names}")
        if steps < 7:
            out.append(f"{steps} measured steps are fewer than seven")
        return out
