"""Prompts to evaluate on: files of them, and the conversation that one prompt becomes."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from specdec.files import explain

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ID_KEYS = ("question_id", "prompt_id", "id")


class Prompt(NamedTuple):
    """One prompt: exactly one of ``turns``, ``messages`` and ``text`` is set."""

    prompt_id: str
    category: str | None
    turns: list[str] | None
    """User turns of a conversation whose answers the target gives (MT-bench)."""
    messages: list[dict[str, str]] | None
    """A conversation that ends with a user turn; each message has ``role`` and ``content``."""
    text: str | None
    """Raw text, used as it is."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer used here."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


class Conversation:
    """One prompt as token ids, turn by turn::

        while (ids := conversation.next_ids()) is not None:
            conversation.add_answer(decode(ids))

    Each turn's ids hold the whole conversation so far, rendered anew; a template may change what came before (some
    drop earlier reasoning), so they need not begin with the ids of the turn before.

    Raises:
        ValueError: the tokenizer has no chat template and the prompt needs one, or ``system`` does not apply.
    """

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, system: str | None = None) -> None:
        self.prompt, self.tokenizer = prompt, tokenizer
        self._messages: list[dict[str, str]] = []
        self._turns_left = list(prompt.turns or [])
        self._done = False
        self._expects_answer = False
        if prompt.text is not None:
            if system is not None:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: raw text takes no system prompt; use a `turns` or `messages` row"
                )
            return
        if tokenizer.chat_template is None:
            raise ValueError(
                f"prompt {prompt.prompt_id}: the tokenizer has no chat template, which `turns` and `messages` rows "
                "need; `prompt` rows and plain text files work without one"
            )
        own = [message for message in prompt.messages or [] if message["role"] in ("system", "developer")]
        if system is not None:
            if own:
                raise ValueError(
                    f"prompt {prompt.prompt_id}: it brings its own system message; drop that or the system prompt"
                )
            self._messages.append({"role": "system", "content": system})
        self._messages.extend(prompt.messages or [])

    def next_ids(self) -> list[int] | None:
        """Token ids the target is to continue, or None after the last turn.

        Raises:
            ValueError: the chat template refuses the conversation, or nothing is left of the prompt as tokens.
        """
        assert not self._expects_answer, "add_answer comes before the next turn"
        if self._done:
            return None
        if self.prompt.text is not None:
            ids = self.tokenizer.encode(self.prompt.text, add_special_tokens=True)
        else:
            if self._turns_left:
                self._messages.append({"role": "user", "content": self._turns_left.pop(0)})
            # the template writes the special tokens itself: adding them again would double the first one
            ids = self.tokenizer.encode(self._render(), add_special_tokens=False)
        if not ids:
            raise ValueError(f"prompt {self.prompt.prompt_id}: the tokenizer makes no tokens of it")
        self._done = not self._turns_left
        self._expects_answer = True
        return list(ids)

    def add_answer(self, ids: Sequence[int]) -> None:
        """The target's answer, which the next turn builds on; special tokens in it are dropped."""
        assert self._expects_answer, "next_ids comes before an answer"
        self._expects_answer = False
        if not self._done:
            content = self.tokenizer.decode(list(ids), skip_special_tokens=True)
            self._messages.append({"role": "assistant", "content": content})

    def _render(self) -> str:
        try:
            return self.tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"prompt {self.prompt.prompt_id}: the chat template refuses this conversation: {reason}"
            ) from error


def load_prompts(paths: Sequence[str | Path], limit: int | None = None) -> list[Prompt]:
    """Read prompts from files, the first ``limit`` of all together.

    ``.jsonl`` rows hold one of ``turns``, ``messages`` and ``prompt``, and may hold ``question_id`` (or
    ``prompt_id``, or ``id``) and ``category``; null is the same as absent. Any other file is plain text with one
    prompt on each line that is not blank. An id that occurs in several files gets the file's stem in front.

    Raises:
        ValueError: a file cannot be read or used; the message names it, the line and what is wrong.
    """
    if not paths:
        raise ValueError("no prompt file given")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: it must be at least 1")
    files = [Path(path) for path in paths]
    loaded = [(path, _load(path)) for path in files]
    times_used = Counter(prompt.prompt_id for _, prompts in loaded for prompt in prompts)
    stems = Counter(path.stem for path in files)
    unique: dict[str, Prompt] = {}
    for path, prompts in loaded:
        label = path.stem if stems[path.stem] == 1 else str(path)
        for prompt in prompts:
            name = prompt.prompt_id if times_used[prompt.prompt_id] == 1 else f"{label}:{prompt.prompt_id}"
            if name in unique:
                raise ValueError(f"{path}: prompt id {name} is used twice; is the file given twice?")
            unique[name] = prompt._replace(prompt_id=name)
    return list(unique.values())[:limit]


def _load(path: Path) -> list[Prompt]:
    if path.suffix.lower() == ".json":
        raise ValueError(f"{path}: JSON is read as JSON lines only: write one row a line and name it .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise explain(error, path) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    # not splitlines: JSON strings may hold the other line separators of Unicode
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if path.suffix.lower() == ".jsonl":
            prompt = _row(line, number, where=f"{path}, line {number}")
        else:
            prompt = Prompt(f"line-{number}", None, None, None, line.rstrip("\r"))
        if prompt.prompt_id in lines:
            raise ValueError(
                f"{path}, line {number}: id {prompt.prompt_id} is taken by line {lines[prompt.prompt_id]} already"
            )
        lines[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path}: there is no prompt in it")
    return prompts


def _row(line: str, number: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, column {error.colno}: not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets without end
        raise ValueError(f"{where}: not usable JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    row = {key: value for key, value in row.items() if value is not None}
    given = [key for key in ("turns", "messages", "prompt") if key in row]
    if len(given) != 1:
        found = f"{' and '.join(given)} together" if given else "none of them"
        raise ValueError(f"{where}: a row needs exactly one of turns, messages and prompt; it has {found}")
    prompt_id = next((row[key] for key in _ID_KEYS if key in row), f"line-{number}")
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int):
        raise ValueError(f"{where}: the id must be a string or an integer, not {type(prompt_id).__name__}")
    category = _text(row["category"], f"{where}: category") if "category" in row else None
    turns = messages = text = None
    if "turns" in row:
        turns = [_text(turn, f"{where}: a turn") for turn in _list(row["turns"], f"{where}: turns")]
    elif "messages" in row:
        items = _list(row["messages"], f"{where}: messages")
        messages = [_message(item, f"{where}: message {index}") for index, item in enumerate(items, start=1)]
        if messages[-1]["role"] != "user":
            raise ValueError(f"{where}: messages must end with a user turn to be answered, not {messages[-1]['role']}")
    else:
        text = _text(row["prompt"], f"{where}: prompt")
    return Prompt(str(prompt_id), category, turns, messages, text)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} must be a list with something in it")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, not {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{what} is empty")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{what} holds half of a surrogate pair, which is no text")
    return value


def _message(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object with role and content, not {type(value).__name__}")
    fields = {key: item for key, item in value.items() if item is not None}
    if set(fields) != {"role", "content"}:
        raise ValueError(f"{what} must have role and content and nothing else; it has {sorted(fields)}")
    if fields["role"] not in _ROLES:
        raise ValueError(f"{what} has role {fields['role']!r}: use one of {', '.join(_ROLES)}")
    return {"role": fields["role"], "content": _text(fields["content"], f"{what} content")}
