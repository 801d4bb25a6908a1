"""Mixes: training data of several sources, each with a name and a share of the rows.

Legend: S sources.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.data.loader import Mix
from specdec.data.rows import stem
from specdec.data.tokens import Encoded
from specdec.utils.numbers import Positive, check_numbers

NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class MixSource:
    """A source of a mix.

    Args:
        source: paths, globs and ``hub:REPOSITORY[@REVISION]:CONFIG:SPLIT``.
        name: for the log and the metrics, ``val/loss/NAME``; None takes the name of the first file.
        weight: its share of the rows of an epoch, against the others' weights; None for all of them gives every row of
            every source once an epoch.
    """

    source: str | list[str]
    name: str | None = None
    weight: Positive | None = None

    def __post_init__(self) -> None:
        check_numbers(MixSource, vars(self), "data.train.")

    @property
    def patterns(self) -> list[str]:
        """Return the source as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source)


class SourceDocuments(NamedTuple):
    """The documents of one source."""

    source: MixSource
    documents: Encoded


def read_mix(given: Any, where: str) -> list[MixSource]:
    """Return the sources of a mix, named; plain paths are one source without a name.

    Args:
        where: the option's name, for messages.

    Raises:
        ValueError: a name comes twice or cannot be one, or some sources have weights and others none.
    """
    listed: list[Any] = [given] if isinstance(given, MixSource | str) else list(given)
    if all(isinstance(item, str) for item in listed):
        return [MixSource(given)]
    if wrong := [item for item in listed if not isinstance(item, MixSource)]:
        raise ValueError(
            f"{where}: {wrong[0]!r:.60}: give paths alone, or every source as MixSource, a mapping in YAML"
        )
    mix = [
        MixSource(item.source, item.name or stem(item.patterns[0]), item.weight) for item in listed
    ]
    names = [str(item.name) for item in mix]
    if wrong_names := [name for name in names if not NAME.fullmatch(name)]:
        raise ValueError(
            f"{where}: {wrong_names[0]!r:.60} is no name: give one of letters, digits, '.', '-' and '_'"
        )
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"{where}: two sources are called {twice[0]}: give each its own name")
    if len({item.weight is None for item in mix}) > 1:
        raise ValueError(f"{where}: give all sources a weight, or none")
    return mix


def mix_of(sources: Sequence[MixSource], counts: Sequence[int]) -> Mix | None:
    """Return how the rows of the sources are mixed, or None if each is drawn once an epoch.

    Raises:
        ValueError: a weight is less than a row of an epoch.
    """
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return None
    total = sum(counts)
    wanted_S = torch.tensor(weights, dtype=torch.float64) * total / sum(weights)
    drawn_S = wanted_S.floor().long()
    largest_S = torch.argsort(wanted_S - drawn_S, descending=True, stable=True)
    drawn_S[largest_S[: total - int(drawn_S.sum())]] += 1
    for source, drawn in zip(sources, drawn_S.tolist(), strict=True):
        if not drawn:
            raise ValueError(
                f"data.train: the weight of {source.name} is less than one of the {total:,} rows of an epoch: raise "
                "it, or leave the source out"
            )
    return Mix(tuple(counts), tuple(drawn_S.tolist()))


def shares(
    sources: Sequence[MixSource], counts: Sequence[int], supervised_S: Tensor
) -> list[dict[str, Any]]:
    """Return what share of an epoch each source has, JSON-ready.

    Args:
        supervised_S: supervised tokens of all its rows.
    """
    mix = mix_of(sources, counts)
    drawn = counts if mix is None else mix.drawn
    tokens_S = supervised_S.double() * torch.tensor(drawn) / torch.tensor(counts)
    return [
        {
            "name": source.name, "source": source.patterns, "weight": source.weight, "rows": rows,
            "rows_of_an_epoch": of_epoch, "share_of_rows": of_epoch / sum(drawn), "share_of_supervised_tokens": share,
        }
        for source, rows, of_epoch, share in zip(
            sources, counts, drawn, (tokens_S / tokens_S.sum()).tolist(), strict=True
        )
    ]  # fmt: skip
