"""A conversation as text, by the target's own template, and which characters of it the model itself writes."""

import re
from typing import Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.data import rewritten
from specdec.data.conversations import Conversation
from specdec.data.layouts import Message

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINKING_SWITCHES = ("enable_thinking", "thinking")  # of templates whose models can do without

Spans = list[tuple[int, int]]  # first character, character after the last


class Rendered(NamedTuple):
    """A conversation's text and the characters that the assistant wrote, end of turn included."""

    text: str
    spans: Spans


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what conversations cannot be rendered with.

    Raises:
        ValueError: the tokenizer is not a fast one, or has no template.
    """
    if not tokenizer.is_fast:
        raise ValueError("chat data needs a fast tokenizer: only those say which characters a token covers")
    if not tokenizer.chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: choose the instruction-tuned target, "
            "set tokenizer.chat_template, or train on plain text"
        )


class Template:
    """A tokenizer's chat template.

    Raises:
        ValueError: as of :func:`check_tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = tuple({*added, *tokenizer.all_special_tokens})
        self._closing: str | None = None  # not looked for yet

    def _text(self, messages: list[Message], conversation: Conversation, prompt: bool = False, **more: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=conversation.tools, add_generation_prompt=prompt, tokenize=False, **more
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
        switches = [name for name in THINKING_SWITCHES if name in source]
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if turns[:1] == [0]:
            raise ValueError(f"{conversation.place}: message 1 is the assistant's, before anybody spoke: remove it")
        if turns and self._closing is None:
            self._closing = self._find_closing(conversation, turns[0])
        return Rendered(text, [self._span(text, conversation, i, switches) for i in turns])

    def _find_closing(self, conversation: Conversation, first: int) -> str:
        """The token that ends a conversation rather than a turn, if there is one: a question alone has it as well."""
        asked = self._text(conversation.messages[:first], conversation)
        opened = self._text(conversation.messages[:first], conversation, prompt=True)
        ends = [token for token in self.special if asked.endswith(token) and not opened.startswith(asked)]
        return next((token for token in ends if opened.startswith(asked.removesuffix(token))), "")

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

    def _span(self, text: str, conversation: Conversation, i: int, switches: list[str]) -> tuple[int, int]:
        """From the generation prompt's end to the end of turn ``i``, by rendering the conversation up to there."""
        messages, where = conversation.messages, f"{conversation.place}: message {i + 1}"

        def write(changed: list[Message]) -> str:
            return self._text(changed, conversation)

        def asking(**options: Any) -> rewritten.Write:
            return lambda changed: self._text(changed, conversation, prompt=True, **options)

        # thinking switched off may be a longer prompt: an empty thought, which the model does not write
        prompts = [asking(), *(asking(**{name: False}) for name in switches)]
        opened, *off = (prompt(messages[:i]) for prompt in prompts)
        closed = (text if i + 1 == len(messages) else write(messages[: i + 1])).removesuffix(self._closing or "")
        if text.startswith(opened):
            self._check_prompt(text, opened, conversation, i)
        begun = max((one for one in (opened, *off) if text.startswith(one)), key=len, default=None)
        if begun is not None and closed.startswith(begun) and text.startswith(closed):
            return len(begun), self._without_separator(text, len(begun), len(closed))
        found = self._rewritten(text, messages, i, begun, closed, write, prompts)
        if found is None:
            raise ValueError(
                f"{where}: the chat template writes it otherwise once the conversation goes on, and where it stands "
                "then cannot be told: end the row there, or use a template with {% generation %} tags"
            )
        return found.start, self._without_separator(text, *found)

    def _rewritten(
        self,
        text: str,
        messages: list[Message],
        i: int,
        begun: str | None,
        closed: str,
        write: rewritten.Write,
        prompts: list[rewritten.Write],
    ) -> rewritten.Place | None:
        """Turn ``i`` where it is written otherwise than at a conversation's end, if that can be told."""
        place, said = rewritten.words(text, messages, i, write), messages[i].get("content")
        silent = not said or (place is None and rewritten.unwritten(text, messages, i, write))
        if silent and begun is not None and (found := rewritten.shortened(text, begun, closed)):
            return found
        if place is None:
            return None
        last = rewritten.around(messages[: i + 1], i, write)
        end = rewritten.end(text, place, messages[i], last, self.special)
        if begun is not None and len(begun) <= place.start:
            start = len(begun)
        else:
            start = rewritten.start(text, place, messages, i, write, prompts)
        return None if end is None else rewritten.Place(start, end)

    def _check_prompt(self, text: str, opened: str, conversation: Conversation, i: int) -> None:
        """Without a generation prompt a turn begins with its header, whatever it says."""
        if not text.startswith(self.special, len(opened)):
            return
        before = conversation.messages[:i]
        answer: Message = {"role": "assistant", "content": rewritten.WORDS[0]}
        headed = self._text([*before, answer], conversation).startswith(self.special, len(opened))
        if headed and opened == self._text(before, conversation):
            raise ValueError(
                f"{conversation.place}: message {i + 1}: the chat template has no generation prompt, so the "
                "assistant's header cannot be told from its answer: use a template that knows add_generation_prompt "
                "or has {% generation %} tags"
            )

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
