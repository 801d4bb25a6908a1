"""llama.cpp's log and counters are read as passes, or refused where they disagree."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdec.engines import llama_proposals
from specdec.engines.client import Endpoint
from specdec.engines.llama_proposals import answer_to, logged_chains, recorded_passes
from specdec.engines.proposals import RecordedPass

LOG = """0.02.765.969 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:    209 (   0.660) '<t209>'
0.02.766.004 D spec        draft:  - seq_id 0, draft candidate   1, pos   0:    111 (   0.307) 'draft candidate'
0.02.937.954 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:     11 (   0.705) '
'
0.02.937.954 I srv  update: something else
0.04.529.978 D spec        draft:  - seq_id 0, draft candidate   0, pos   0:    170 (   0.244) '<t170>'
0.04.529.978 D spec        draft:  - seq_id 0, draft candidate   0, pos   1:    171 (   0.244) '<t171>'
"""
PROMPT = [1, 2, 3]


def test_the_likeliest_candidates_of_each_pass_are_its_drafts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("draft candidate   0, pos   0:    5 (\n" + LOG)
    assert logged_chains(log, begin=0) == [[5], [209, 11], [170, 171]]
    assert logged_chains(log, begin=30) == [[209, 11], [170, 171]]


def test_passes_follow_from_the_text() -> None:
    # 7 is the prompt's; 8 and 9 are drafted and kept, 4 is the target's; 5 is the target's again
    passes = recorded_passes([[8, 9, 6], [6, 5, 5]], PROMPT, [7, 8, 9, 4, 5], tokens=9)
    assert [passed.recorded for passed in passes] == [
        RecordedPass(3, 7, [8, 9, 6]),
        RecordedPass(6, 4, [6, 5, 5]),
    ]
    assert [(passed.counted, passed.accepted) for passed in passes] == [(3, 2), (3, 0)]


def test_the_last_token_of_an_answer_is_the_targets() -> None:
    # the end of the text was drafted, too, and llama.cpp accepts no such draft
    (passed,) = recorded_passes([[8, 1, 1]], PROMPT, [7, 8, 1], tokens=9)
    assert passed.accepted == 1
    # one token is left after the first: nothing is verified
    (passed,) = recorded_passes([[8, 8, 8]], PROMPT, [7, 8], tokens=2)
    assert (passed.counted, passed.accepted) == (0, 0)


@pytest.fixture
def answered(tmp_path: Path) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """A server that gives one answer, which a test may change, and logs the chains of it."""
    log = tmp_path / "server.log"
    log.write_text("it starts\n")
    answer = {
        "tokens": [7, 209, 11, 4],
        "timings": {"draft_n": 2, "draft_n_accepted": 2},
        "logged": "\n".join(LOG.splitlines()[:4]) + "\n",
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with log.open("a") as file:
                file.write(str(answer["logged"]))
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answer, log
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_answer_has_its_whole_passes(answered: tuple[str, dict[str, Any], Path]) -> None:
    url, _, log = answered
    answer = answer_to(Endpoint(url), log, PROMPT, tokens=9, drafts=2)
    assert answer.ids == [7, 209, 11, 4]
    assert answer.passes == [RecordedPass(3, 7, [209, 11])]


@pytest.mark.parametrize(
    ("timings", "message"),
    [
        ({"draft_n": 5, "draft_n_accepted": 2}, "counts 5 drafts and its log names 2"),
        (
            {"draft_n": 2, "draft_n_accepted": 1},
            "counts 1 accepted drafts, and of those in its log 2",
        ),
    ],
)
def test_a_log_that_disagrees_with_the_counters_is_refused(
    answered: tuple[str, dict[str, Any], Path],
    timings: dict[str, int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, answer, log = answered
    answer["timings"] = timings
    monkeypatch.setattr(llama_proposals, "WAIT", 0.2)
    with pytest.raises(ValueError, match=message):
        answer_to(Endpoint(url), log, PROMPT, tokens=9, drafts=2)
