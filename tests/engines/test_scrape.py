"""The counters on real pages of vLLM and llama.cpp, and on one with SGLang's names."""

from pathlib import Path

import pytest

from specdec.engines.scrape import Counters, metrics_endpoint, parse_page

PAGES = Path(__file__).parent / "pages"


def page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


def test_llama_cpp() -> None:
    counters = parse_page(page("llama_cpp"))
    assert counters == Counters("llama.cpp", 495, 291, (189, 76, 26))
    assert counters.length == pytest.approx(1 + 291 / 495)
    assert counters.shares() == pytest.approx([189 / 495, 76 / 495, 26 / 495])


def test_positions_are_those_of_the_labels() -> None:
    lines = page("llama_cpp").splitlines()
    assert parse_page("\n".join(reversed(lines))) == parse_page(page("llama_cpp"))
    # planted: the first and the last position are exchanged
    names = {'position="0"': 'position="2"', 'position="2"': 'position="0"'}
    swapped = [
        next((line.replace(a, b) for a, b in names.items() if a in line), line) for line in lines
    ]
    counters = parse_page("\n".join(swapped))
    assert counters is not None and counters.by_position == (26, 76, 189)


def test_vllm_sums_its_replicas() -> None:
    counters = parse_page(page("vllm"))
    assert counters is not None and counters.engine == "vLLM" and counters.started > 1.7e9
    assert sum(counters.by_position) == counters.accepted > 0
    assert list(counters.by_position) == sorted(counters.by_position, reverse=True)
    replica = "\n".join(
        line.replace('engine="0"', 'engine="1"')
        for line in page("vllm").splitlines()
        if "_created" not in line
    )
    both = parse_page(page("vllm") + replica)
    assert both == counters.add(counters)._replace(started=counters.started)


def test_sglang_counts_tokens_of_passes_alone() -> None:
    # 20 of 1,020 tokens come from prompts; 400 passes gave the rest: 400 bonus tokens and 600 drafts
    counters = parse_page(page("sglang"))
    assert counters == Counters("SGLang", 400, 600, ())
    # a request that ends without a token is no restart
    aborted = page("sglang").replace('m"} 20.0', 'm"} 21.0')
    later = parse_page(aborted)
    assert later == Counters("SGLang", 400, 599, ())
    assert later.since(counters) == Counters("SGLang", 0, 0, ())
    # it generates, and verifies nothing
    assert parse_page(page("sglang").replace("400.0", "0.0")) is None
    idle = parse_page('sglang:token_usage{model_name="m"} 0.0\n')
    assert idle == Counters("SGLang", 0, 0, ())


def test_a_label_may_hold_what_looks_like_a_sample() -> None:
    label = r'model_name="a} 9 \" position=\"7,",position="0"'
    text = (
        "vllm:spec_decode_num_drafts_total 4\nvllm:spec_decode_num_accepted_tokens_total 3\n"
        f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label}}} 3.0 1700000000\n"
    )
    assert parse_page(text) == Counters("vLLM", 4, 3, (3,))


def test_a_page_without_counters() -> None:
    assert parse_page("# HELP a b\nprocess_open_fds 9\nvllm:num_requests_running 1\n") is None
    for number in ("NaN", "-1", "1e999", "many"):
        with pytest.raises(ValueError, match="negative or no number"):
            parse_page(f"llamacpp:spec_decode_num_drafts_total {number}\n")


def test_a_restart_is_no_window() -> None:
    before = Counters("vLLM", 10, 12, (8, 4), started=1)
    assert before._replace(passes=30).since(before) == before._replace(
        passes=20, accepted=0, by_position=(0, 0)
    )
    for after in (
        before._replace(passes=9),
        before._replace(by_position=(8, 3)),
        before._replace(passes=99, started=2),  # it has counted more than before already
    ):
        assert after.since(before) is None
    # llama.cpp names positions once it has drafted
    later = Counters("llama.cpp", 4, 3, (2, 1))
    assert later.since(Counters("llama.cpp", 0, 0, ())) == later


def test_the_address_of_the_page_is_one_of_the_server() -> None:
    assert metrics_endpoint("http://127.0.0.1:80/metrics").url == "http://127.0.0.1:80"
