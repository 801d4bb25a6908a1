"""What a cache holds the features of, and how its boundaries are numbered."""

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from specdec.data import TokenData
from specdec.target import Target

NUMBERING = (
    "residual stream after b layers; 0 the embeddings, the last before the final norm; the final state after the final "
    "norm"
)
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
INCIDENTAL = ("batch_size", "num_workers", "cache")  # of the data: they change no row


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything that a cache's numbers depend on.

    Args:
        layers: boundaries stored, ascending.
        dtype: of what is stored.
        target_dtype: what the target ran in.
        target: its :attr:`specdec.target.Target.identity`.
        data: :func:`described`.
        engine: what ran the target.
        first_rows: how many rows of training, those that an epoch draws first; None if all are stored.
    """

    layers: tuple[int, ...]
    dtype: str
    target_dtype: str
    hidden_size: int
    target: Mapping[str, str | int | None]
    data: Mapping[str, Any]
    engine: str
    first_rows: int | None = None
    numbering: str = NUMBERING

    @classmethod
    def of(
        cls, target: Target, data: TokenData, layers: Sequence[int], dtype: str, engine: str,
        first_rows: int | None = None,
    ) -> Self:  # fmt: skip
        """For features of this data that are about to be written; ``dtype`` may be ``target``.

        Raises:
            ValueError: no such boundary or dtype.
        """
        if wrong := [b for b in layers if not 0 <= b <= target.num_layers]:
            raise ValueError(f"no layer boundary {wrong[0]}: this target has 0 to {target.num_layers}")
        own = str(target.dtype).removeprefix("torch.")
        if dtype not in ("target", *DTYPES):
            raise ValueError(f"--dtype {dtype}: choose target or one of {', '.join(DTYPES)}")
        return cls(
            layers=tuple(sorted(set(layers))),
            dtype=own if dtype == "target" else dtype,
            target_dtype=own,
            hidden_size=target.hidden_size,
            target=target.identity,
            data=described(data),
            engine=engine,
            first_rows=first_rows,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states."""
        return (len(self.layers) + 1) * self.hidden_size * DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        """Lossless JSON-able data; ``Contract(**data)`` is the inverse, but for the tuple of layers."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


def described(data: TokenData) -> dict[str, Any]:
    """The arguments that decide which rows there are."""
    found: dict[str, Any] = {"class": f"{type(data).__module__}.{type(data).__qualname__}"}
    for name in inspect.signature(type(data).__init__).parameters:
        if name in vars(data) and name not in INCIDENTAL:
            found[name] = vars(data)[name]
    return json.loads(json.dumps(found, default=str))
