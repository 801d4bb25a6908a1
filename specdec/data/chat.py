"""Conversations: rows in several layouts in, documents out, of which the model's own tokens are supervised.

A conversation is rendered by the target's own template and tokenised once. The mask is found in characters of the
rendered text and carried over to tokens by their offsets. Pieces are never tokenised by themselves, and nothing is
searched for by marker strings: tokens merge across boundaries, and users write markers too.
"""

import hashlib
import importlib.metadata
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.data.layouts import TRAINING, ChatConversation, Layout, named, parsed, recognise
from specdec.data.loader import Document
from specdec.data.rows import HUB, DataRow, each_row, find_sources, hub_fingerprint
from specdec.data.template import Spans, Template
from specdec.utils.files import cache_directory, locked, sha256, staged
from specdec.utils.progress import progress

log = logging.getLogger(__name__)

VERSION = 2  # of what is kept on disk: raise it whenever a change of this package gives other tokens or masks
CHUNK = 256  # conversations tokenised in one call
SHOWN = 3  # broken rows that a warning tells
MUCH = 0.05  # a loss that deserves a warning


class MaskError(ValueError):
    """There is nothing to learn, or nothing is told apart."""


class Encoded(NamedTuple):
    """N conversations, each as a document of at most so many tokens, and how much it was before."""

    documents: list[Document]
    lengths_N: Tensor  # int64, tokens
    supervised_N: Tensor  # int64, supervised tokens
    left_out: list[str]  # of the sources as a whole: what was wrong with each broken row

    def take(self, indices: Sequence[int]) -> "Encoded":
        """Some of the conversations."""
        documents = [self.documents[i] for i in indices]
        return Encoded(documents, self.lengths_N[indices], self.supervised_N[indices], self.left_out)

    @property
    def lost(self) -> dict[str, int]:
        """What truncation and missing answers cost, by name."""
        kept_N = torch.tensor([int(document.loss_mask_T.sum()) for document in self.documents])
        sizes_N = torch.tensor([len(document.ids_T) for document in self.documents])
        return {
            "conversations": len(self.documents),
            "cut": int((sizes_N < self.lengths_N).sum()),  # conversations longer than a row
            "tokens_lost": int((self.lengths_N - sizes_N).sum()),
            "supervised_lost": int((self.supervised_N - kept_N).sum()),
            "silent": int((self.supervised_N == 0).sum()),  # conversations without a supervised token, before the cut
            "cut_away": int(((self.supervised_N > 0) & (kept_N == 0)).sum()),  # that lost all supervised tokens to it
        }

    def usable(self, max_length: int, name: str) -> list[Document]:
        """The documents that have a supervised token; what was lost is logged, with a warning if it is much.

        Raises:
            MaskError: no token is supervised, or every one.
        """
        tell_left_out(self.left_out)
        lost, supervised = self.lost, int(self.supervised_N.sum())
        count, cut, share = lost["conversations"], lost["cut"], lost["supervised_lost"] / max(supervised, 1)
        log.log(
            logging.WARNING if max(share, cut / count) > MUCH else logging.INFO,
            "%s: %d conversations, %d cut to %d tokens: %d of %d tokens lost, %d of %d supervised (%.1f %%)",
            name, count, cut, max_length, lost["tokens_lost"], int(self.lengths_N.sum()), lost["supervised_lost"],
            supervised, 100 * share,
        )  # fmt: skip
        if dropped := lost["silent"] + lost["cut_away"]:
            log.warning("%s: %d of %d rows have no supervised token; dropped", name, dropped, count)
        documents = [document for document in self.documents if document.loss_mask_T.any()]
        if not documents:
            raise MaskError(
                f"{name}: none of {count} conversations has a supervised token ({cut} were cut to "
                f"{max_length} tokens): they need assistant turns that begin within seq_len"
            )
        if all(bool(document.loss_mask_T.all()) for document in documents):
            raise MaskError(
                f"{name}: every token is supervised, prompts included: the chat template marks no assistant turns; "
                "check its {% generation %} tags"
            )
        return documents


def read_conversations(
    patterns: str | Sequence[str], layout: str | None = None, left_out: list[str] | None = None
) -> list[ChatConversation]:
    """Every conversation of files, saved datasets and Hub data; an id that comes again is numbered (``id#2``).

    Args:
        layout: of every row; None tells each row's by its columns.
        left_out: takes what is wrong with each broken row, which is left out then; None stops at the first.

    Raises:
        ValueError: a source is missing, unreadable or empty, or a row is broken; the message names file and row.
    """
    read = partial(conversation, chosen=training_layout(layout))
    conversations: list[ChatConversation] = []
    times = Counter[str]()
    for source in find_sources(patterns):
        before, broken = len(conversations), len(left_out or ())
        conversations += (one._replace(id=_distinct(one.id, times)) for one in each_row(source, read, left_out))
        if len(conversations) == before:
            why = f" but broken rows, as: {left_out[broken]}" if left_out and len(left_out) > broken else ""
            raise ValueError(f"{source}: holds no conversation{why}; remove it from the data or fill it")
    return conversations


