"""What a client sees of a server, how it says that something is wrong, and what vLLM counts."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engines.client import Endpoint, RequestError, SpecDecodeCounters, streaming
from specdec.engines.server import free_port
from tests.engines.fake_vllm import DRAFTS, FakeVllm, pieces

Servers = Callable[..., FakeVllm]
TEXT = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="/a/{b},position=\\"9\\""} 30.0
vllm:generation_tokens_total{engine="1",model_name="m"} 12.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.79e+09
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 6.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_drafts_created{engine="1",model_name="m"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.2e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="10"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 4.0
"""


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_have_v1_at_its_end(suffix: str, served: Servers) -> None:
    assert Endpoint(served(False).url + suffix).model() == "the-target"


def test_a_stream_comes_pass_by_pass_and_is_counted(served: Servers) -> None:
    endpoint = Endpoint(served(True).url)
    before = SpecDecodeCounters.read(endpoint)
    events = list(endpoint.events("/v1/completions", {"prompt": "def f", **streaming("m", 9)}))
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "".join(
        f"def{n} " for n in range(9)
    )
    accepted = [count for _, count in pieces(9, True) if count is not None]
    assert before.increase(endpoint, 9) == (9, len(accepted), DRAFTS)


@pytest.mark.parametrize(
    ("how", "message"), [("told", "the engine fell$"), ("silent", "the stream ended before")]
)
def test_a_stream_that_breaks_off_is_no_answer(how: str, message: str, served: Servers) -> None:
    server = served(False)
    server.breaks = how
    with pytest.raises(ValueError, match=message):
        list(Endpoint(server.url).events("/v1/completions", {"prompt": "x", **streaming("m", 9)}))


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


@pytest.mark.parametrize(
    "trickle", [[b"{"], [b"x" * 65536], [b'data: {"choices": []}\n\n'], [b": no event\n"]]
)
def test_no_answer_is_waited_for_or_kept_for_ever(trickle: list[bytes], served: Servers) -> None:
    """Neither a byte now and then, nor as many as come."""
    server = served(False)
    server.models = trickle
    server.haste = 0.0 if len(trickle[0]) > 100 else 0.05
    server.failures = {"x": [trickle, trickle]}
    endpoint, begin = Endpoint(server.url, timeout=0.4), time.monotonic()
    for ask in (
        endpoint.model,
        lambda: endpoint.complete("/v1/completions", {"prompt": "x"}),
        lambda: list(endpoint.events("/v1/completions", {"prompt": "x", "stream": True})),
    ):
        with pytest.raises(RequestError, match=r"timed out|more than 16,777,216 bytes|is too long"):
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
    line = b"data: " + BODIES[body] + b"\n\n"
    server.failures = {"x": [BODIES[body], line]}
    endpoint = Endpoint(server.url)
    with pytest.raises(ValueError, match="names no model"):
        endpoint.model()
    with pytest.raises(RequestError, match="the answer is no JSON object") as caught:
        endpoint.complete("/v1/completions", {"prompt": "x"})
    assert caught.value.status == 200
    with pytest.raises(RequestError, match="the answer is no JSON object"):
        list(endpoint.events("/v1/completions", {"prompt": "x", "stream": True}))


def test_what_a_terminal_would_obey_is_left_out(served: Servers) -> None:
    server = served(False)
    server.failures = {
        "x": [b'data: {"error": {"message": "\\u001b]0;title\\u0007a\\u001b[31mb\\rc"}}\n']
    }
    with pytest.raises(RequestError, match=r"completions: abc$"):
        list(Endpoint(server.url).events("/v1/completions", {"prompt": "x", "stream": True}))
    server.models = json.dumps({"data": [{"id": "a\x1b[2Jb"}]}).encode()
    with pytest.raises(ValueError, match="names no model"):
        Endpoint(server.url).model()


@pytest.mark.parametrize("value", ["abc", "NaN", "inf", "1e999", "-1", "1e300", "0x7"])
def test_counters_that_count_nothing(
    value: str, served: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = served(False)
    monkeypatch.setattr(server, "metrics", lambda: f"vllm:generation_tokens_total{{}} {value}\n")
    with pytest.raises(ValueError, match=rf"/metrics: generation_tokens is {value}, no count$"):
        SpecDecodeCounters.read(Endpoint(server.url))
    rows = "".join(f'vllm:spec_decode_num_x{{position="{n}"}} 1\n' for n in range(1000))
    monkeypatch.setattr(server, "metrics", lambda: rows)
    with pytest.raises(ValueError, match="counts 1,000 drafts a pass"):
        SpecDecodeCounters.read(Endpoint(server.url))


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
        server.models, server.failures = body, {"x": [body, body]}
        for ask in (
            endpoint.model,
            lambda: endpoint.complete("/v1/completions", {"prompt": "x"}),
            lambda: list(endpoint.events("/v1/completions", {"prompt": "x", "stream": True})),
        ):
            try:
                ask()
            except ValueError as error:
                refused.append(str(error))

    check()
    assert len(refused) > 60 and all("\n" not in one and len(one) < 500 for one in refused)


def test_engines_are_summed(served: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served(False)
    endpoint = Endpoint(server.url)
    monkeypatch.setattr(server, "metrics", lambda: TEXT)
    assert SpecDecodeCounters.read(endpoint) == (42, 10, 3)
    assert SpecDecodeCounters(2, 2, 3).increase(endpoint, 40) == (40, 8, 3)
    monkeypatch.setattr(server, "metrics", lambda: "process_cpu_seconds_total 3.0")
    with pytest.raises(ValueError, match="is this vLLM"):
        SpecDecodeCounters.read(endpoint)


def test_counting_lags_behind(served: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served(False)
    endpoint = Endpoint(server.url)
    before, original, asked = SpecDecodeCounters.read(endpoint), server.metrics, [0]

    def late() -> str:
        asked[0] += 1
        server.generated += 7 * (asked[0] == 3)
        return original()

    monkeypatch.setattr(server, "metrics", late)
    assert before.increase(endpoint, 7).generated == 7 and asked == [3]
    assert before.increase(endpoint, 8, timeout=0.1).generated == 7  # it never comes
