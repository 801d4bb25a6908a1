"""The layouts of rows: by which columns each is recognized, and how its conversation or prompt is read.

A row is read by the first layout whose columns it has: of :data:`TRAINING`, the table of training data, or of
:data:`PROMPTS`, that of prompts. A new layout is a line in one of them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.data.messages import Message, as_message, ordered_results, parse_json_field
from specdec.data.rows import ID_COLUMNS

Values = Mapping[str, Any]

UNREAD_COLUMNS = (
    "history",
    "chat_template_kwargs",
    "response",
    "completion",
)  # beside messages; they change what is said
SYSTEM = ("system", "system_prompt")  # columns of a system prompt
# keys of a message that calls tools, or answers a call
CALL_KEYS = {"tool_calls", "tool_call_id", "name", "reasoning_content"}


class ChatConversation(NamedTuple):
    """A conversation of training data."""

    place: str  # for messages: "chats.jsonl, line 7"
    messages: list[Message]
    tools: list[dict[str, Any]] | None  # that the messages may call
    id: str  # unique among those read together, and the same whenever they are read


class Question(NamedTuple):
    """A prompt: exactly one is set."""

    turns: list[str] | None = None  # of a user, whose answers the target gives
    # of a conversation that ends with a user turn or a tool's result, with role and content
    messages: list[Message] | None = None
    text: str | None = None  # raw, used as it is
    tools: list[dict[str, Any]] | None = None  # that may be called, as JSON schemas

    @property
    def blank(self) -> bool:
        """Whether a part is blank: not a fault of the file, but nothing that could be decoded."""
        said = [
            message
            for message in self.messages or []
            if message["role"] != "tool" and not message.get("tool_calls")
        ]
        texts = self.turns or [message["content"] for message in said] or [self.text or ""]
        return not all(text.strip() for text in texts)


class Layout(NamedTuple):
    """A way to read rows that have certain columns."""

    name: str
    columns: tuple[str, ...]  # all of them must be in a row; of ``a|b`` one
    read: Callable[[Values, str], Any]
    """Reads a row that has a place: returns messages of a training row, a :class:`Question` of a prompt. It raises a
    ValueError that names the place and the column where the row is malformed."""
    category: str | None = None  # of prompts that bring none
    # a row with a further column, which may belong to the text, is refused unless by name
    exact: bool = False

    @property
    def needs(self) -> str:
        """The columns in words, for messages."""
        return ", ".join(column.replace("|", " or ") for column in self.columns)

    def fits(self, row: Values) -> bool:
        """Return whether the row has the columns."""
        return all(any(name in row for name in column.split("|")) for column in self.columns)

    def unread(self, row: Values) -> list[str]:
        """Return the columns that are not read, where that matters."""
        read = {name for column in self.columns for name in column.split("|")}
        return sorted(row.keys() - read - {"category", *SYSTEM, *ID_COLUMNS}) if self.exact else []


def layouts_named(names: Sequence[str], among: Sequence[Layout]) -> list[Layout]:
    """Return layouts by their names.

    Raises:
        ValueError: a name is unknown.
    """
    by_name = {layout.name: layout for layout in among}
    for name in names:
        if name not in by_name:
            raise ValueError(f"there is no layout {name!r}: choose one of {', '.join(by_name)}")
    return [by_name[name] for name in names]


def recognize(
    row: Values, place: str, among: Sequence[Layout], preferred: Sequence[Layout] = ()
) -> Layout:
    """Return the first layout whose columns the row has; those that were chosen by name come first.

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
            f"{place}: {', '.join(unread)} may be a part of what is said, and {fitting.name} does not read it: drop "
            f"it, or choose layout {fitting.name}"
        )
    return fitting


