"""What a client sees of a server, and how it says that something is wrong."""

from collections.abc import Callable

import pytest

from specdec.evaluation.prompts import Prompt
from specdec.serving.bench.asking import Asking, ask
from specdec.serving.bench.endpoint import Endpoint
from specdec.serving.server import free_port
from tests.serving.fake_vllm import FakeVllm

Servers = Callable[..., FakeVllm]
TEXT = Prompt("one", None, None, None, "def f")
CHAT = Prompt("two", None, ["hello", "again"], None, None)
TALK = Prompt("three", None, None, [{"role": "system", "content": "s"}, {"role": "user", "content": "bye"}], None)
ASKING = Asking("the-target", max_new_tokens=9)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_have_v1_at_its_end(suffix: str, served: Servers) -> None:
    assert Endpoint(served(False).url + suffix).model() == "the-target"


@pytest.mark.parametrize("drafting", [False, True])
def test_tokens_are_counted_by_the_server(drafting: bool, served: Servers) -> None:
    server = served(drafting, delay=0.02)
    for prompt, start in ((TEXT, "def"), (CHAT, "hel"), (TALK, "bye")):
        answer = ask(Endpoint(server.url), ASKING, prompt)
        assert answer.text == "".join(f"{start}{n} " for n in range(9))
        assert (answer.prompt_id, answer.tokens) == (prompt.prompt_id, 9)
        assert 0.02 <= answer.first < answer.seconds
        # the first token alone, then eight one by one, or 3 + 1 + 4
        assert answer.seconds >= 0.02 * (9 if not drafting else 4)
        assert (answer.seconds < 0.02 * 9) or not drafting


def test_what_is_asked(served: Servers) -> None:
    server = served(False)
    for prompt in (TEXT, CHAT, TALK, TALK):
        ask(Endpoint(server.url), Asking("m", 2, temperature=0.5, ignore_eos=True), prompt)
    text, chat, talk, again = server.bodies
    assert text["prompt"] == "def f" and chat["messages"] == [{"role": "user", "content": "hello"}]
    assert talk["messages"] == TALK.messages
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ("m", 2, 0.5, True)
    assert talk["cache_salt"] != again["cache_salt"]  # else the second would find its prompt in a cache


def test_a_refusal_names_the_prompt(served: Servers) -> None:
    long = TEXT._replace(text="x" * 101)
    with pytest.raises(ValueError, match=r"^prompt one: http://\S+: status 400: the prompt is too long$"):
        ask(Endpoint(served(False).url), ASKING, long)


@pytest.mark.parametrize(("how", "message"), [("told", "the engine fell$"), ("silent", "the stream ended before")])
def test_an_answer_that_breaks_off_is_none(how: str, message: str, served: Servers) -> None:
    server = served(False)
    server.breaks = how
    with pytest.raises(ValueError, match=message):
        ask(Endpoint(server.url), ASKING, TEXT)


def test_servers_that_are_none(served: Servers) -> None:
    with pytest.raises(ValueError, match="no URL of a server"):
        Endpoint("localhost:8000")
    with pytest.raises(ValueError, match=r"Connection refused: is the server up\?"):
        Endpoint(f"http://127.0.0.1:{free_port()}").model()
    with pytest.raises(ValueError, match="status 404: Not Found"):
        Endpoint(served(False).url + "/elsewhere").model()


def test_numbers_out_of_range() -> None:
    for wrong in ({"max_new_tokens": 0}, {"max_new_tokens": 1, "temperature": -1.0}):
        with pytest.raises(ValueError, match="max_new_tokens must be at least 1 and temperature at least 0"):
            Asking("m", **wrong)
