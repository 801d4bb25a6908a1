"""A template that loops, grows or fails is refused in one line and in bounded time."""

import resource
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec.data import template
from specdec.data.template import prompt_ids, rendered
from specdec.data.texts import encode_texts
from tests.data import tiny
from tests.data.tiny import tiny_tokenizer

ASKED: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
REFUSED = "^the chat template refuses the conversation: "
LOOPS = "".join(f"{{% for {name} in range(9999) %}}" for name in "abc") + "%s" + 3 * "{% endfor %}"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.3)


ENDLESS = {
    "loops": LOOPS.replace("%s", ""),
    "text": LOOPS.replace("%s", "words and words"),
    "filters": LOOPS.replace("%s", "{{ 'ab'|upper|list|sort|join }}"),
    "conditions": LOOPS.replace("%s", "{% if a == b == c %}{% else %}{% endif %}"),
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "lists": "{{ range(90000)|map('string')|list|sort|map('length')|list|sum }}" * 50,
    "tagged": "{% generation %}" + LOOPS.replace("%s", "") + "{% endgeneration %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_ended(name: str, short: None) -> None:
    tokenizer, begin = tiny_tokenizer(ENDLESS[name]), time.monotonic()
    with pytest.raises(ValueError, match=REFUSED + "it takes more than 0.3 s or 1 GiB$"):
        rendered(tokenizer, ASKED, True)
    assert time.monotonic() - begin < 5


def test_other_threads_are_held_to_it_and_tracing_goes_on(short: None) -> None:
    caught: list[BaseException] = []

    def render() -> None:
        try:
            rendered(tiny_tokenizer(ENDLESS["loops"]), ASKED, True)
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(20)
    assert len(caught) == 1
    seen = []
    before = sys.gettrace()
    try:
        sys.settrace(lambda frame, event, arg: seen.append(event))
        rendered(tiny_tokenizer(tiny.CHATML), ASKED, True)
        tracer = sys.gettrace()
    finally:
        sys.settrace(before)
    assert tracer is not None and tracer.__name__ == "<lambda>"


@pytest.mark.parametrize("threads", [1, 2])
def test_text_that_doubles_is_ended(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    monkeypatch.setattr(template, "MEMORY", 2**27)
    monkeypatch.setattr(template, "UNNOTICED", 0.0)
    doubling = "{% set ns = namespace(s='ab') %}" + "{% set ns.s = ns.s ~ ns.s %}" * 40 + "{{ ns.s }}"
    with pytest.raises(ValueError, match=REFUSED + "it takes more than"):
        rendered(tiny_tokenizer(doubling), ASKED, True)


GIANTS = {
    "a product": "{% set n = 100000 %}{{ 'a' * n * n }}",
    "a width": "{{ '%2000000000d' % 1 }}",
    "padding": "{% set n = 1000000 %}{{ 'a'.ljust(n * n) }}",
    "replacing": "{% set s = 'a' * 100000 %}{{ s|replace('a', s) }}",
    "a list": "{% set n = 100000 %}{{ (range(n)|list) * n }}",
    "indentation": "{% set n = 1000000 %}{{ [1]|tojson(indent=n * n) }}",
}


@pytest.mark.parametrize("name", GIANTS)
def test_one_operation_gets_no_more_memory_either(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # pytest's own wait
    before, begin = resource.getrlimit(resource.RLIMIT_AS), time.monotonic()
    with pytest.raises(ValueError, match=REFUSED + "(it takes more than 10 s or 1 GiB|OverflowError)"):
        rendered(tiny_tokenizer(GIANTS[name]), ASKED, True)
    assert resource.getrlimit(resource.RLIMIT_AS) == before and time.monotonic() - begin < 5


FAULTS = {
    "{{ 1 / 0 }}": "ZeroDivisionError: division by zero",
    "{{ 1 % 0 }}": "ZeroDivisionError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: ",
    "{{ 2 ** 3 }}": r"line 1: \*\*: templates with powers",
    "\n{{ 'a' * 10_000_000_000 }}": "line 2: 10_000_000_000: templates with powers or numbers above 1,000,000",
    "{{ 'a' * 0xffffffffff }}": "line 1: 0xffffffffff",
    "{% for a in range(1000000) %}{% endfor %}": "OverflowError: Range too big",
    "{{ 'abcdefghij' * 1000000 * 8 }}": "it makes 80,000,000 characters of it",
    "{{ messages[9].content.x }}": "list object has no element 9|has no attribute",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.__class__.x }}": "unsafe",
    "{{ messages[0] + 1 }}": "TypeError: ",
    "{{ 'x'.join(7) }}": "TypeError: can only join an iterable",
    "{{ 'x'|fail }}": "No filter named",
    "{{ raise_exception('a\x1b[31mb\nc') }}": "ab c$",
    "{% if %}": "Expected an expression",
    "{{ x": "unexpected end of template",
    "{% include 'x' %}": "no loader",
    "{{ '\\ud800' }}{{ 'x'.encode('ascii', 'x') }}" + "{{ none.x.y }}": "",
    "(" * 10 + "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "RecursionError|nested|too many|it takes more",
}


@pytest.mark.parametrize("source", FAULTS)
def test_what_a_template_raises_is_one_line(source: str) -> None:
    with pytest.raises(ValueError, match=REFUSED + f".*({FAULTS[source]})") as caught:
        rendered(tiny_tokenizer(source), ASKED, True)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_tokenizer_that_fails_is_one_line() -> None:
    unknown = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="<unk>")))
    reason = "^the tokenizer fails on a text: WordLevel error: Missing .* is its tokenizer.json as it should be"
    with pytest.raises(ValueError, match=reason):
        prompt_ids(unknown, "b")
    with pytest.raises(ValueError, match=reason):
        list(encode_texts(["b"], unknown))


def test_a_giant_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="it is no text of at most 1,048,576 characters"):
        rendered(tiny_tokenizer("x" * 2**21), ASKED, True)


PIECES = st.sampled_from(
    [
        "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m['x'].y }}", "{% if m %}",
        "{% endif %}", "{{ range(99999)|list }}", "{{ 1/0 }}", "{% set x = 'a' * 99999 %}", "{{ x * 999 }}",
        "{% macro f(a) %}",
        "{% endmacro %}", "{{ f(f) }}", "{% generation %}", "{% endgeneration %}", "{{ x|tojson }}", "{{ lipsum() }}",
        "{{ cycler(1).next() }}", "{{ m|map('f')|list }}", "{% raw %}", "{# ", "{{", "}}", "{%",
        "{{ '%99999d'|format(1) }}",
        "{{ x|replace('a', x) }}", "{% break %}", "{% call f() %}", "{{ self }}", "{{ raise_exception(x) }}",
        "{{ strftime_now(x) }}", "{{ strftime_now('%Y') }}",
    ]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(source=st.lists(st.one_of(PIECES, st.text(max_size=5)), min_size=1, max_size=8).map("".join))
def test_any_template_renders_or_is_refused(source: str) -> None:
    begin = time.monotonic()
    try:
        found = rendered(tiny_tokenizer(source or "x"), ASKED, True)
    except ValueError as error:
        found = str(error)
        assert "\n" not in found and len(found) < 400, found
    assert isinstance(found, str) and time.monotonic() - begin < 30
