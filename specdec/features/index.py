"""``index.json``, which is written last: a folder without it is no cache yet."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from specdec.features.contract import Contract
from specdec.features.shard import Entry
from specdec.files import read_json, write_json

FORMAT = "specdec-features-2"
INDEX, JOURNAL = "index.json", "building.json"


class Index(NamedTuple):
    """What there is in a cache."""

    contract: Contract
    shards: Sequence[Entry]

    def write(self, path: Path) -> None:
        """Write it, with a hash of itself."""
        said = {"contract": self.contract.to_json(), "shards": [entry._asdict() for entry in self.shards]}
        write_json(path, {"format": FORMAT, "sha256": _digest(said), **said})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check it.

        Raises:
            ValueError: it is missing, damaged or of another format.
        """
        said = read_json(path)
        if not isinstance(said, dict) or said.pop("format", None) != FORMAT:
            raise ValueError(
                f"{path}: not a feature cache of this version (its format is not {FORMAT!r}): run specdec cache again"
            )
        if said.pop("sha256", None) != _digest(said) or set(said) != {"contract", "shards"}:
            raise ValueError(f"{path}: it was changed or damaged (its own hash differs): run specdec cache again")
        contract = Contract.from_json(said["contract"], str(path))
        return cls(contract, [Entry.from_json(entry, str(path)) for entry in said["shards"]])


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
