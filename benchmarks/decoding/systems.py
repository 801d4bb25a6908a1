"""Who is measured, and who is left out and why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

PLAIN, CHAIN, GROWN = "specdec", "specdec-chain3", "specdec-growth"
VLLM_PLAIN, VLLM_EAGLE = ("vllm-eager", "vllm"), ("vllm-eagle3-eager", "vllm-eagle3")
DRAFT_TOKENS = 3  # of the chain and of vLLM's EAGLE-3
LOOKED_UP = 4  # tokens a round of prompt lookup proposes


class Entry(NamedTuple):
    """A line of the table."""

    key: str
    what: str
    module: str
    options: dict[str, Any]

    @property
    def ours(self) -> bool:
        """Whether it is specdec's."""
        return self.module == "of_specdec"


class Means(NamedTuple):
    """What a run was given."""

    drafter: str | None
    vllm: str | None  # python of its environment
    assistant: str | None
    growths: Sequence[str]


def entries(growths: Sequence[str]) -> list[Entry]:
    """Everyone there is."""
    chain = f"chain:depth={DRAFT_TOKENS}"
    ours = [
        Entry("specdec-eager", "plain, eager", "of_specdec", {"compiled": False}),
        Entry(PLAIN, "plain, compiled", "of_specdec", {"compiled": True}),
        Entry(CHAIN, f"{chain}, compiled", "of_specdec", {"compiled": True, "growth": chain}),
    ]
    names = [GROWN, *(f"{GROWN}-{number}" for number in range(2, len(growths) + 1))]
    ours += [
        Entry(name, f"{growth}, compiled", "of_specdec", {"compiled": True, "growth": growth})
        for name, growth in zip(names, growths or [""], strict=False)
    ]
    vllm = [
        Entry(key, f"{what}, {how}", "of_vllm", {"eager": how == "eager", "draft_tokens": tokens})
        for what, keys, tokens in (
            ("plain", VLLM_PLAIN, 0),
            (f"EAGLE-3 of {DRAFT_TOKENS} tokens", VLLM_EAGLE, DRAFT_TOKENS),
        )
        for key, how in zip(keys, ("eager", "its own compilation"), strict=True)
    ]
    transformers = [
        Entry("transformers", "generate", "of_transformers", {}),
        Entry("transformers-lookup", f"prompt lookup of {LOOKED_UP}", "of_transformers", {"lookup": LOOKED_UP}),
        Entry("transformers-assisted", "assisted generation", "of_transformers", {"assisted": True}),
    ]
    return [*ours, *vllm, *transformers]


KEYS = tuple(entry.key for entry in entries([]))  # of the command line; GROWN stands for all growths


def _family(entry: Entry) -> str:
    return GROWN if entry.key.startswith(GROWN) else entry.key


def choose(keys: Sequence[str], means: Means) -> tuple[list[Entry], dict[str, str]]:
    """Who takes part, and by name why others do not."""
    chosen, left_out = [], {}
    for entry in entries(means.growths):
        needs_drafter = "growth" in entry.options or entry.options.get("draft_tokens")
        reason = (
            "not among --systems" if _family(entry) not in keys
            else "no --drafter" if needs_drafter and means.drafter is None
            else "no --growth" if entry.options.get("growth") == ""
            else "no --vllm" if entry.module == "of_vllm" and means.vllm is None
            else "no --assistant" if entry.options.get("assisted") and means.assistant is None
            else None
        )  # fmt: skip
        if reason is None:
            chosen.append(entry)
        else:
            left_out[entry.key] = reason
    return chosen, left_out
