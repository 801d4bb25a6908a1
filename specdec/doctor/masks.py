"""What is supervised is what the assistant says: of the rows as the training loader hands them out.

Chat data are read, rendered and tokenised here once more, turn by turn: a turn's tokens are those of the conversation
up to its end that the conversation up to its generation prompt does not have.

Legend: B rows, T tokens.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jinja2
import torch
from torch import Tensor

from specdec.data import Batch, ChatData, TextData
from specdec.data.conversations import Conversation, conversation
from specdec.data.layouts import named
from specdec.data.rows import each_row, find_sources
from specdec.data.template import GENERATION_TAG, THINKING_SWITCHES
from specdec.doctor.finding import Finding, judged, unchecked
from specdec.doctor.subject import Document, Subject, documents
from specdec.embedded.datamodule import EmbeddedData

NAME = "masks"
CONVERSATIONS = 64  # the first ones of the training data are rendered again
ROWS = 64  # of those that hold them are looked at
ALIKE = 0.98  # of the supervised tokens are those found here
MOVED = 0.8  # of them, if the mask is moved by a token
ALIKE_TAGGED = 0.5  # where the template's own tags decide, which may leave out more


class Turns(NamedTuple):
    """A conversation as it is rendered here."""

    ids_T: Tensor
    mask_T: Tensor
    words: list[str]  # of each assistant turn


def masks(subject: Subject) -> Iterator[Finding]:
    """Shares, spans, the shift test and the words."""
    yield from _shares(subject)
    data = subject.data
    if not isinstance(data, ChatData):
        return
    what = "supervised tokens are those between generation prompt and end of turn, rendered and tokenised again"
    if not data.answer_only:
        yield unchecked(NAME, what, "data.answer_only=false asks for every token of the training conversations")
        return
    pairs = list(_pairs(subject, data))
    if not pairs:
        yield unchecked(
            NAME, what,
            f"none of the first {CONVERSATIONS} conversations is among the training rows and renders its beginnings as "
            "it renders the whole: look at specdec data inspect",
        )  # fmt: skip
        return
    tagged = bool(GENERATION_TAG.search(subject.module.tokenizer.get_chat_template()))
    yield _spans(pairs, ALIKE_TAGGED if tagged else ALIKE, what)
    yield _words(pairs, subject.module.tokenizer)


def _shares(subject: Subject) -> Iterator[Finding]:
    batch, data = subject.batch, subject.data
    real_BT = batch.documents_BT >= 0
    share = float(batch.loss_mask_BT[real_BT].double().mean())
    chats = isinstance(data, ChatData) and data.answer_only
    what = f"share of supervised tokens in the loader's rows of {type(data).__name__}"
    nothing = "nothing is supervised: no loss, nothing is learnt. The template marks no answer, or the mask was lost"
    yield judged(NAME, what, share, "above", 0, nothing)
    if chats:
        everything = (
            "every token is supervised, prompts too: the mask was lost or replaced by ones after the template had made "
            "it, or the template marks no answers; look at specdec data inspect"
        )
        yield judged(NAME, what, share, "below", 1, everything)
    elif isinstance(data, TextData | EmbeddedData):
        yield judged(
            NAME, what, share, "at least", 1,
            "text is supervised whole, and some of its tokens are not: the mask is shifted or cut where it is batched",
        )  # fmt: skip
    padding = float((batch.loss_mask_BT & ~real_BT).sum())
    yield judged(NAME, "supervised tokens in padding", padding, "at most", 0, "padding is trained on: mask it out")


def _pairs(subject: Subject, data: ChatData) -> Iterator[tuple[Document, Turns]]:
    """Training documents, as the loader has them, beside the same conversations as they are rendered here."""
    tokenizer = subject.module.tokenizer
    made = (turns(one, tokenizer) for one in islice(_conversations(data), CONVERSATIONS))
    known = {_key(one.ids_T[: data.seq_len]): one for one in made if one is not None}
    train = data.splits.train
    holding = [
        row for row in range(len(train.ids_BT)) if any(_key(d.ids_T) in known for d in documents(_rows(train, [row])))
    ]
    for start in range(0, min(len(holding), ROWS), data.batch_size):
        rows = _rows(train, holding[start : start + data.batch_size])
        for batch in data.loader(rows, data.batch_size, shuffle=False):
            for document in documents(batch):
                if (found := known.get(_key(document.ids_T))) is not None:
                    yield document, found
        # every row is looked at once


def _rows(batch: Batch, at: list[int]) -> Batch:
    return Batch(*(column[at] for column in batch))


def _key(ids_T: Tensor) -> bytes:
    return ids_T.to(torch.int32).cpu().numpy().tobytes()


def _conversations(data: ChatData) -> Iterator[Conversation]:
    chosen = None if data.layout is None else named(data.layout)
    left_out: list[str] | None = [] if data.broken == "drop" else None
    for source in find_sources(data.train):
        yield from each_row(source, partial(conversation, chosen=chosen), left_out)


def turns(one: Conversation, tokenizer: Any) -> Turns | None:
    """Render and tokenise; None where the template does not write the beginnings as it writes the whole."""

    def write(messages: list[Any], prompt: bool = False, **switches: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=one.tools, add_generation_prompt=prompt, tokenize=False, **switches
            )
        )

    def tokens(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)

    try:
        text = write(one.messages)
        ids_T = tokens(text)
        mask_T, words = torch.zeros_like(ids_T, dtype=torch.bool), []
        for i, message in enumerate(one.messages):
            if message["role"] != "assistant":
                continue
            before = one.messages[:i]
            prompts = [write(before, True), write(before, True, **dict.fromkeys(THINKING_SWITCHES, False))]
            opened = max((prompt for prompt in prompts if text.startswith(prompt)), key=len, default=None)
            closed = write(one.messages[: i + 1])
            if opened is None or not (text.startswith(closed) and closed.startswith(opened)):
                return None
            stripped = closed.rstrip()
            ends = [token for token in map(str, tokenizer.all_special_tokens) if stripped.endswith(token)]
            added = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and stripped.endswith(str(t))]
            begin = _common(ids_T, tokens(opened))
            mask_T[begin : _common(ids_T, tokens(stripped if ends or added else closed))] = True
            words.append(str(message.get("content") or "").strip())
    except (jinja2.TemplateError, TypeError, ValueError):
        return None  # the data module has told what it made of such a row
    return Turns(ids_T, mask_T, words)


def _common(one_T: Tensor, other_T: Tensor) -> int:
    """Tokens that both begin with."""
    T = min(len(one_T), len(other_T))
    return int((one_T[:T] == other_T[:T]).long().cumprod(0).sum())


def _spans(pairs: list[tuple[Document, Turns]], allowed: float, what: str) -> Finding:
    """The mask against the spans found here, and against those moved by a token."""
    alike = {by: _alike(pairs, by) for by in (-1, 0, 1)}
    best = max(alike, key=alike.__getitem__)
    told = f"{what} ({len(pairs)} conversations; shared over joint tokens)"
    if best and alike[best] >= MOVED:
        fault = (
            f"the mask fits better when it is moved by {-best:+d} token ({alike[best]:.3f}): it is shifted by "
            f"{best:+d} between the template and the batch; token j is supervised where x[j] itself is the assistant's"
        )
        return judged(NAME, told, alike[0], "above", alike[best], fault)
    return judged(
        NAME, told, alike[0], "at least", allowed,
        "other tokens are supervised than the assistant writes: the spans were found in another rendering of the "
        "conversation, or were lost on the way to the batch",
        f"moved by -1 and +1 token: {alike[-1]:.3g}, {alike[1]:.3g}",
    )  # fmt: skip


def _alike(pairs: list[tuple[Document, Turns]], by: int) -> float:
    both = either = 0
    for document, found in pairs:
        moved_T = found.mask_T.roll(by)[: len(document.ids_T)]
        mask_T = document.loss_mask_T.cpu()
        both, either = both + int((mask_T & moved_T).sum()), either + int((mask_T | moved_T).sum())
    return both / max(either, 1)


def _words(pairs: list[tuple[Document, Turns]], tokenizer: Any) -> Finding:
    """What is supervised reads as what the assistant says; a conversation that was cut is left out."""
    whole = [(document, found) for document, found in pairs if len(document.ids_T) == len(found.ids_T)]
    what = (
        f"supervised tokens, decoded, hold every answer's words and end as its turn does ({len(whole)} conversations)"
    )
    if not whole:
        return unchecked(NAME, what, "all conversations looked at were cut to data.seq_len")
    held = ended = 0
    for document, found in whole:
        mask_T = document.loss_mask_T.cpu()
        said = tokenizer.decode(document.ids_T[document.loss_mask_T])
        held += all(_plain(words) in _plain(said) for words in found.words)
        last_T = found.mask_T & ~torch.cat([found.mask_T[1:], torch.zeros(1, dtype=torch.bool)])
        ended += bool(mask_T[last_T].all())
    share = min(held, ended) / len(whole)
    return judged(
        NAME, what, share, "at least", ALIKE,
        f"{held} hold the words and {ended} the last token of every turn: a drafter that never learns the end-of-turn "
        "token cannot propose to stop. Look at specdec data inspect",
    )  # fmt: skip


def _plain(text: str) -> str:
    return "".join(text.split())
