"""Which targets, ways of decoding and prompts there are, and how many tokens of each.

Legend: T tokens.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.losslessness.greedy import Way
from benchmarks.losslessness.targets import FAMILIES, SPECS, VOCAB, fitted, random_target, walks
from specdec.decoding import Chain, ConfidentChain, DynamicTree, Growth, Request, StaticTree
from specdec.drafter import Drafter, DrafterSpec
from specdec.embedded.config import EmbeddedConfig
from specdec.embedded.corpus import corpus
from specdec.embedded.rows import stream_rows
from specdec.embedded.source import EMBEDDED, TargetSource
from specdec.target import Target

GROWTHS: tuple[Growth, ...] = (Chain(4), ConfidentChain(6, 0.2), StaticTree(), DynamicTree(depth=4, top_k=3, nodes=12))
EAGER = tuple(Way(growth, batch) for growth in GROWTHS for batch in (1, 4))
COMPILED = [
    tuple(Way(growth, batch, True) for growth, batch in zip(GROWTHS, batches, strict=True))
    for batches in ((1, 4, 1, 4), (4, 1, 4, 1))
]
ENDED = 0.1  # tokens of the runs with an end token, over those without one: at least


class Part(NamedTuple):
    """A target with its drafter, and what it is asked."""

    name: str
    share: float  # of the tokens
    lengths: tuple[int, ...]  # of a set of prompts; the last ends just before the target's last position
    most: int  # new tokens of a prompt

    @property
    def family(self) -> str:
        """The name's last word."""
        return self.name.split()[-1]


RANDOM = tuple(Part(f"random {family}", 0.23, (1, 2, 17, 90, 200, 250), 128) for family in FAMILIES)
PARTS = (*RANDOM, Part(EMBEDDED, 0.08, (1, 30, 300, 2040), 96))


def chosen(names: Collection[str]) -> list[Part]:
    """The parts of these targets, with shares that add up to one again."""
    some = [part for part in PARTS if part.family in names]
    whole = sum(part.share for part in some)
    return [part._replace(share=part.share / whole) for part in some]


def load(part: Part, dtype: torch.dtype) -> Target:
    """The target."""
    if part.name == EMBEDDED:
        return TargetSource(dtype=str(dtype).removeprefix("torch.")).load()
    return random_target(part.family, dtype)


def fit(part: Part, target: Target, steps: int) -> Drafter:
    """A drafter, fitted to the float32 target."""
    generator = torch.Generator().manual_seed(1)
    if part.name != EMBEDDED:
        return fitted(target, SPECS[part.family], (walks(8, 64, generator) for _ in range(steps)))
    texts = [source.text for source in corpus(EmbeddedConfig().seed).train[:200]]
    rows_RT = stream_rows(target.tokenizer, texts, 256)

    def batches() -> Iterator[Tensor]:
        for _ in range(steps // 3):
            yield rows_RT[torch.randperm(len(rows_RT), generator=generator)[:4]]

    return fitted(target, DrafterSpec(draft_vocab_size="all"), batches(), 2e-3)


def ways(part: Part, dtype: torch.dtype) -> tuple[Way, ...]:
    """Nobody compiles for float64, which is there to leave out rounding; compiled batches alternate among targets."""
    turn = [one.family for one in PARTS].index(part.family) % len(COMPILED)
    return EAGER if dtype == torch.float64 else (*EAGER, *COMPILED[turn])


def requests(part: Part, target: Target, tokens: int) -> list[Request]:
    """Prompts enough for ``tokens`` new tokens of all parts and runs together."""
    generator, found = torch.Generator().manual_seed(2), list[Request]()
    most, runs = target.config.max_position_embeddings, len(ways(part, target.dtype))
    if part.name == EMBEDDED:
        texts = [source.text for source in corpus(EmbeddedConfig().seed).held_out]
        stream_T = stream_rows(target.tokenizer, texts, 4096)[:, 1:].flatten()
    while sum(request.max_new_tokens for request in found) * runs * (1 + ENDED) < tokens * part.share:
        for length in part.lengths:
            if part.name == EMBEDDED:
                at = int(torch.randint(len(stream_T) - length, (1,), generator=generator))
                ids_T = stream_T[at : at + length]
            else:
                ids_T = torch.randint(VOCAB, (length,), generator=generator)
            found.append(Request(ids_T.tolist(), min(part.most, most - length)))
    return found
