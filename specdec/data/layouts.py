"""The layouts of rows: by which columns each is recognised, and how its conversation or prompt is read.

A row is read by the first layout whose columns it has: of :data:`TRAINING`, the table of training data, or of
:data:`PROMPTS`, that of prompts. A new layout is a line in one of them.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.data.rows import ID_COLUMNS

Message = dict[str, Any]
"""``role``, one of ``ROLES``, ``content``, and what else the template may read."""
Values = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # of a message's thought
WEIGHT_KEYS = ("weight", "train", "loss")  # of whether a message is learned
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # types of the parts of a content
# of a message; they change what is said
UNREAD_KEYS = ("prefix", "partial", "reasoning_details", "thoughts", "audio")
UNREAD_COLUMNS = (
    "history",
    "chat_template_kwargs",
    "response",
    "completion",
)  # beside messages; they change what is said
SYSTEM = ("system", "system_prompt")  # columns of a system prompt


class ChatConversation(NamedTuple):
    """A conversation of training data."""

    place: str  # for messages: "chats.jsonl, line 7"
    messages: list[Message]
    tools: list[dict[str, Any]] | None  # that the messages may call
    id: str  # unique among those read together, and the same whenever they are read


class Question(NamedTuple):
    """A prompt: exactly one is set."""

    turns: list[str] | None = None  # of a user, whose answers the target gives
    # of a conversation that ends with a user turn, with role and content
    messages: list[Message] | None = None
    text: str | None = None  # raw, used as it is

    @property
    def blank(self) -> bool:
        """Whether a part is blank: not a fault of the file, but nothing that could be decoded."""
        texts = (
            self.turns
            or [message["content"] for message in self.messages or []]
            or [self.text or ""]
        )
        return not all(text.strip() for text in texts)


class Layout(NamedTuple):
    """How rows with certain columns are read."""

    name: str
    columns: tuple[str, ...]  # all of them must be in a row; of ``a|b`` one
    read: Callable[[Values, str], Any]
    """Of a row and its place: messages of a training row, a :class:`Question` of a prompt. It raises a ValueError that
    names the place and the column where the row is malformed."""
    category: str | None = None  # of prompts that bring none
    # a row with a further column, which may belong to the text, is refused unless by name
    exact: bool = False

    @property
    def needs(self) -> str:
        """For messages: the columns."""
        return ", ".join(column.replace("|", " or ") for column in self.columns)

    def fits(self, row: Values) -> bool:
        """Whether the row has the columns."""
        return all(any(name in row for name in column.split("|")) for column in self.columns)

    def unread(self, row: Values) -> list[str]:
        """The columns that are not read, where that matters."""
        read = {name for column in self.columns for name in column.split("|")}
        return sorted(row.keys() - read - {"category", *SYSTEM, *ID_COLUMNS}) if self.exact else []


def layouts_named(names: Sequence[str], among: Sequence[Layout]) -> list[Layout]:
    """Layouts by their names.

    Raises:
        ValueError: a name is unknown.
    """
    by_name = {layout.name: layout for layout in among}
    for name in names:
        if name not in by_name:
            raise ValueError(f"there is no layout {name!r}: choose one of {', '.join(by_name)}")
    return [by_name[name] for name in names]


def recognise(
    row: Values, place: str, among: Sequence[Layout], preferred: Sequence[Layout] = ()
) -> Layout:
    """The first layout whose columns the row has; those that were chosen by name come first.

    Raises:
        ValueError: none fits, or it would leave a column unread that may belong to the text.
    """
    for layout in preferred:
        if layout.fits(row):
            return layout
    fitting = next((layout for layout in among if layout.fits(row)), None)
    if fitting is None:
        columns = ", ".join(sorted(row)) or "none"
        known = "; ".join(f"{layout.name}: {layout.needs}" for layout in among)
        raise ValueError(f"{place}: its columns ({columns}) are of no known layout ({known})")
    if unread := fitting.unread(row):
        raise ValueError(
            f"{place}: {', '.join(unread)} may be a part of what is said, and {fitting.name} does not read it: drop it, "
            f"or choose layout {fitting.name}"
        )
    return fitting


def parse_json_field(value: Any, what: str) -> Any:
    """The value of a string of JSON; what is no string as it is. ValueError, naming ``what``, if it is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON: {error}") from error


