"""vLLM's counters are read as they are, and say what was accepted where."""

from collections.abc import Callable

import pytest

from specdec.serving.bench.counters import Counters, parse, read, settled
from specdec.serving.bench.endpoint import Endpoint
from tests.serving.fake_vllm import FakeVllm

TEXT = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
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
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="2"} 1.79e+09
"""


def test_engines_are_summed_and_positions_ordered() -> None:
    assert parse(TEXT) == Counters(42, 10, 30, 12, (8, 4, 0))


def test_acceptance_is_a_difference() -> None:
    found = parse(TEXT).since(Counters(2, 2, 6, 2, (2, 0, 0))).told()
    assert found is not None
    assert found["acceptance_length"] == pytest.approx(1 + 10 / 8)
    assert found["draft_acceptance_rate"] == pytest.approx(10 / 24)
    assert found["accepted_per_position"]["joint"] == pytest.approx([6 / 8, 4 / 8, 0])
    assert found["accepted_per_position"]["conditional"] == pytest.approx([6 / 8, 4 / 6, 0])
    assert parse(TEXT).since(Counters(0, 0, 0, 0, ())) == parse(TEXT)  # before the first draft there are no positions


def test_a_server_without_a_drafter_has_no_acceptance() -> None:
    assert parse("vllm:generation_tokens_total 3.0").told() is None
    with pytest.raises(ValueError, match="is this vLLM"):
        parse("process_cpu_seconds_total 3.0")


def test_counting_lags_behind(served: Callable[..., FakeVllm]) -> None:
    server = served(False)
    endpoint = Endpoint(server.url)
    before, asked = read(endpoint), []
    original = server.metrics

    def late() -> str:
        asked.append(1)
        if len(asked) == 3:
            server.generated += 7
        return original()

    server.metrics = late
    assert settled(endpoint, before, 7).generated == 7 and len(asked) == 3
    assert settled(endpoint, before, 8, patience=0.1).generated == 7  # it never comes
