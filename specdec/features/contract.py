"""What a cache of features promises: everything that its numbers depend on.

Legend: R tokens of a row before its padding, P tokens of a shard, N stored boundaries, H hidden.
"""

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from specdec.data import MixSource, TokenData
from specdec.target import Target, TargetOutput
from specdec.utils.config import class_name, differences, to_text

# kept with a scale for every state; the largest number of each
SCALED = {torch.float8_e4m3fn: 448.0}
DTYPES = {
    str(x).removeprefix("torch."): x
    for x in (torch.float64, torch.float32, torch.bfloat16, torch.float16, *SCALED)
}
INCIDENTAL = ("batch_size",)  # of the data: it changes no row


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything that a cache's numbers depend on.

    Args:
        layers: boundaries stored, ascending: 0 the embeddings, b the residual stream after b layers, before the final
            norm; the final state, after it, is stored in any case.
        dtype: of what is stored.
        target_dtype: what the target ran in.
        target: its :attr:`specdec.target.Target.identity`.
        data: :func:`described`.
        engine: what ran the target.
        first_rows: how many rows of training, those that an epoch draws first; None if all are stored.
        first_val_rows: how many rows of validation, in their order; None if all are stored.
    """

    layers: tuple[int, ...]
    dtype: str
    target_dtype: str
    hidden_size: int
    target: Mapping[str, str | int | None]
    data: Mapping[str, Any]
    engine: str
    first_rows: int | None = None
    first_val_rows: int | None = None

    @classmethod
    def of(
        cls, target: Target, data: TokenData, layers: Sequence[int], dtype: str, engine: str,
        first_rows: int | None = None, first_val_rows: int | None = None,
    ) -> Self:  # fmt: skip
        """For features of this data that are about to be written; ``dtype`` may be ``target``.

        Raises:
            ValueError: no such boundary.
        """
        if wrong := [b for b in layers if not 0 <= b <= target.num_layers]:
            raise ValueError(
                f"no layer boundary {wrong[0]}: this target has 0 to {target.num_layers}"
            )
        target_dtype = str(target.dtype).removeprefix("torch.")
        return cls(
            layers=tuple(sorted(set(layers))), dtype=target_dtype if dtype == "target" else dtype,
            target_dtype=target_dtype, hidden_size=target.hidden_size, target=target.identity, data=described(data),
            engine=engine, first_rows=first_rows, first_val_rows=first_val_rows,
        )  # fmt: skip

    def columns(self, boundaries: int | None = None) -> dict[str, "Column"]:
        """What there is of every token: its states at all boundaries, or this many, and its final one; scales, too."""
        N = len(self.layers) if boundaries is None else boundaries
        H = self.hidden_size
        dtype = DTYPES[self.dtype]
        columns = {"aux_PNH": Column((N, H), dtype), "final_PH": Column((H,), dtype)}
        if dtype in SCALED:
            columns |= {
                "aux_scale_PN": Column((N,), torch.float32),
                "final_scale_P": Column((), torch.float32),
            }
        return columns

    def empty(self, R: int) -> list[Tensor]:
        """Columns of a row of R tokens, yet to be filled."""
        return [
            torch.empty(R, *column.shape, dtype=column.dtype) for column in self.columns().values()
        ]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states."""
        return sum(column.token_bytes for column in self.columns().values())

    def encode(self, aux_RNH: Tensor, final_RH: Tensor) -> tuple[Tensor, ...]:
        """A row's columns, on the CPU, of its states; ValueError if one is not finite in the dtype stored."""
        states = (aux_RNH, final_RH)
        dtype = DTYPES[self.dtype]
        if dtype in SCALED:  # the largest number of a token's state becomes the dtype's largest
            scales = [
                state.float().abs().amax(-1).clamp(min=1e-30) / SCALED[dtype] for state in states
            ]
            scaled = [
                (state.float() / scale[..., None]).to(dtype)
                for state, scale in zip(states, scales, strict=True)
            ]
            columns = (*scaled, *scales)
        else:
            columns = tuple(state.to(dtype) for state in states)
        aux, final = columns[-2:]  # the scales, if there are any
        names = (*(f"boundary {b}" for b in self.layers), "the final state")
        for name, column in zip(names, (*aux.unbind(1), final), strict=True):
            if not column.isfinite().all():
                raise ValueError(
                    f"the target's {name} holds NaN or infinity: run it in a wider dtype"
                )
        return tuple(column.cpu().contiguous() for column in columns)

    def decode(self, columns: Sequence[Tensor], dtype: torch.dtype) -> TargetOutput:
        """The states that columns hold, in ``dtype``, where they lie."""
        states = columns[:2]
        scales = columns[2:]
        if not scales:
            return TargetOutput(*(state.to(dtype) for state in states))
        return TargetOutput(
            *(
                (state.float() * scale[..., None]).to(dtype)
                for state, scale in zip(states, scales, strict=True)
            )
        )

    def differences(self, now: Self) -> str:
        """What was otherwise in this one, in words; nothing if all is the same."""
        changes = differences(self.to_json(), now.to_json())
        return "; ".join(f"{key} was {to_text(a)}, is {to_text(b)}" for key, a, b in changes)

    def to_json(self) -> dict[str, Any]:
        """JSON-able data; ``Contract(**data)`` is the inverse, except for the tuple of layers."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


class Column(NamedTuple):
    """One kind of numbers that are kept of every token."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's."""
        return math.prod(self.shape) * self.dtype.itemsize


def described(data: TokenData) -> dict[str, Any]:
    """The arguments that decide which rows there are."""
    names = [
        name for name in inspect.signature(type(data).__init__).parameters if name not in INCIDENTAL
    ]
    arguments = {name: vars(data)[name] for name in names if name in vars(data)}
    return json.loads(json.dumps(arguments | {"class": class_name(type(data))}, default=_plain))


def _plain(value: Any) -> Any:
    """A source of a mix as its settings, anything else as text."""
    return vars(value) if isinstance(value, MixSource) else str(value)
