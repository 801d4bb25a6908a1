"""Conversations into documents: the target's own template, one tokenisation, and which tokens are the model's own.

The mask is found in characters of the rendered text and carried over to tokens by their offsets. Pieces are never
tokenised by themselves, and nothing is searched for by marker strings: tokens merge across boundaries, and users
write markers too.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from specdec.data.batch import Document
from specdec.data.conversations import Conversation
from specdec.data.encoded import Encoded
from specdec.data.template import Spans, Template
from specdec.progress import progress

CHUNK = 256  # conversations tokenised in one call


def token_mask(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[bool]:
    """Tokens that begin inside a span. One that begins before it carries a piece of the header, and is left out.

    White space that a tokenizer trims off its offsets belongs to the token behind it.
    """
    ends = [0, *(end for _, end in offsets)]
    starts = [min(start, previous) for (start, _), previous in zip(offsets, ends, strict=False)]
    mask = [False] * len(starts)
    token = 0
    for first, last in spans:
        while token < len(starts) and starts[token] < last:
            mask[token] = starts[token] >= first
            token += 1
    return mask


def encode(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int, left_out: list[str] | None = None
) -> Encoded:
    """Conversations rendered and tokenised once each, cut to ``max_length`` tokens.

    Args:
        left_out: takes why the template refuses a conversation, which is left out then; None stops at the first.

    Raises:
        ValueError: there is no usable chat template, or a row cannot be rendered.
    """
    template = Template(tokenizer)
    documents: list[Document] = []
    lengths, supervised = [], []
    with progress("tokenising", "conversations", len(conversations)) as advance:
        for start in range(0, len(conversations), CHUNK):
            chunk = conversations[start : start + CHUNK]
            for ids, mask in _tokenised(chunk, template, tokenizer, left_out):
                ids_T, mask_T = torch.tensor(ids[:max_length]), torch.tensor(mask[:max_length])
                documents.append(Document(ids_T.long(), mask_T.bool()))
                lengths.append(len(ids))
                supervised.append(sum(mask))
            advance(len(chunk))
    if not documents:
        raise ValueError(f"no conversation is left: {'; '.join((left_out or ['there was none'])[:1])}")
    return Encoded(documents, torch.tensor(lengths), torch.tensor(supervised), left_out or [])


def _tokenised(
    conversations: Sequence[Conversation], template: Template, tokenizer: Any, left_out: list[str] | None
) -> Iterator[tuple[list[int], list[bool]]]:
    """Ids and mask of each that the template does not refuse."""
    rendered = []
    for conversation in conversations:
        try:
            rendered.append(template.render(conversation))
        except ValueError as error:
            if left_out is None:
                raise
            left_out.append(str(error))
    if not rendered:
        return
    encoded = tokenizer(
        [item.text for item in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    for item, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield ids, token_mask(offsets, item.spans)


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int, name: str = "chat"
) -> list[Document]:
    """The documents of those that have a supervised token; what was cut and dropped is logged.

    Raises:
        ValueError: as of :func:`encode`, or no or every token is supervised.
    """
    return encode(conversations, tokenizer, max_length).usable(max_length, name)


def supervised_texts(document: Document, tokenizer: Any) -> list[str]:
    """The supervised runs of a document, decoded: what to look at before trusting a mask."""
    mask = [False, *document.loss_mask_T.tolist(), False]
    edges = [i for i, (left, right) in enumerate(pairwise(mask)) if left != right]
    return [tokenizer.decode(document.ids_T[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
