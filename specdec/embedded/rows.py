"""Training rows: a stream of tokens cut into equal pieces, each behind a ``<s>``.

Legend: R rows, T predicted tokens of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast


def stream_rows(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], seq_len: int) -> Tensor:
    """Cut the texts, joined with ``</s>`` between them, into rows of ``<s>`` and ``seq_len`` tokens; the rest is lost.

    A row may start anywhere in a file, so the model knows texts that begin in the middle.

    Returns:
        int64 (R, T + 1): the input is ``[:, :-1]``, what it should predict ``[:, 1:]``.

    Raises:
        ValueError: the texts do not fill one row.
    """
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    stream = torch.tensor([id_ for ids in encoded for id_ in (*ids, tokenizer.eos_token_id)])
    count = len(stream) // seq_len
    if count == 0:
        raise ValueError(f"seq_len is {seq_len}: the corpus has only {len(stream)} tokens for a row of this length")
    pieces_RT = stream[: count * seq_len].view(count, seq_len)
    return torch.cat([torch.full((count, 1), tokenizer.bos_token_id), pieces_RT], dim=1)


def training_order(rows: int, wanted: int, seed: int) -> Tensor:
    """Numbers of ``wanted`` rows: all rows in random order, then all again in another; int64 (wanted,)."""
    generator = torch.Generator().manual_seed(seed)
    passes = -(-wanted // rows)
    return torch.cat([torch.randperm(rows, generator=generator) for _ in range(passes)])[:wanted]


def spread(rows_RT: Tensor, wanted: int) -> Tensor:
    """At most ``wanted`` rows, evenly spaced."""
    count = min(wanted, len(rows_RT))
    return rows_RT[torch.arange(count) * len(rows_RT) // count]