def tools_of(values: Values, place: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row's columns ``tools`` or, as OpenAI had them once, ``functions``; None without any.

    Raises:
        ValueError: they are no list of JSON schemas.
    """
    column = values.get("tools") or values.get("functions")
    tools = parse_json_field(column, f"{place}: 'tools'") or None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{place}: 'tools' must be a list of JSON schemas")
    if tools and not values.get("tools"):  # the older column has the functions alone
        tools = [{"type": "function", "function": function} for function in tools]
    return tools


def _turns(key: str) -> Callable[[Values, str], list[Message]]:
    """Return what reads messages from a column of turns, after the system prompt if that has its own column."""

    def read(row: Values, place: str) -> list[Message]:
        turns = row[key]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{place}: {key!r} must be a list of at least one message")
        return _with_system(
            row, ordered_results([as_message(turn, place) for turn in turns], place), place
        )

    return read


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
    """Return the messages after the system prompt from its own column, if there is one."""
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
    """Return an instruction and, after a blank line, its input, if it has one."""
    more = before + _text(row, "input", place) if row.get("input", "") != "" else ""
    return _text(row, "instruction", place) + more


def _open_messages(row: Values, place: str) -> Question:
    messages = _turns("messages")(row, place)
    has_tools = bool(tools_of(row, place))
    required = {"role", "content"}
    for number, message in enumerate(messages, 1):
        if not has_tools and (message["role"] == "tool" or message.get("tool_calls")):
            raise ValueError(
                f"{place}: message {number} calls a tool or holds a result, and the row has no tools: add a column "
                "'tools', a list of JSON schemas"
            )
        if not required <= message.keys() <= required | (CALL_KEYS if has_tools else set()):
            more = f"it has {', '.join(sorted(message))}"
            raise ValueError(
                f"{place}: message {number} must have role and content and nothing else; {more}"
            )
    ends = ("user", "tool") if has_tools else ("user",)
    if messages[-1]["role"] not in ends:
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
    """Return the user's turns; a conversation that somebody else answers too is read as any other."""
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
    """Return a programming problem of LiveCodeBench, with the code to begin with if there is some."""
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


def _bfcl(row: Values, place: str) -> Question:
    """Return the user's turns of the Berkeley Function-Calling Leaderboard. Its ``question`` is a list of turns, each a
    list of messages; its ``function`` lists the tools in a dialect of JSON Schema."""
    turns = parse_json_field(row["question"], f"{place}: 'question'")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(x, list) and x for x in turns)
    ):
        raise ValueError(f"{place}: 'question' must be a list of turns, each a list of messages")
    functions = parse_json_field(row["function"], f"{place}: 'function'")
    if not isinstance(functions, list) or not all(map(_is_function, functions)):
        raise ValueError(f"{place}: 'function' must be a list of functions, each with a name")
    tools = [{"type": "function", "function": _json_schema(function)} for function in functions]
    messages_of_turns = [[as_message(message, place) for message in turn] for turn in turns]
    roles = [[message["role"] for message in messages] for messages in messages_of_turns]
    if len(turns) == 1:
        if roles[0][-1] != "user":
            raise ValueError(f"{place}: 'question' must end with a user's message")
        return Question(messages=messages_of_turns[0], tools=tools or None)
    if any(of_turn != ["user"] for of_turn in roles):
        raise ValueError(f"{place}: of several turns, each must be one message of the user")
    texts = [messages[0]["content"] for messages in messages_of_turns]
    return Question(turns=texts, tools=tools or None)


def _is_function(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


# Names of types in that dialect, which come from Python, Java and JavaScript.
JSON_TYPES = {
    "dict": "object", "HashMap": "object", "Hashtable": "object", "float": "number", "double": "number",
    "list": "array", "tuple": "array", "Array": "array", "ArrayList": "array", "Queue": "array", "Stack": "array",
    "any": "string", "Any": "string", "String": "string", "char": "string", "bool": "boolean", "Boolean": "boolean",
    "int": "integer", "byte": "integer", "short": "integer", "long": "integer", "Bigint": "integer",
}  # fmt: skip


def _json_schema(value: Any) -> Any:
    """Return a schema with JSON Schema's names of types."""
    if isinstance(value, list):
        return [_json_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    schema = {}
    for key, item in value.items():
        if key == "type" and isinstance(item, str):
            schema[key] = JSON_TYPES.get(item, item)
        elif key in ("default", "const", "examples", "enum"):
            schema[key] = item  # a value, not a schema
        else:
            schema[key] = _json_schema(item)
    return schema


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
    # Berkeley Function-Calling Leaderboard (https://gorilla.cs.berkeley.edu/leaderboard.html)
    Layout("bfcl", ("question", "function"), _bfcl, "tool_call"),
    # a conversation up to the user turn to be answered, or to the result of a tool
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
