"""What is read out of a server's answer."""

from collections.abc import Callable

import pytest

from specdec.parity.asked import TRIES, Answer, ask
from specdec.serving.bench.endpoint import Endpoint
from tests.serving.fake_vllm import FakeVllm

PROMPT, IDS = [5, 6], list(range(10, 30))
Servers = Callable[..., FakeVllm]


@pytest.fixture
def server(served: Servers) -> FakeVllm:
    made = served(True)
    made.plans[tuple(PROMPT)] = (IDS, [2, 0, 3, 1])
    return made


@pytest.fixture
def endpoint(server: FakeVllm) -> Endpoint:
    return Endpoint(server.url)


def test_passes_and_what_they_accepted(server: FakeVllm, endpoint: Endpoint) -> None:
    found = ask(endpoint, "the-target", PROMPT, 11)
    assert found == Answer(PROMPT, IDS[:11], [1, 4, 5, 9], [2, 0, 3, 1], (3, 2, 1))
    body = server.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == (PROMPT, 11, 0.0, True)
    assert body["repetition_penalty"] == 1.0 and body["model"] == "the-target"


@pytest.mark.parametrize(("tokens", "known"), [(2, [1]), (4, [1]), (6, [1, 4, 5]), (8, [1, 4, 5])])
def test_drafts_behind_the_end_count(tokens: int, known: list[int], endpoint: Endpoint) -> None:
    """The last piece is cut at the end, its pass is not."""
    found = ask(endpoint, "the-target", PROMPT, tokens)
    assert found.known == known and len(found.ids) == tokens
    assert found.accepted == [2, 0, 3][: len(known)]


def test_passes_that_come_together_are_asked_again(server: FakeVllm, endpoint: Endpoint) -> None:
    server.joined = 2
    assert ask(endpoint, "the-target", PROMPT, 11).known == [1, 4, 5, 9]
    assert len(server.bodies) == 3 and len({body["cache_salt"] for body in server.bodies}) == 3
    server.joined = TRIES
    with pytest.raises(ValueError, match=f"sent 4 passes in 3 pieces, and again {TRIES} times"):
        ask(endpoint, "the-target", PROMPT, 11)


def test_passes_without_drafts(server: FakeVllm, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM drafts nothing where drafts would reach beyond its longest text."""
    whole = FakeVllm.metrics

    def fewer(self: FakeVllm) -> str:
        return whole(self).replace("num_drafts_total", "num_drafts_dropped") + (
            f"vllm:spec_decode_num_drafts_total{{}} {max(0, self.passes - 1)}\n"
        )

    monkeypatch.setattr(FakeVllm, "metrics", fewer)
    with pytest.raises(ValueError, match="drafts in 3 of 4 passes: give it a --max-model-len of 17 or more"):
        ask(endpoint, "the-target", PROMPT, 11)


def test_counters_of_others_are_no_evidence(
    server: FakeVllm, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeVllm.metrics

    def more(self: FakeVllm) -> str:
        self.generated += 1
        return whole(self)

    monkeypatch.setattr(FakeVllm, "metrics", more)
    with pytest.raises(ValueError, match="somebody else uses it"):
        ask(endpoint, "the-target", PROMPT, 11)


def test_counters_that_do_not_fit_the_answer(
    server: FakeVllm, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeVllm.metrics

    def moved(self: FakeVllm) -> str:
        """One of the drafts accepted first is told as one accepted third."""
        return whole(self).replace('position="0"', 'position="x"').replace('position="2"', 'position="0"').replace(
            'position="x"', 'position="2"'
        )  # fmt: skip

    monkeypatch.setattr(FakeVllm, "metrics", moved)
    with pytest.raises(ValueError, match=r"counts \(1, 2, 3\) accepted drafts, its answer holds \[2, 0, 3, 1\]"):
        ask(endpoint, "the-target", PROMPT, 11)


def test_a_server_without_a_drafter_or_without_ids(served: Servers, server: FakeVllm, endpoint: Endpoint) -> None:
    alone = served(False)
    alone.plans = server.plans
    with pytest.raises(ValueError, match="drafts nothing: is it served with the drafter"):
        ask(Endpoint(alone.url), "the-target", PROMPT, 11)
    server.plans = {}
    with pytest.raises(ValueError, match=r"sends no token_ids, which vLLM does from 0.10.2 on"):
        ask(endpoint, "the-target", PROMPT, 11)
