"""A template that loops, grows or fails is refused in one line and in bounded time."""

import signal
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec.data import rendering
from specdec.data.rendering import Renderer
from specdec.data.template import text_ids
from specdec.data.texts import encode_texts
from tests.data import tiny
from tests.data.tiny import tiny_tokenizer

ASKED: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
REFUSED = "^the chat template refuses the conversation: "
LOOPS = "".join(f"{{% for {name} in range(9999) %}}" for name in "abc") + "%s" + 3 * "{% endfor %}"


def rendered(source: str) -> str:
    return Renderer(tiny_tokenizer(source)).render(ASKED, None, True)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 0.5)


ENDLESS = {
    "loops": LOOPS.replace("%s", ""),
    "text": LOOPS.replace("%s", "words and words"),
    "filters": LOOPS.replace("%s", "{{ 'ab'|upper|list|sort|join }}"),
    "conditions": LOOPS.replace("%s", "{% if a == b == c %}{% else %}{% endif %}"),
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "lists": "{{ range(90000)|map('string')|list|sort|map('length')|list|sum }}" * 50,
    "tagged": "{% generation %}" + LOOPS.replace("%s", "") + "{% endgeneration %}",
}


@pytest.mark.parametrize(
    "name", ["loops", *(pytest.param(name, marks=pytest.mark.slow) for name in list(ENDLESS)[1:])]
)
def test_what_never_ends_is_ended(name: str, short: None) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match=REFUSED + "it takes more than 0.5 s or 1 GiB$"):
        rendered(ENDLESS[name])
    assert time.monotonic() - begin < 30


def test_after_one_template_was_ended_the_next_is_rendered_also_from_other_threads(
    short: None,
) -> None:
    results: list[Any] = []

    def render(source: str) -> None:
        try:
            results.append(rendered(source))
        except ValueError as error:
            results.append(error)

    for source in (LOOPS.replace("%s", "x"), tiny.CHATML):
        thread = threading.Thread(target=render, args=(source,))
        thread.start()
        thread.join(60)
    assert isinstance(results[0], ValueError)
    assert results[1].startswith("<|im_start|>user\na<|im_end|>")


def test_a_template_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real = rendering._SANDBOX.fault_of
    monkeypatch.setattr(
        rendering._SANDBOX,
        "fault_of",
        lambda *request: checked.append(request[0]) or real(*request),
    )
    source = tiny.CHATML + "{# of this test alone #}"
    for _ in range(3):
        rendered(source)
    assert checked == [source]


@pytest.mark.parametrize("pause", [0.0, 2.0])
def test_a_checking_process_that_stands_still_is_waited_for(pause: float, short: None) -> None:
    """As when a job is stopped, or the machine has no time for it: it has computed nothing meanwhile."""
    rendered(tiny.CHATML + f"{{# which starts the process, {pause} #}}")
    process = rendering._SANDBOX.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(pause, process.send_signal, [signal.SIGCONT])
    timer.start()
    try:
        text = rendered(tiny.CHATML + f"{{# which waits for the process, {pause} #}}")
        assert text.startswith("<|im_start|>user\na<|im_end|>")
        assert rendering._SANDBOX.process is process
    finally:
        timer.join()


def test_a_checking_process_that_never_goes_on_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendered(tiny.CHATML + "{# which starts it #}")
    monkeypatch.setattr(rendering, "POLLS", 4)
    process = rendering._SANDBOX.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match="the process that checks it does not answer"):
        rendered(tiny.CHATML + "{# which has no answer #}")
    assert process.poll() is not None


GIANTS = {
    "text that doubles": "{% set ns = namespace(s='ab') %}"
    + "{% set ns.s = ns.s ~ ns.s %}" * 40
    + "{{ ns.s }}",
    "a product": "{% set n = 100000 %}{{ 'a' * n * n }}",
    "a width": "{{ '%2000000000d' % 1 }}",
    "padding": "{% set n = 1000000 %}{{ 'a'.ljust(n * n) }}",
    "replacing": "{% set s = 'a' * 100000 %}{{ s|replace('a', s) }}",
    "a list": "{% set n = 100000 %}{{ (range(n)|list) * n }}",
    "indentation": "{% set n = 1000000 %}{{ [1]|tojson(indent=n * n) }}",
}


@pytest.mark.parametrize(
    "name",
    ["a product", *(pytest.param(name, marks=pytest.mark.slow) for name in list(GIANTS)[1:])],
)
def test_one_operation_gets_no_more_memory_either(name: str) -> None:
    with pytest.raises(
        ValueError, match=REFUSED + "(it takes more than 10 s or 1 GiB|OverflowError)"
    ):
        rendered(GIANTS[name])


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
    "(" * 10
    + "{{ "
    + "(" * 3000
    + "1"
    + ")" * 3000
    + " }}": "RecursionError|nested|too many|it takes more",
}


@pytest.mark.parametrize("source", FAULTS)
def test_what_a_template_raises_is_one_line(source: str) -> None:
    with pytest.raises(ValueError, match=REFUSED + f".*({FAULTS[source]})") as caught:
        rendered(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_tokenizer_that_fails_is_one_line() -> None:
    unknown = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="<unk>"))
    )
    reason = "^the tokenizer fails on a text: WordLevel error: Missing .* is its tokenizer.json as it should be"
    with pytest.raises(ValueError, match=reason):
        text_ids(unknown, "b")
    with pytest.raises(ValueError, match=reason):
        list(encode_texts(["b"], unknown))


def test_a_giant_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="it is no text of at most 1,048,576 characters"):
        rendered("x" * 2**21)


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
        found = rendered(source or "x")
    except ValueError as error:
        found = str(error)
        assert "\n" not in found and len(found) < 400, found
    assert isinstance(found, str) and time.monotonic() - begin < 30
