"""Who is measured, and which of them meet in one interleaved group."""

from typing import NamedTuple

IN_VOCAB, EVERY = "in-vocab rows", "every row"


class Entry(NamedTuple):
    """A line of the table."""

    key: str  # its name on the command line
    system: str
    variant: str
    rows: str  # which of the supervised rows count: its definition of the loss
    module: str
    options: tuple[str, ...] = ()

    @property
    def peer(self) -> bool:
        """Whether it needs the other environment."""
        return self.system in ("speculators", "specforge")


SPECDEC, FULL, FLOOR = "specdec", "specdec-full", "floor"  # the headline's, and those others are measured against

ENTRIES = (
    Entry(SPECDEC, "specdec", "compiled", IN_VOCAB, "of_specdec", ("compiled",)),
    Entry("specdec-every", "specdec", "compiled", EVERY, "of_specdec", ("compiled", "every")),
    Entry("specdec-eager", "specdec", "eager", IN_VOCAB, "of_specdec"),
    Entry("specdec-plain", "specdec", "compiled, torch's products", IN_VOCAB, "of_specdec", ("compiled", "plain")),
    Entry("specdec-counting", "specdec", "compiled, a logged step", IN_VOCAB, "of_specdec", ("compiled", "counting")),
    Entry(FULL, "specdec", "compiled, all supervised", IN_VOCAB, "of_specdec", ("compiled",)),
    Entry("speculators", "speculators", "sdpa", EVERY, "of_speculators", ("sdpa",)),
    Entry("specforge", "specforge", "sdpa", IN_VOCAB, "of_specforge"),
    Entry("specforge-compact", "specforge", "sdpa, compact teacher", IN_VOCAB, "of_specforge", ("compact",)),
    Entry(FLOOR, "floor", "matrix products alone", IN_VOCAB, "floor"),
)
KEYS = tuple(entry.key for entry in ENTRIES)
MASKED_OUT = ("specdec-eager", "specdec-plain", "specdec-counting")  # told apart with all rows supervised alone


class Group(NamedTuple):
    """Measurements whose steps alternate in time."""

    workload: str
    dtype: str
    mask: str
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """For titles."""
        return f"{self.workload}, {self.dtype}, {self.mask} rows supervised"

    def mask_of(self, entry: Entry) -> str:
        """The mask that an entry gets."""
        return "all" if entry.key == FULL else self.mask

    @property
    def cost(self) -> float:
        """About how long it takes, in no unit."""
        return (
            {"T": 0.05, "S": 1, "M": 8}[self.workload] * {"float32": 2, "bfloat16": 1}[self.dtype] * len(self.entries)
        )


def groups(workloads: list[str], dtypes: list[str], masks: list[str], keys: list[str], peers: bool) -> list[Group]:
    """The plan of a run; peers are left out where there is no environment for them."""
    plan = []
    for workload in workloads:
        for dtype in dtypes:
            for mask in masks:
                out = {FULL} if mask == "all" else set(MASKED_OUT)
                if dtype != "float32":
                    out.add("specdec-plain")  # bfloat16 products have one library
                chosen = [e for e in ENTRIES if e.key in keys and e.key not in out and (peers or not e.peer)]
                if chosen:
                    plan.append(Group(workload, dtype, mask, tuple(chosen)))
    return plan
