"""What a client sees of a server, how it says that something is wrong, and what vLLM counts."""

from collections.abc import Callable

import pytest

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
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "".join(f"def{n} " for n in range(9))
    accepted = [count for _, count in pieces(9, True) if count is not None]
    assert before.increase(endpoint, 9) == (9, len(accepted), DRAFTS)


@pytest.mark.parametrize(("how", "message"), [("told", "the engine fell$"), ("silent", "the stream ended before")])
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
    assert before.increase(endpoint, 8, patience=0.1).generated == 7  # it never comes