def _turns(key: str) -> Callable[[Values, str], list[Message]]:
    """Of a column of turns, behind the system prompt if that has a column of its own."""

    def read(row: Values, place: str) -> list[Message]:
        turns = row[key]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{place}: {key!r} must be a list of at least one message")
        return _with_system(
            row, _ordered_results([as_message(turn, place) for turn in turns], place), place
        )

    return read


def as_message(turn: Any, place: str = "message") -> Message:
    """A turn as a message: a text, a thought, tool calls, each under one name whatever the row calls it.

    Further keys are the template's to read.
    """
    if not isinstance(turn, dict) or not ({"from", "value"} <= turn.keys() or "role" in turn):
        raise ValueError(f"{place}: a message needs 'role' and 'content', or 'from' and 'value'")
    out = {name: value for name, value in turn.items() if value is not None}
    if "role" not in out:
        speaker = out.pop("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise ValueError(
                f"{place}: unknown speaker {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}"
            )
        out = {"role": SHAREGPT_ROLES[speaker], "content": out.pop("value", None), **out}
    if out["role"] not in ROLES:
        raise ValueError(f"{place}: unknown role {out['role']!r}; known: {', '.join(ROLES)}")
    if out["role"] == "function":
        out["role"] = "tool"
    if "function_call" in out:
        out["tool_calls"] = [out.pop("function_call")]
    if "tool_calls" in out:
        out["tool_calls"] = _tool_calls(out["tool_calls"], place)
    if unread := [name for name in UNREAD_KEYS if out.get(name)]:
        raise ValueError(
            f"{place}: a message has {unread[0]!r}, which specdec does not read: drop it"
        )
    _take_thinking_parts(out)
    _name_thought(out, place)
    if not out.get("content") and isinstance(out.get("refusal"), str):
        out["content"] = out["refusal"]
    out.pop("refusal", None)
    says_otherwise = bool(out.get("tool_calls") or out.get("reasoning_content"))
    out["content"] = _content(out.get("content"), place, may_be_missing=says_otherwise)
    if (weight := _weight(out, place)) is not None:
        out["weight"] = weight
    for name in ("prompt_token_ids", "token_ids"):
        if name in out and not _are_ids(out[name]):
            raise ValueError(f"{place}: {name!r} must be a list of at least one token id")
    return out


def _content(content: Any, place: str, may_be_missing: bool) -> str:
    """A message's text; of a list of parts, the texts one after another."""
    if content is None and may_be_missing:
        return ""
    if isinstance(content, list):
        return "".join(_part(part, place) for part in content)
    if content is None:
        raise ValueError(
            f"{place}: a message has no text ('content'), and neither a tool call nor a thought"
        )
    if not isinstance(content, str):
        raise ValueError(
            f"{place}: a message's text must be a string, got {type(content).__name__}"
        )
    return content


def _part(part: Any, place: str) -> str:
    """The text of a part of a message; ValueError if it is an image or another part without text."""
    kind = part.get("type", "text") if isinstance(part, dict) else "text"
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise ValueError(
            f"{place}: a message has a part of type {kind!r}; known: {', '.join(TEXT_PARTS)}, thinking"
        )
    return text


