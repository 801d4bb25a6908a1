"""What a cache holds the features of, and how its boundaries are numbered."""

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from specdec.data import TokenData
from specdec.target import Target

NUMBERING = "residual stream after b layers; 0 the embeddings, the last before the final norm"
FINAL = "last state after the final norm"
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
        tokenizer: hash of tokenizer and chat template, for messages.
        data: :func:`described`.
        engine: what ran the target.
        first_rows: how many rows of training, those that an epoch draws first; None if all are stored.
    """

    layers: tuple[int, ...]
    dtype: str
    target_dtype: str
    hidden_size: int
    target: Mapping[str, str | int | None]
    tokenizer: str
    data: Mapping[str, Any]
    engine: str
    first_rows: int | None = None
    numbering: str = NUMBERING
    final: str = FINAL

    @classmethod
    def of(
        cls,
        target: Target,
        data: TokenData,
        layers: Sequence[int],
        dtype: str,
        engine: str,
        first_rows: int | None = None,
    ) -> Self:
        """For features of this data that are about to be written; ``dtype`` may be ``target``.

        Raises:
            ValueError: no such boundary or dtype.
        """
        wrong = [b for b in layers if not 0 <= b <= target.num_layers]
        if wrong:
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
            tokenizer=tokenizer_hash(target.tokenizer),
            data=described(data),
            engine=engine,
            first_rows=first_rows,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states."""
        return (len(self.layers) + 1) * self.hidden_size * DTYPES[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        """Lossless JSON-able data."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: a key is missing or unknown, or the numbering is another.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            found = sorted(set(data) ^ names) if isinstance(data, Mapping) else data
            raise ValueError(f"{where}: not the contract of a feature cache ({found})")
        if (data["numbering"], data["final"]) != (NUMBERING, FINAL):
            raise ValueError(f"{where}: its boundaries are numbered otherwise: {data['numbering']!r}")
        kinds = {"layers": list, "hidden_size": int, "target": dict, "data": dict, "target_dtype": str, "engine": str}
        for name, kind in kinds.items():
            if not isinstance(data[name], kind):
                raise ValueError(f"{where}: {name} is {data[name]!r}")
        first = data["first_rows"]
        if first is not None and (type(first) is not int or first < 1):
            raise ValueError(f"{where}: first_rows is {first!r}")
        if any(type(b) is not int for b in data["layers"]):
            raise ValueError(f"{where}: layers is {data['layers']!r}")
        if not {"source", "fingerprint"} <= set(data["target"]):
            raise ValueError(f"{where}: target says neither source nor fingerprint")
        if data["dtype"] not in DTYPES:
            raise ValueError(f"{where}: no such dtype: {data['dtype']!r}")
        return cls(**{**data, "layers": tuple(data["layers"])})


def described(data: TokenData) -> dict[str, Any]:
    """The arguments that decide which rows there are."""
    found: dict[str, Any] = {"class": f"{type(data).__module__}.{type(data).__qualname__}"}
    for name in inspect.signature(type(data).__init__).parameters:
        if name in vars(data) and name not in INCIDENTAL:
            found[name] = vars(data)[name]
    return json.loads(json.dumps(found, default=str))


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of vocabulary, rules and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    for passing in ("truncation", "padding"):  # of the last text that it read
        rules.pop(passing, None)
    return hashlib.sha256(json.dumps([rules, tokenizer.chat_template], sort_keys=True).encode()).hexdigest()
