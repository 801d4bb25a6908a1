"""What must be supervised: of each assistant turn the prompt in which it is generated, and what the model writes.

The prompt is the template's own rendering of the messages before, with the generation prompt and the thinking switch
that fits. The turn is what the twin (without a twin, the template) writes behind its own prompt, up to and including
the first token at which the model stops. A form of the messages counts only if all that they say stands there.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.chat_oracle.conversations import Row
from benchmarks.chat_oracle.said import THOUGHT_KEYS, Form, Said, forms, lost, said, written
from benchmarks.chat_oracle.tokenizers import sources, stops_of, tokenizer_of, twin_of, variables

SWITCHES = ("enable_thinking", "thinking")
OPEN = "<think>"
# of every template: False if only of one that reads or writes `</think>` itself
TAGS_ARE_A_FORM = False
INJECTED = ("None", "null")  # what a template writes for a content that it does not expect


class RefusedError(ValueError):
    """A template raises."""


class Run(NamedTuple):
    """A stretch of a twin's text that it marks, without the white space behind it."""

    text: str  # of all
    start: int
    end: int

    @property
    def words(self) -> str:
        """The stretch."""
        return self.text[self.start : self.end]


class Choice(NamedTuple):
    """A turn in its context."""

    prompt: str
    turn: str
    form: Form
    remark: str = ""  # why a refusal is right as well
    twin: Run | None = None  # what the twin marks in that form
    twin_refuses: bool = False  # the row, in that form


class Expected(NamedTuple):
    """What one assistant turn must become."""

    index: int  # of the message
    said: Said
    choices: list[Choice]  # any of them; none where the template cannot express the turn
    reason: str = ""  # why there is none
    may_refuse: str = ""  # why a refusal is right as well