def _distinct(name: str, times: Counter[str]) -> str:
    """The name as it is the first time, and numbered when it comes again."""
    found = name
    while times[found]:
        times[name] += 1
        found = f"{name}#{times[name]}"
    times[found] += 1
    return found


def conversation(row: DataRow, chosen: Sequence[Layout] = ()) -> ChatConversation:
    """A row's conversation; its id is its own, else a hash of what is said.

    Args:
        chosen: the layouts that it may have; none: any.

    Raises:
        ValueError: it has no such layout, or is malformed.
    """
    layout = recognise(row.values, row.place, chosen or TRAINING, chosen)
    messages = layout.read(row.values, row.place)
    tools = parsed(row.values.get("tools"), f"{row.place}: 'tools'") or None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{row.place}: 'tools' must be a list of JSON schemas")
    said = json.dumps([messages, tools], sort_keys=True, default=str)
    own = row.own_id or hashlib.sha256(said.encode()).hexdigest()[:16]
    return ChatConversation(row.place, messages, tools, own)


def training_layout(name: str | None) -> list[Layout]:
    """A layout of training data by its name, none for none; ValueError if it is unknown."""
    return named([] if name is None else [name], TRAINING)


def tell_left_out(left_out: Sequence[str]) -> None:
    """A warning, if a broken row was left out."""
    if left_out:
        log.warning("%d broken rows were left out, as: %s", len(left_out), "; ".join(left_out[:SHOWN]))


def encode(
    conversations: Sequence[ChatConversation], tokenizer: Any, max_length: int, left_out: list[str] | None = None
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
            rendered = []
            for one in chunk:
                try:
                    rendered.append(template.render(one))
                except ValueError as error:
                    if left_out is None:
                        raise
                    left_out.append(str(error))
            texts = [item.text for item in rendered] or [""]
            made = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            for item, ids, offsets in zip(rendered, made["input_ids"], made["offset_mapping"], strict=False):
                mask = token_mask(offsets, item.spans)
                ids_T, mask_T = torch.tensor(ids[:max_length]), torch.tensor(mask[:max_length])
                documents.append(Document(ids_T.long(), mask_T.bool()))
                lengths.append(len(ids))
                supervised.append(sum(mask))
            advance(len(chunk))
    if not documents:
        raise ValueError(f"no conversation is left: {'; '.join((left_out or ['there was none'])[:1])}")
    return Encoded(documents, torch.tensor(lengths), torch.tensor(supervised), left_out or [])


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


def determinants(
    patterns: str | Sequence[str], layout: str | None, broken: str, tokenizer: Any, max_length: int
) -> list[Any]:
    """Whatever can change the tokens: the sources' content, the tokenizer, its template, and versions.

    Raises:
        ValueError: a source is missing or unreadable.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    versions = [importlib.metadata.version(name) for name in ("jinja2", "tokenizers", "transformers")]
    template = [backend, tokenizer.special_tokens_map, tokenizer.chat_template]
    return [VERSION, versions, [_content(source) for source in find_sources(patterns)], layout, broken, template,
            max_length]  # fmt: skip


def _content(source: str) -> Any:
    """What is read, wherever it lies."""
    if source.startswith(HUB):
        return hub_fingerprint(source)
    path = Path(source)
    if path.is_dir():
        return [sha256(file) for file in sorted(path.rglob("*")) if file.is_file()]
    return [path.suffix.lower(), sha256(path)]


def cached(determined_by: list[Any], make: Callable[[], Encoded]) -> Encoded:
    """What was kept under these determinants, or what ``make`` gives, which is kept from now on.

    Processes that ask at the same time wait for one of them to make it.

    Raises:
        ValueError: the cache may not be written, the disk is full, or what was kept is damaged.
    """
    key = hashlib.sha256(json.dumps(determined_by, sort_keys=True, default=str).encode()).hexdigest()[:16]
    path = cache_directory() / "tokens" / f"{key}.safetensors"
    if path.exists():
        return _read(path)
    with locked(path.with_suffix(".lock")):
        if path.exists():  # another process was first
            return _read(path)
        encoded = make()
        ids, masks = (list(column) for column in zip(*encoded.documents, strict=True))
        tensors = {
            "ids": torch.cat(ids).int(),
            "loss_mask": torch.cat(masks),
            "sizes": torch.tensor([len(ids_T) for ids_T in ids]),
            "lengths": encoded.lengths_N.contiguous(),
            "supervised": encoded.supervised_N.contiguous(),
        }
        with staged(path) as temporary:
            save_file(tensors, temporary, {"left_out": json.dumps(encoded.left_out)})
    log.info("%d conversations as tokens are kept in %s", len(encoded.documents), path)
    return encoded


def _read(path: Path) -> Encoded:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            left_out = json.loads(file.metadata()["left_out"])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged, remove it: {error}") from error
    sizes = tensors["sizes"].tolist()
    columns = (tensors["ids"].long().split(sizes), tensors["loss_mask"].split(sizes))
    documents = [Document(*pair) for pair in zip(*columns, strict=True)]
    log.info("%d conversations as tokens come from %s", len(documents), path)
    return Encoded(documents, tensors["lengths"], tensors["supervised"], left_out)
