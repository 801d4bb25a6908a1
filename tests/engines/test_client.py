"""What a client sees of a server, and how it says that something is wrong."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engines.client import Endpoint, RequestError
from specdec.engines.server import free_port
from tests.engines.fake_vllm import FakeVllm

Servers = Callable[..., FakeVllm]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_have_v1_at_its_end(suffix: str, served: Servers) -> None:
    assert Endpoint(served(False).url + suffix).model() == "the-target"


def test_servers_that_are_none(served: Servers) -> None:
    with pytest.raises(ValueError, match="no URL of a server"):
        Endpoint("localhost:8000")
    with pytest.raises(ValueError, match=r"its key in \$VLLM_API_KEY$"):
        Endpoint("http://me:very-secret@127.0.0.1:1")
    with pytest.raises(ValueError, match=r"Connection refused: is the server up\?"):
        Endpoint(f"http://127.0.0.1:{free_port()}").model()
    with pytest.raises(ValueError, match="status 404: Not Found"):
        Endpoint(served(False).url + "/elsewhere").model()
    with pytest.raises(RequestError, match=r"^http://\S+: status 400: the prompt is too long$"):
        Endpoint(served(False).url).complete("/v1/completions", {"prompt": "x" * 101})


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://[::1", "http://a b:80", "http://a:80/x y", "http://",
        "http://:80", "http://a:80/?q=1", "http://a:80/#x", "ftp://a", "file:///etc/passwd", "http://a\nb:80", "http://ä",
        "http://me@a", "http://a:0", "http://a:-1", "http://a:80\x00",
    ],
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"^no URL of a server: "):
        Endpoint(url)


def test_urls_that_lead_nowhere_are_one_line() -> None:
    assert Endpoint("http://[::1]:8000/v1").url == "http://[::1]:8000"
    for url in ("http://[::1]:1", "http://a..b", f"http://{'a' * 70}.invalid:80"):
        with pytest.raises(RequestError, match=r"is the server up\?$"):
            Endpoint(url).model()


def test_a_key_that_no_header_can_have_is_not_printed(
    served: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "very\nsecret")
    with pytest.raises(
        ValueError, match=r"^\$VLLM_API_KEY holds a space, a line break or another"
    ) as caught:
        Endpoint(served(False).url).model()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("trickle", [[b"{"], [b"x" * 65536]])
def test_no_answer_is_waited_for_or_kept_for_ever(trickle: list[bytes], served: Servers) -> None:
    """Neither a byte now and then, nor as many as come."""
    server = served(False)
    server.models = trickle
    server.haste = 0.0 if len(trickle[0]) > 100 else 0.05
    server.failures = {"x": [trickle]}
    endpoint, begin = Endpoint(server.url, timeout=0.4), time.monotonic()
    for ask in (
        endpoint.model,
        lambda: endpoint.complete("/v1/completions", {"prompt": "x"}),
    ):
        with pytest.raises(RequestError, match=r"timed out|more than 16,777,216 bytes"):
            ask()
    assert time.monotonic() - begin < 15


def test_headers_that_trickle_run_into_the_timeout(
    served: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: Any) -> None:
        for _ in range(100):
            self.wfile.write(b"H")
            time.sleep(0.05)

    server = served(False)
    monkeypatch.setattr(server.RequestHandlerClass, "do_GET", slow)
    begin = time.monotonic()
    with pytest.raises(RequestError, match="timed out"):
        Endpoint(server.url, timeout=0.3).model()
    assert time.monotonic() - begin < 3


BODIES = {
    "deep": b"[" * 100_000, "deep object": b'{"a":' * 100_000, "no JSON": b"<html>", "no object": b"[1]", "empty": b"",
    "not UTF-8": b'{"a": "\xff"}', "NaN": b'{"a": NaN}', "many digits": b'{"a": ' + b"9" * 5000 + b"}", "null": b"null",
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_bodies_that_are_no_answer(body: str, served: Servers) -> None:
    server = served(False)
    server.models = BODIES[body]
    server.failures = {"x": [BODIES[body]]}
    endpoint = Endpoint(server.url)
    with pytest.raises(ValueError, match="names no model"):
        endpoint.model()
    with pytest.raises(RequestError, match="the answer is no JSON object") as caught:
        endpoint.complete("/v1/completions", {"prompt": "x"})
    assert caught.value.status == 200


def test_what_a_terminal_would_obey_is_left_out(served: Servers) -> None:
    server = served(False)
    assert str(RequestError("\x1b]0;title\x07a\x1b[31mb\rc")) == "abc"
    server.models = json.dumps({"data": [{"id": "a\x1b[2Jb"}]}).encode()
    with pytest.raises(ValueError, match="names no model"):
        Endpoint(server.url).model()


def test_any_bytes_are_an_answer_or_one_line(served: Servers) -> None:
    server, refused = served(False), list[str]()
    endpoint, server.haste = Endpoint(server.url, timeout=2.0), 0.0

    @settings(max_examples=60, deadline=None)
    @given(
        body=st.one_of(
            st.binary(max_size=200),
            st.text(max_size=200).map(lambda text: f"data: {text}".encode()),
        )
    )
    def check(body: bytes) -> None:
        server.models, server.failures = body, {"x": [body]}
        for ask in (
            endpoint.model,
            lambda: endpoint.complete("/v1/completions", {"prompt": "x"}),
        ):
            try:
                ask()
            except ValueError as error:
                refused.append(str(error))

    check()
    assert len(refused) > 30 and all("\n" not in one and len(one) < 500 for one in refused)