class Scene(NamedTuple):
    """A template and a row."""

    name: str
    messages: list[Said]
    tools: list[dict[str, Any]] | None

    def render(
        self, source: str, messages: Sequence[dict[str, Any]], prompt: bool, **switch: bool
    ) -> str:
        """A rendering, or what the template raises as a ValueError."""
        try:
            texts, _ = render_jinja_template(
                conversations=[list(messages)],
                tools=self.tools,
                chat_template=source,
                add_generation_prompt=prompt,
                **variables(tokenizer_of(self.name)),
                **switch,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise RefusedError(
                f"the template raises: {' '.join(str(error).split())[:120]}"
            ) from error
        return str(texts[0])


@lru_cache(256)
def switch_of(source: str) -> str | None:
    """The name under which a template reads whether the model thinks."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    plain = (
        source.replace("endgeneration", "endif")
        .replace("generation -%", "if true -%")
        .replace("generation %", "if true %")
    )
    names = meta.find_undeclared_variables(environment.parse(plain))
    return next((name for name in SWITCHES if name in names), None)


def expect(name: str, row: Row) -> list[Expected]:
    """What must become of each assistant turn of a row."""
    scene = Scene(name, [said(message) for message in row["messages"]], row.get("tools"))
    indices = [i for i, message in enumerate(scene.messages) if message.role == "assistant"]
    turns = [_expected(scene, i) for i in indices]
    forms_of_turns = dict.fromkeys(choice.form for turn in turns for choice in turn.choices)
    runs = {form: twin_runs(scene, form) for form in forms_of_turns}
    return [
        turn._replace(
            choices=[
                _with_twin(choice, runs[choice.form], k, len(turns)) for choice in turn.choices
            ]
        )
        for k, turn in enumerate(turns)
    ]


def _with_twin(choice: Choice, runs: list[Run] | None, k: int, turns: int) -> Choice:
    """A choice of turn ``k`` beside what the twin marks there, if it marks as many runs as there are turns."""
    run = runs[k] if runs is not None and len(runs) == turns else None
    return choice._replace(twin=run, twin_refuses=runs is None)


def _expected(scene: Scene, i: int) -> Expected:
    """Of one turn: the first form that expresses it; the row's own tags too, where they are the template's."""
    reasons: list[str] = []
    choices: list[Choice] = []
    gone = ""
    message = scene.messages[i]
    for form in forms(
        scene.messages[: i + 1], tags=_takes_tags(scene.name) or message.inline is not None
    ):
        if form.thought == "inline" and not _takes_tags(scene.name):
            continue
        verbatim = form.thought == "verbatim" and message.inline is not None
        context = (
            form.thought in ("inline", "verbatim")
            and not message.thought
            and _takes_tags(scene.name)
        )
        if choices and not gone and not verbatim and not context:
            continue
        try:
            choice = _choice(scene, i, form)
        except ValueError as error:
            reasons.append(str(error))
            continue
        lacks = _calls_gone(scene.messages[:i], choice.prompt)
        if not choices or (gone and not lacks):
            choices = [choice]
            gone = lacks
        elif not lacks and (
            (verbatim and _same_tags(choices[0])) or (context and choice.turn == choices[0].turn)
        ):
            # the row's own tags; or an earlier thought in the content, where no key holds it
            choices.append(choice)
    if not choices:
        try:
            choices += _opened(scene, i)
        except ValueError as error:
            reasons.append(str(error))
    if not choices:
        return Expected(i, message, [], _telling(reasons))
    may_refuse = choices[0].remark
    if (
        choices[0].form.thought == "verbatim"
        and message.inline is not None
        and has_thoughts(scene.name)
    ):
        may_refuse = "the template has a place for thoughts, but not in such a turn"
    if _raises(scene, choices[0].form):
        may_refuse = "the template refuses the whole row"
    elif _lacks_header(scene, choices[0]):
        may_refuse = "the generation prompt leaves out the header there"
    elif gone:
        may_refuse = f"the prompt lacks {gone} of a message before"
    elif message.inline is not None and not message.thought:
        may_refuse = "an empty thought may count as none"
    return Expected(i, message, choices, may_refuse=may_refuse)


@lru_cache(64)
def _takes_tags(name: str) -> bool:
    """Whether a thought may be written in tags of the content, as it has no key of its own."""
    reads = "</think>" in sources()[name] + (twin_of(name) or "")
    return not has_thoughts(name) and (reads or TAGS_ARE_A_FORM)


@lru_cache(64)
def has_thoughts(name: str) -> bool:
    """Whether a template reads a thought under a key of its own: then no model of it writes one in other tags."""
    asked = Said("user", "what?")
    call = (("call_1", "get", {"a": "b"}),)
    for key, calls in itertools.product(THOUGHT_KEYS, ((), call)):
        scene = Scene(
            name, [asked, Said("assistant", "" if calls else "so", "hmm", calls=calls)], None
        )
        for source in (sources()[name], twin_of(name) or ""):
            try:
                if "hmm" in scene.render(
                    source, [written(one, Form(key)) for one in scene.messages], False
                ):
                    return True
            except ValueError:
                continue
    return False


def _lacks_header(scene: Scene, choice: Choice) -> bool:
    """Whether the prompt does not end with what the template otherwise writes as the generation prompt."""
    question = [written(Said("user", "what?"), choice.form)]
    try:
        header = _opening(scene, sources()[scene.name], question, {})
    except RefusedError:
        return False
    return bool(header) and header.split()[0] not in choice.prompt[-2 * len(header) - 40 :]


def _raises(scene: Scene, form: Form) -> bool:
    """Whether the template raises of the whole row."""
    try:
        scene.render(
            sources()[scene.name], [written(message, form) for message in scene.messages], False
        )
    except RefusedError:
        return True
    return False


def _same_tags(choice: Choice) -> bool:
    """Whether the template itself writes a thought in the tags of a row."""
    return OPEN in choice.turn or choice.prompt.rstrip().endswith(OPEN)


def _calls_gone(messages: Sequence[Said], prompt: str) -> str:
    return ", ".join(
        name
        for message in messages
        for name in lost(message._replace(text=""), prompt, thought=False)
    )


def _telling(reasons: Sequence[str]) -> str:
    """The reason that says most: of the form that came farthest."""
    for words in ("the turn lacks", "begin", "the prompt lacks"):
        telling = [reason for reason in reasons if words in reason]
        if telling:
            return min(telling, key=len)
    return reasons[0]


def _switch(scene: Scene, message: Said) -> dict[str, bool]:
    name = switch_of(sources()[scene.name])
    return {name: bool(message.thought)} if name else {}


def _prompt(scene: Scene, i: int, form: Form) -> str:
    """The generation prompt of a turn, which must have the texts of all messages before."""
    before = [written(message, form) for message in scene.messages[:i]]
    prompt = scene.render(sources()[scene.name], before, True, **_switch(scene, scene.messages[i]))
    for message in scene.messages[:i]:
        if message.text not in prompt:
            raise ValueError(f"the prompt lacks the text of an earlier {message.role} message")
    return prompt


def _choice(scene: Scene, i: int, form: Form) -> Choice:
    """A turn in one form.

    Raises:
        ValueError: the template refuses the form, or something is lost in it.
    """
    prompt = _prompt(scene, i, form)
    own = sources()[scene.name]
    twin = twin_of(scene.name)
    reasons = []
    twins = [] if twin in (None, own) else [(twin, form._replace(string=False)), (twin, form)]
    for source, of_source in [*twins, (own, form)]:
        try:
            turn, remark = _turn(scene, i, form, prompt, source, of_source)
        except ValueError as error:
            reasons.append(str(error))
            continue
        return Choice(prompt, turn, form, remark)
    raise ValueError(_telling(reasons))


def _turn(
    scene: Scene, i: int, form: Form, prompt: str, source: str, of_source: Form
) -> tuple[str, str]:
    """What a source writes for a turn behind its own prompt: in the row's history, else in simpler ones."""
    message = scene.messages[i]
    switch = _switch(scene, message)
    opening = _opening(
        scene, sources()[scene.name], [written(one, form) for one in scene.messages[:i]], switch
    )
    reasons = []
    for history, remark in _histories(scene.messages, i):
        before = [written(one, of_source) for one in history]
        try:
            asked = scene.render(source, before, True, **switch)
            differs = asked != prompt and _opening(scene, source, before, switch) != opening
            if differs and not remark:
                raise ValueError("the generation prompt depends on the history")
            text = scene.render(source, [*before, written(message, of_source)], False, **switch)
            if not text.startswith(asked) and asked.rstrip().endswith(OPEN) and not message.thought:
                raise ValueError("the generation prompt begins a thought, and the turn has none")
            if not text.startswith(asked):
                raise ValueError("the turn does not begin with the generation prompt")
            turn = _cut(scene, text[len(asked) :]).removeprefix(opening if differs else "")
            _check(message, prompt, turn)
        except RefusedError:
            if history == scene.messages[:i]:  # in the row's own history
                raise
            continue
        except ValueError as error:
            reasons.append(str(error))
            continue
        return turn, remark
    raise ValueError(_telling(reasons))


def _histories(messages: Sequence[Said], i: int) -> Iterator[tuple[Sequence[Said], str]]:
    """What stands before a turn, and without what the template may write otherwise once the turn stands behind it."""
    before = list(messages[:i])
    yield before, ""
    without = [message._replace(thought="", inline=None) for message in before]
    yield without, ""
    yield [message._replace(text="") if message.calls else message for message in without], ""
    last = max((k for k, message in enumerate(before) if message.role == "user"), default=0)
    if before[last + 1 :]:
        yield without[: last + 1], "the template joins the turn to the one before"


def _opening(
    scene: Scene, source: str, before: Sequence[dict[str, Any]], switch: dict[str, bool]
) -> str:
    """What the generation prompt adds."""
    prompt = scene.render(source, before, True, **switch)
    asked = scene.render(source, before, False, **switch)
    same = 0
    while same < min(len(prompt), len(asked)) and prompt[same] == asked[same]:
        same += 1
    return prompt[same:]


def _cut(scene: Scene, text: str) -> str:
    """A text up to and including the first token at which the model stops."""
    ends = [text.index(stop) + len(stop) for stop in stops_of(scene.name) if stop in text]
    if not ends:
        raise ValueError("the turn lacks a token at which the model stops")
    return text[: min(ends)]


def _check(message: Said, prompt: str, turn: str) -> None:
    """Refuse a turn that lost something, has something that was not said, or a thought within a thought."""
    if gone := lost(message, turn):
        raise ValueError(f"the turn lacks {', '.join(gone)}")
    if any(word in turn for word in INJECTED):
        raise ValueError("the turn lacks a way to leave out the content")
    opened = (prompt[-20:] if prompt.rstrip().endswith(OPEN) else "") + turn
    if opened.count("</think>") > 1 or opened.count(OPEN) > 1:
        raise ValueError(
            "the turn lacks a place for the thought: its tags stand behind another thought"
        )
    if message.inline is None and not message.thought and prompt.rstrip().endswith(OPEN):
        raise ValueError("the generation prompt begins a thought, and the turn has none")


def _opened(scene: Scene, i: int) -> list[Choice]:
    """A thought that the template drops, behind a prompt that opens it; earlier thoughts may stand in tags or not."""
    message = scene.messages[i]
    reasons = ["there is no thought"]
    choices = []
    plain = message._replace(thought="", inline=None)
    remark = "the template has no thought beside a call" if message.calls else ""
    for form in forms(scene.messages[: i + 1]) if message.thought else ():
        try:
            prompt = _prompt(scene, i, form)
            if not prompt.rstrip().endswith(OPEN):
                raise ValueError("the prompt opens no thought")
            base = prompt.rstrip().removesuffix(OPEN)
            text = scene.render(
                sources()[scene.name],
                [written(one, form) for one in [*scene.messages[:i], plain]],
                False,
            )
            if not text.startswith(base):
                raise ValueError("the turn does not begin with the generation prompt")
            turn = f"{message.thought}\n</think>\n\n{_cut(scene, text[len(base) :])}"
            _check(message, prompt, turn)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if (prompt, turn) not in [choice[:2] for choice in choices]:
            choices.append(Choice(prompt, turn, form, remark))
    if choices:
        return choices
    raise ValueError(_telling(reasons[1:] or reasons))


def twin_runs(scene: Scene, form: Form) -> list[Run] | None:
    """What the twin marks in a form of the row; None where it has no twin or refuses the row."""
    source = twin_of(scene.name)
    for string in (False, form.string) if source else ():
        try:
            (text,), (spans,) = render_jinja_template(
                conversations=[
                    [written(message, form._replace(string=string)) for message in scene.messages]
                ],
                tools=scene.tools,
                chat_template=source,
                return_assistant_tokens_mask=True,
                **variables(tokenizer_of(scene.name)),
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError):
            continue
        return _runs(text, spans)
    return None


def _runs(text: str, spans: Sequence[tuple[int, int]]) -> list[Run]:
    """Marked stretches, joined where they touch, without the white space behind them."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return [Run(text, start, start + len(text[start:end].rstrip())) for start, end in joined]