def _take_thinking_parts(message: Message) -> None:
    """Move the parts of a message that are thoughts to its key ``reasoning_content``."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return
    thinking = [
        part
        for part in parts
        if isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")
    ]
    thoughts: list[Any] = []
    for part in thinking:
        thought = part.get(part["type"], part.get("text"))
        thoughts += (
            [item.get("text") for item in thought] if isinstance(thought, list) else [thought]
        )
    if thoughts and all(isinstance(thought, str) for thought in thoughts):
        message["reasoning_content"] = "".join(map(str, thoughts))
        message["content"] = [part for part in parts if part not in thinking]


def _name_thought(message: Message, place: str) -> None:
    """Move a message's thought to the key ``reasoning_content``, whichever of :data:`THOUGHT_KEYS` it has."""
    thoughts = {}
    for key in THOUGHT_KEYS:
        if key in message:
            thoughts[key] = message.pop(key)
            if not isinstance(thoughts[key], str):
                raise ValueError(
                    f"{place}: {key!r} must be a string, got {type(thoughts[key]).__name__}"
                )
    texts = {thought for thought in thoughts.values() if thought.strip()}
    if len(texts) > 1:
        raise ValueError(
            f"{place}: {' and '.join(map(repr, thoughts))} are different thoughts: drop all but one"
        )
    if texts:
        message["reasoning_content"] = texts.pop()


def _weight(message: Message, place: str) -> int | None:
    """Whether a message is learned, 0 or 1, by whichever of :data:`WEIGHT_KEYS` it has; None if it has none."""
    weights = {message.pop(key) for key in WEIGHT_KEYS if key in message}
    if not weights:
        return None
    if len(weights) > 1 or not all(
        isinstance(weight, bool | int | float) and weight in (0, 1) for weight in weights
    ):
        raise ValueError(
            f"{place}: {', '.join(WEIGHT_KEYS)} of a message must be 0 or 1 (false or true) and agree"
        )
    return int(weights.pop())


def _are_ids(ids: Any) -> bool:
    return (
        isinstance(ids, list)
        and bool(ids)
        and all(type(token) is int and 0 <= token < 2**31 for token in ids)
    )


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Calls as OpenAI has them; the arguments stay an object, or a string of JSON that holds one."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{place}: 'tool_calls' must be a list of objects")
    out = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place}: a tool call needs a function with its name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            _check_json(arguments, f"{place}: the arguments of tool call {function['name']}")
        what = f"{place}: the arguments of tool call {function['name']}"
        if not isinstance(parse_json_field(arguments or "{}", what), dict):
            raise ValueError(f"{what} must be an object")
        rest = {
            name: value
            for name, value in call.items()
            if name not in ("function", "name", "arguments")
        }
        out.append(
            {
                "type": "function",
                **rest,
                "function": {"name": function["name"], "arguments": arguments or {}},
            }
        )
    return out


