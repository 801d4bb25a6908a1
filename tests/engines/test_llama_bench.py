"""What a llama.cpp server says of itself, as the figures of a bench."""

import pytest

from specdec.engines.llama_bench import acceptance, summarize
from specdec.engines.scrape import Counters


def test_acceptance_is_of_what_was_added() -> None:
    first = Counters("llama.cpp", 2, 2, ())
    last = Counters("llama.cpp", 8, 9, (4, 3))
    figures = acceptance(first, last)
    assert figures["spec_decode_acceptance_length"] == pytest.approx(1 + 7 / 6)
    assert figures["spec_decode_per_position_acceptance_rates"] == pytest.approx([4 / 6, 3 / 6])
    assert acceptance(last, last) == {}


def test_throughput_counts_tokens_by_the_clock() -> None:
    answers = [
        {
            "tokens": [1] * length,
            "content": "a" * length,
            "timings": {"prompt_ms": 10.0 * length, "predicted_per_token_ms": 2.0},
        }
        for length in (4, 6)
    ]
    figures = summarize(answers, seconds=2.0)
    assert figures["output_throughput"] == 5.0 and figures["completed"] == 2
    assert figures["median_ttft_ms"] == 50.0 and figures["p95_tpot_ms"] == 2.0
