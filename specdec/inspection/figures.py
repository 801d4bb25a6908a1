"""What there is to know of training data: lengths, what is supervised, what was cut, and what it is packed into.

Legend: N documents.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.data import Batch, ChatData, Document, TokenData
from specdec.data.layouts import named, recognise
from specdec.data.rows import Row, each_row, find_sources

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
MOST = 5  # of tokens that turns end with

Record = dict[str, Any]


def documents_of(data: TokenData, tokenizer: Any) -> dict[str, list[Document]]:
    """The documents of every split that has its own.

    Raises:
        ValueError: the data cannot be read.
        MaskError: no token of a split is supervised, or every one.
    """
    train, validation = data.documents(tokenizer)
    test = data.test_documents(tokenizer)
    return {"train": train, "validation": validation} | ({} if test is None else {"test": test})


def inspected(data: TokenData, documents: dict[str, list[Document]], tokenizer: Any) -> Record:
    """The figures of every split, as JSON has them."""
    of = _conversations(data, tokenizer) if isinstance(data, ChatData) else {}
    record: Record = {"data": type(data).__name__, "seq_len": data.seq_len, "splits": {}}
    for name, found in documents.items():
        record["splits"][name] = _split(found, data.pack(found), data, tokenizer) | of.get(name, {})
    if isinstance(data, ChatData):
        record["layouts"] = _layouts(data)
    return record


def _split(documents: Sequence[Document], rows: Batch, data: TokenData, tokenizer: Any) -> Record:
    sizes_N = torch.tensor([len(document.ids_T) for document in documents])
    supervised_N = torch.tensor([int(document.loss_mask_T.sum()) for document in documents])
    ends = Counter(token for document in documents for token in _run_ends(document))
    runs = sum(ends.values())
    return {
        "documents": len(documents),
        "tokens": int(sizes_N.sum()),
        "supervised": int(supervised_N.sum()),
        "supervised_share": int(supervised_N.sum()) / max(int(sizes_N.sum()), 1),
        "supervised_share_of_documents": _quantiles(supervised_N / sizes_N),
        "supervised_runs": runs,
        "supervised_runs_of_documents": runs / len(documents),
        "runs_end_with": {tokenizer.decode([token]): count / runs for token, count in ends.most_common(MOST)},
        "lengths": _quantiles(sizes_N),
        "supervised_lengths": _quantiles(supervised_N),
        "histogram": _histogram(sizes_N),
        "rows": len(rows.ids_BT),
        "padding_share": data.padding_share(rows),
    }


def _conversations(data: ChatData, tokenizer: Any) -> dict[str, Record]:
    """What truncation and missing answers cost."""
    return {
        name: {
            **{key: value for key, value in encoded.lost._asdict().items() if key not in ("tokens", "supervised")},
            "dropped": encoded.lost.dropped,
            "lengths": _quantiles(encoded.lengths_N),
            "supervised_lengths": _quantiles(encoded.supervised_N),
            "histogram": _histogram(encoded.lengths_N),
        }
        for name, encoded in data.conversations(tokenizer).items()
    }


def _layouts(data: ChatData) -> dict[str, int]:
    chosen = None if data.layout is None else named(data.layout)
    patterns = [one for one in (data.train, data.val, data.test) if one is not None]
    sources = dict.fromkeys(source for one in patterns for source in find_sources(one))
    left_out: list[str] | None = [] if data.broken == "drop" else None

    def name(row: Row) -> str:
        return recognise(row.values, row.place, chosen).name

    return dict(Counter(found for source in sources for found in each_row(source, name, left_out)).most_common())


def _run_ends(document: Document) -> list[int]:
    """The last token of each supervised run."""
    mask_T = document.loss_mask_T
    last_T = mask_T & ~torch.cat([mask_T[1:], torch.zeros(1, dtype=torch.bool)])
    return document.ids_T[last_T].tolist()


def _quantiles(values_N: Tensor) -> dict[str, float]:
    found = values_N.double().quantile(torch.tensor(QUANTILES, dtype=torch.double), interpolation="nearest")
    return {f"{q:.0%}": round(value, 4) for q, value in zip(QUANTILES, found.tolist(), strict=True)}


def _histogram(lengths_N: Tensor) -> list[tuple[int, int]]:
    """(upper end, documents) of lengths that double: up to 16, 32, 64, ... tokens."""
    ends = [16]
    while ends[-1] < int(lengths_N.max()):
        ends.append(2 * ends[-1])
    bins_N = torch.bucketize(lengths_N, torch.tensor(ends))
    return list(zip(ends, torch.bincount(bins_N, minlength=len(ends)).tolist(), strict=True))