def _check_json(text: str, what: str) -> None:
    """Refuse JSON that says something else once it is read: a key that comes twice, or a number that is none."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) < len(items):
            raise ValueError("a key comes twice")
        return dict(items)

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        json.loads(text or "{}", object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON: {error}") from error


def _ordered_results(messages: list[Message], place: str) -> list[Message]:
    """Messages in which the results of tools stand in the order of the calls that they answer, where ids say so."""
    out: list[Message] = []
    ids: list[Any] = []  # of the calls before
    results: list[Message] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            results.append(message)
            continue
        call_ids = [result["tool_call_id"] for result in results if "tool_call_id" in result]
        if ids and all(ids) and len(call_ids) == len(results) > 0:
            if wrong := [name for name in call_ids if name not in ids]:
                raise ValueError(
                    f"{place}: the result of tool call {wrong[0]!r} has no such call before it"
                )
            if len(set(call_ids)) < len(call_ids):
                raise ValueError(f"{place}: two results are of the same tool call")
            results.sort(key=lambda result: ids.index(result["tool_call_id"]))
        out += results
        results = []
        out.append(message)
        ids = [call.get("id") for call in message.get("tool_calls") or ()]
    return out[:-1]


def _text(row: Values, key: str, place: str) -> str:
    if not isinstance(row[key], str):
        raise ValueError(f"{place}: {key!r} must be a string, got {type(row[key]).__name__}")
    return row[key]


def _texts(row: Values, key: str, place: str) -> list[str]:
    texts = row[key]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{place}: {key!r} must be a list of at least one string")
    return texts


def _one_of(row: Values, columns: str, place: str) -> str:
    keys = [key for key in columns.split("|") if key in row]
    if len(keys) > 1:
        raise ValueError(
            f"{place}: {' and '.join(map(repr, keys))} may each be the text: drop all but one"
        )
    return _text(row, keys[0], place)


def _with_system(row: Values, messages: list[Message], place: str) -> list[Message]:
    """The messages behind the system prompt that stands in a column of its own, if one does."""
    key = next((key for key in SYSTEM if key in row), None)
    if key is None or not _text(row, key, place):
        return messages
    if messages[0]["role"] in ("system", "developer"):
        if messages[0]["content"] != row[key]:
            raise ValueError(
                f"{place}: {key!r} and the first message are two different system prompts: drop one"
            )
        return messages
    return [{"role": "system", "content": row[key]}, *messages]


def _exchange(row: Values, question: str, answer: str, place: str) -> list[Message]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _with_system(row, messages, place)


def _instruction(row: Values, place: str, before: str = "\n\n") -> str:
    """An instruction and, after a blank line, its input, if it has one."""
    more = before + _text(row, "input", place) if row.get("input", "") != "" else ""
    return _text(row, "instruction", place) + more


def _open_messages(row: Values, place: str) -> Question:
    messages = _turns("messages")(row, place)
    for number, message in enumerate(messages, 1):
        if message.keys() != {"role", "content"}:
            more = f"it has {', '.join(sorted(message))}"
            raise ValueError(
                f"{place}: message {number} must have role and content and nothing else; {more}"
            )
    if messages[-1]["role"] != "user":
        raise ValueError(
            f"{place}: messages must end with a user turn to be answered, not {messages[-1]['role']}"
        )
    for number, (message, following) in enumerate(itertools.pairwise(messages), 1):
        if message["role"] == following["role"] == "user":
            raise ValueError(
                f"{place}: messages {number} and {number + 1} are both the user's, and the first is not answered: give "
                "turns that the target is to answer one after the other as `turns`, a list of strings"
            )
    return Question(messages=messages)


def _speed_bench(row: Values, place: str) -> Question:
    """The user's turns; a conversation that somebody else answers too is read as any other."""
    messages = _turns("messages")(row, place)
    if all(
        message.keys() == {"role", "content"} and message["role"] == "user" for message in messages
    ):
        return Question(turns=[message["content"] for message in messages])
    return _open_messages(row, place)


def _raw(row: Values, place: str) -> Question:
    """Raw text; a list is the turns of MT-bench as the Hub has it (HuggingFaceH4/mt_bench_prompts)."""
    if isinstance(row["prompt"], list):
        return Question(turns=_texts(row, "prompt", place))
    return Question(text=_text(row, "prompt", place))


def _user_turn(row: Values, text: str, place: str) -> Question:
    """One turn, behind the system prompt if the row has one."""
    messages = _with_system(row, [{"role": "user", "content": text}], place)
    return Question(turns=[text]) if len(messages) == 1 else Question(messages=messages)


def _turn_of(key: str, before: str = "", after: str = "") -> Callable[[Values, str], Question]:
    return lambda row, place: _user_turn(row, before + _text(row, key, place) + after, place)


def _program(row: Values, place: str) -> Question:
    """A programming problem of LiveCodeBench, with the code to begin with if there is some."""
    begin = row.get("starter_code", "") and _text(row, "starter_code", place)
    form = (
        "Use the following code structure" if begin else "Write your code in the following format"
    )
    text = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{_text(row, 'question_content', place)}\n\n### Format: {form}:\n"
        f"```python\n{begin or '# YOUR CODE HERE'}\n```\n\n### Answer: (use the provided format with backticks)"
    )
    return _user_turn(row, text, place)


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


