"""Prompts to evaluate on, from files and the Hugging Face Hub, and the conversation that each becomes as token ids."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.data.layouts import PROMPTS, Layout, Question, layouts_named, recognize, tools_of
from specdec.data.messages import Message
from specdec.data.regions import TEXT
from specdec.data.rendering import template_digest
from specdec.data.rows import read_rows, stem
from specdec.data.said import check_context
from specdec.data.template import Template, template_of, text_ids
from specdec.decoding import check_length
from specdec.target import Target
from specdec.utils.text import how_many

log = logging.getLogger(__name__)

BLANK = "it is empty, or a part of it is"


class Prompt(NamedTuple):
    """One prompt: exactly one of ``turns``, ``messages`` and ``text`` is set."""

    prompt_id: str
    category: str | None
    # user turns of a conversation whose answers the target gives (MT-bench)
    turns: list[str] | None
    # a conversation that ends with a user turn or a tool's result: role and content of each
    messages: list[Message] | None
    # raw text, used as it is; empty if the prompt or a part of it is blank, which cannot be asked
    text: str | None
    # that the target may call, as JSON schemas
    tools: list[dict[str, Any]] | None = None


def load_prompts(
    sources: Sequence[str | Path], limit: int | None = None, layouts: Sequence[str] = ()
) -> list[Prompt]:
    """Read prompts from files and Hub data, the first ``limit`` of all together.

    An id (a row's own, else its line) that occurs in several files gets the file's stem in front. A row that has the
    columns of one of ``layouts`` is read so, the first of them winning.

    Raises:
        ValueError: a source cannot be read or used; the message names it, the line and what is wrong.
    """
    if not sources:
        raise ValueError("no prompt file given")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: it must be at least 1")
    preferred = layouts_named(layouts, PROMPTS)
    used: set[str] = set()
    names = [str(source) for source in sources]
    loaded = [(name, _load(name, preferred, used)) for name in names]
    if unused := [layout for layout in preferred if layout.name not in used]:
        raise ValueError(f"layouts: no row is read as {unused[0].name} ({unused[0].needs})")
    times_used = Counter(prompt.prompt_id for _, prompts in loaded for prompt in prompts)
    stems = Counter(stem(name) for name in names)
    unique: dict[str, Prompt] = {}
    for source, prompts in loaded:
        label = stem(source) if stems[stem(source)] == 1 else source
        for prompt in prompts:
            name = (
                prompt.prompt_id
                if times_used[prompt.prompt_id] == 1
                else f"{label}:{prompt.prompt_id}"
            )
            if name in unique:
                raise ValueError(
                    f"{source}: prompt id {name} is used twice; is the file given twice?"
                )
            unique[name] = prompt._replace(prompt_id=name)
    return list(unique.values())[:limit]


def _load(source: str, preferred: Sequence[Layout], used: set[str]) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for row in read_rows(source):
        layout = recognize(row.values, row.place, PROMPTS, preferred)
        used.add(layout.name)
        # EAGLE's own files have empty ones
        category = row.values.get("category", "") or layout.category
        if not isinstance(category, str | None):
            raise ValueError(
                f"{row.place}: category must be a string, not {type(category).__name__}"
            )
        question: Question = layout.read(row.values, row.place)
        if tools := tools_of(row.values, row.place):
            question = question._replace(tools=tools)
        if question.tools and question.text is not None:
            raise ValueError(
                f"{row.place}: raw text takes no tools: drop them, or choose a layout of turns (--layouts)"
            )
        name = row.own_id or row.name
        if name in prompts:
            raise ValueError(f"{row.place}: id {name} is taken already")
        prompts[name] = Prompt(name, category, *(Question(text="") if question.blank else question))
    if not prompts:
        raise ValueError(f"{source}: there is no prompt in it")
    return list(prompts.values())


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of what is asked, whatever the files are called."""
    rows = [prompt._asdict() for prompt in prompts]
    for row in rows:
        if row["tools"] is None:
            del row["tools"]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def template_sha256(tokenizer: Any, prompts: Sequence[Prompt]) -> str | None:
    """SHA-256 of the chat template's text; None if no prompt is rendered by it."""
    return (
        None if all(prompt.text is not None for prompt in prompts) else template_digest(tokenizer)
    )


class PromptConversation:
    """One prompt as token ids, turn by turn: ``next_ids``, then ``add_answer``, until ``next_ids`` is None.

    Each turn's ids hold the whole conversation so far, rendered again; a template may change what came before (some
    drop earlier reasoning), so they need not begin with the ids of the turn before.

    Args:
        system: the system prompt.
        thinking: whether the target thinks, by the switch of its chat template; None leaves it to the template.

    Raises:
        ValueError: the tokenizer has no chat template and the prompt needs one, or an option does not apply.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Any,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> None:
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.thinking = thinking
        self._messages = list(prompt.messages or [])
        self._turns_left = list(prompt.turns or [])
        self._done = False
        self._template: Template | None = None
        self._prompt = ""  # the last one, as text
        if prompt.text == "":
            return  # next_ids will say so
        wrong = None
        if prompt.text is not None and (system is not None or thinking is not None):
            what = "thinking" if system is None else "system prompt"
            wrong = f"raw text takes no {what}, which is a chat's; use a `turns` or `messages` row"
        elif prompt.text is None and tokenizer.chat_template is None:
            wrong = (
                "the tokenizer has no chat template, which a conversation needs; `prompt` rows, plain text files and "
                "--layouts prompt do without"
            )
        elif system is not None:
            if any(message["role"] in ("system", "developer") for message in self._messages):
                wrong = "it brings its own system message; drop that or the system prompt"
            self._messages.insert(0, {"role": "system", "content": system})
        if wrong:
            raise ValueError(f"prompt {prompt.prompt_id}: {wrong}")
        if prompt.text is None:
            try:
                self._template = template_of(tokenizer)
                self._template.switches(thinking)  # refuses a template that has none
            except ValueError as error:
                raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error

    def next_ids(self) -> list[int] | None:
        """Token ids the target is to continue, or None after the last turn; ValueError if there cannot be any."""
        if self._done:
            return None
        if self.prompt.text == "":
            raise ValueError(f"prompt {self.prompt.prompt_id}: {BLANK}")
        if self._turns_left:
            self._messages.append({"role": "user", "content": self._turns_left.pop(0)})
        try:
            if self._template is None:
                ids = text_ids(self.tokenizer, self.prompt.text or "")
            else:
                ids = self._template_ids(self._template)
        except ValueError as error:
            raise ValueError(f"prompt {self.prompt.prompt_id}: {error}") from error
        self._done = not self._turns_left
        return ids

    def _template_ids(self, template: Template) -> list[int]:
        """Return the prompt's ids; ValueError if the template leaves out its tools, a call or a result."""
        tools = self.prompt.tools
        self._prompt = template.prompt(self._messages, tools, self.thinking)
        if tools:
            if not template.form.tools:
                raise ValueError(
                    "the chat template does not write tools: ask without them, or choose a target whose template does"
                )
            check_context(self._messages, self._prompt)
        return template.ids_of(self._prompt)

    def add_answer(self, ids: Sequence[int]) -> None:
        """The target's answer, which the next turn builds on: its thought, text and calls as the template has them."""
        if not self._done:
            assert self._template is not None
            self._messages.append(self._template.answer(ids, self.prompt.tools))

    def regions(self, ids: Sequence[int]) -> list[str]:
        """Of every token of an answer to the last ids, whether it is thought, tool call, code or text.

        Raw text's answers are text.
        """
        if self._template is None:
            return [TEXT] * len(ids)
        return self._template.regions(ids, self._prompt, self.prompt.tools)


class Skipped(NamedTuple):
    """A prompt that was left out, with all its turns."""

    prompt_id: str
    reason: str


def next_ids(
    conversation: PromptConversation, target: Target, max_new_tokens: int, nodes: int = 1
) -> list[int] | Skipped | None:
    """The next turn's ids, None after the last, or why it cannot be decoded; ``nodes`` as of :func:`check_length`."""
    prompt_id = conversation.prompt.prompt_id
    try:
        ids = conversation.next_ids()
        if ids is not None:
            check_length(target, ids, max_new_tokens, nodes)
    except ValueError as error:
        return Skipped(prompt_id, str(error).removeprefix(f"prompt {prompt_id}: "))
    return ids


def check_skipped(skipped: Sequence[Skipped], prompts: int) -> None:
    """Warn of prompts that were left out; raise ValueError if all were."""
    if not skipped:
        return
    name, reason = skipped[0]
    if len(skipped) == prompts:
        raise ValueError(
            f"prompt {name}: {reason}"
            + (f"; none of {prompts} can be decoded" if prompts > 1 else "")
        )
    names = ", ".join(prompt.prompt_id for prompt in skipped[:5]) + (
        ", ..." if len(skipped) > 5 else ""
    )
    log.warning(
        "left out %d of %s (%s); %s: %s",
        len(skipped),
        how_many(prompts, "prompt"),
        names,
        name,
        reason,
    )


def without_blank(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those that can be asked of whoever renders them itself; ValueError if none is left."""
    check_skipped(
        [Skipped(prompt.prompt_id, BLANK) for prompt in prompts if prompt.text == ""], len(prompts)
    )
    return [prompt for prompt in prompts if prompt.text != ""]


def first_turns(
    target: Target, prompts: Sequence[Prompt], max_new_tokens: int, nodes: int = 1
) -> tuple[list[list[int]], list[Skipped]]:
    """Return the ids of every prompt's first turn, and the prompts left out.

    Raises:
        ValueError: none is left; or the target has no chat template and a prompt needs one.
    """
    conversations = [PromptConversation(prompt, target.tokenizer) for prompt in prompts]
    turns = [
        next_ids(conversation, target, max_new_tokens, nodes) for conversation in conversations
    ]
    skipped = [turn for turn in turns if isinstance(turn, Skipped)]
    check_skipped(skipped, len(prompts))
    return [turn for turn in turns if isinstance(turn, list)], skipped
