"""Conversations into documents: the target's own template, one tokenisation, and which tokens are the model's own.

The mask is found in characters of the rendered text and carried over to tokens by their offsets. Pieces are never
tokenised by themselves, and nothing is searched for by marker strings: tokens merge across boundaries, and users
write markers too.
"""

import logging
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jinja2
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.data.batch import Document
from specdec.data.conversations import Conversation, Message

log = logging.getLogger(__name__)

CHUNK = 256  # conversations tokenised in one call
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]  # first character, character after the last


class Rendered(NamedTuple):
    """A conversation's text and the characters that the assistant wrote, end of turn included."""

    text: str
    spans: Spans


class Template:
    """A tokenizer's chat template.

    Raises:
        ValueError: the tokenizer is not a fast one, or has no template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise ValueError("chat data needs a fast tokenizer: only those say which characters a token covers")
        if not tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template: choose the instruction-tuned target, "
                "set tokenizer.chat_template, or train on plain text"
            )
        self.tokenizer = tokenizer
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = tuple({*added, *tokenizer.all_special_tokens})

    def _text(self, messages: list[Message], conversation: Conversation, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=conversation.tools, add_generation_prompt=prompt, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{conversation.place}: the chat template refuses the conversation: {reason}") from error

    def render(self, conversation: Conversation) -> Rendered:
        """The whole conversation, and the spans of its assistant turns.

        Raises:
            ValueError: the template refuses the conversation, or the spans cannot be told.
        """
        text = self._text(conversation.messages, conversation)
        source = self.tokenizer.get_chat_template(tools=conversation.tools)
        if GENERATION_TAG.search(source):
            return Rendered(text, self._tagged_spans(text, conversation, source))
        return Rendered(text, self._prefix_spans(text, conversation))

    def _tagged_spans(self, text: str, conversation: Conversation, source: str) -> Spans:
        """What the template itself marks as generated, and the end-of-turn token if it stands right behind."""
        (again,), (spans,) = render_jinja_template(
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=source,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        if again != text:
            raise ValueError(f"{conversation.place}: the chat template renders differently each time: use a fixed one")
        return [(start, self._with_end_of_turn(text, start, end)) for start, end in spans]

    def _prefix_spans(self, text: str, conversation: Conversation) -> Spans:
        """From the generation prompt's end to the end of the turn, by rendering the conversation up to there."""
        spans: Spans = []
        for i, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            where = f"{conversation.place}: message {i + 1}"
            if i == 0:
                raise ValueError(f"{where} is the assistant's, before anybody spoke: remove it or the row")
            opened = self._text(conversation.messages[:i], conversation, prompt=True)
            closed = self._text(conversation.messages[: i + 1], conversation)
            for part in (opened, closed):
                if not text.startswith(part):
                    raise ValueError(
                        f"{where}: the chat template writes it otherwise once the conversation goes on (it may drop "
                        "thinking or earlier turns), so the supervised tokens cannot be told: end the row there, or "
                        "use a template with {% generation %} tags"
                    )
            headless = text.startswith(self.special, len(opened))
            if headless and opened == self._text(conversation.messages[:i], conversation):
                raise ValueError(
                    f"{where}: the chat template has no generation prompt, so the assistant's header cannot be told "
                    "from its answer: use a template that knows add_generation_prompt or has {% generation %} tags"
                )
            spans.append((len(opened), self._without_separator(text, len(opened), len(closed))))
        return spans

    def _without_separator(self, text: str, start: int, end: int) -> int:
        """Where a turn ends that may carry white space behind its end-of-turn token; no model generates that."""
        stripped = text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self.special) else end

    def _with_end_of_turn(self, text: str, start: int, end: int) -> int:
        """Where a turn ends whose end-of-turn token may lie outside the template's tags."""
        if text[start:end].rstrip().endswith(self.special):
            return self._without_separator(text, start, end)
        rest = text[end:].lstrip()
        follows = [token for token in self.special if rest.startswith(token)]
        return len(text) - len(rest) + max(map(len, follows)) if follows else end


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


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int, name: str = "chat"
) -> list[Document]:
    """Conversations rendered and tokenised once each, cut to ``max_length`` tokens.

    Rows left without a supervised token are dropped; cut and dropped rows are counted in the log.

    Raises:
        ValueError: there is no usable chat template, a row cannot be rendered, or no or every token is supervised.
    """
    template = Template(tokenizer)
    documents: list[Document] = []
    cut = 0
    for start in range(0, len(conversations), CHUNK):
        rendered = [template.render(item) for item in conversations[start : start + CHUNK]]
        encoded = tokenizer(
            [item.text for item in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for item, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            mask = token_mask(offsets, item.spans)
            cut += len(ids) > max_length
            if any(mask[:max_length]):
                documents.append(Document(torch.tensor(ids[:max_length]), torch.tensor(mask[:max_length])))
    dropped = len(conversations) - len(documents)
    log.info("%s: %d conversations, %d cut to %d tokens", name, len(conversations), cut, max_length)
    if dropped:
        log.warning("%s: %d of %d rows have no supervised token; dropped", name, dropped, len(conversations))
    if not documents:
        raise ValueError(
            f"{name}: none of {len(conversations)} conversations has a supervised token ({cut} were cut to "
            f"{max_length} tokens): they need assistant turns that begin within seq_len"
        )
    if all(bool(document.loss_mask_T.all()) for document in documents):
        raise ValueError(
            f"{name}: every token is supervised, prompts included: the chat template marks no assistant turns; "
            "check its {% generation %} tags"
        )
    return documents


def supervised_texts(document: Document, tokenizer: Any) -> list[str]:
    """The supervised runs of a document, decoded: what to look at before trusting a mask."""
    mask = [False, *document.loss_mask_T.tolist(), False]
    edges = [i for i, (left, right) in enumerate(pairwise(mask)) if left != right]
    return [tokenizer.decode(document.ids_T[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