PROMPT = "prompt|question"
RESPONSE = "response|completion|answer"

TRAINING: tuple[Layout, ...] = (
    # OpenAI's messages, which UltraChat 200k has too, beside a prompt that repeats the first of them
    Layout("messages", ("messages",), _turns("messages")),
    Layout("sharegpt", ("conversations",), _turns("conversations")),
    Layout("alpaca", ("instruction", "output"),
           lambda row, place: _exchange(row, _instruction(row, place), _text(row, "output", place), place)),
    Layout("prompt_response", (PROMPT, RESPONSE), exact=True,  # GSM8K too
           read=lambda row, place: _exchange(row, _one_of(row, PROMPT, place), _one_of(row, RESPONSE, place), place)),
)  # fmt: skip

PROMPTS: tuple[Layout, ...] = (
    # MT-bench (https://arxiv.org/abs/2306.05685), Spec-Bench (https://arxiv.org/abs/2401.07851)
    Layout("turns", ("turns",), lambda row, place: Question(turns=_texts(row, "turns", place))),
    # SPEED-Bench (https://arxiv.org/abs/2604.09557), as its own script writes it: messages of the user alone
    Layout("speed_bench", ("messages", "category", "source", "multiturn"), _speed_bench),
    # a conversation up to the user turn to be answered
    Layout("messages", ("messages",), _open_messages),
    # HumanEval (https://arxiv.org/abs/2107.03374), with EAGLE's instruction right before the code
    Layout("humaneval", ("task_id", "prompt", "entry_point"), _turn_of("prompt", "Complete the code I provided."),
           "humaneval"),
    # https://arxiv.org/abs/2108.07732
    Layout("mbpp", ("task_id", "prompt", "test_list"), _turn_of("prompt"), "mbpp"),
    # Arena-Hard 2.0 (https://arxiv.org/abs/2406.11939)
    Layout("arena_hard", ("uid", "prompt", "category"), _turn_of("prompt")),
    # LiveCodeBench (https://arxiv.org/abs/2403.07974), in its own words
    Layout("livecodebench", ("question_content",), _program, "livecodebench"),
    # MATH-500 (https://arxiv.org/abs/2305.20050), AIME
    Layout("math", ("problem", "answer"), _turn_of("problem", after=BOXED), "math"),
    # text that the target continues, a line of a plain text file; by name: a user turn, as `vllm bench` asks it
    Layout("prompt", ("prompt",), _raw),
    Layout("prompt_turn", ("prompt",), _turn_of("prompt")),
    # GSM8K (https://arxiv.org/abs/2110.14168): the question is the user's turn, as in EAGLE's evaluation
    Layout("gsm8k", ("question", "answer"), _turn_of("question"), "gsm8k", exact=True),
    Layout("alpaca", ("instruction", "output"),
           lambda row, place: _user_turn(row, _instruction(row, place), place), "alpaca"),
    # CNN/DailyMail (https://arxiv.org/abs/1704.04368), in the words of Spec-Bench
    Layout("cnn_dailymail", ("article", "highlights"), _turn_of("article", "Summarize: "), "cnn_dailymail"),
    # by name: three of these sets in the words of DFlash (https://arxiv.org/abs/2602.06036) and the papers after it
    Layout("gsm8k_boxed", ("question", "answer"), _turn_of("question", after=BOXED), "gsm8k"),
    Layout("humaneval_solution", ("task_id", "prompt", "entry_point"),
           _turn_of("prompt", "Write a solution to the following problem and make sure that it passes the tests:\n"
                    "```python\n", "\n```"), "humaneval"),
    Layout("alpaca_input", ("instruction", "output"),
           lambda row, place: _user_turn(row, _instruction(row, place, "\n\nInput:\n"), place), "alpaca"),
)  # fmt: skip
