"""``specdec watch`` beside a server whose pages change: what it says, and when it gives a verdict."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from specdec.cli import main
from specdec.engines.scrape import Counters
from specdec.engines.server import free_port
from specdec.engines.watch import QUIET, Watcher
from specdec.engines.watch_output import text_line
from specdec.engines.watch_reference import Reference, read_reference, reference_of
from specdec.evaluation.metrics import Answer, acceptance_length, write_answers
from specdec.evaluation.summary import shape_summary
from specdec.utils.files import write_json, write_sums
from tests.evaluation.made import clustered

GOOD = (225, 150, 75)  # of 250 passes, those that accept at least 1, 2 and 3 drafts
BAD = (12, 2, 0)


def counted(shares: tuple[int, ...], windows: float) -> Counters:
    positions = tuple(windows * count for count in shares)
    return Counters("vLLM", 250 * windows, sum(positions), positions)


@pytest.fixture
def answers() -> list[Answer]:
    """Of 40 prompts; acceptance length 2.8 or so, chains of 3."""
    return clustered(np.random.default_rng(0), 40, depth=3)[0]


@pytest.fixture
def evaluation(tmp_path: Path, answers: list[Answer]) -> Path:
    """As ``specdec evaluate`` writes it, as far as it is read here."""
    folder = tmp_path / "evaluation"
    folder.mkdir()
    target = {"fingerprint": "f"}
    results = [shape_summary("chain of 3", {}, answers)]
    metrics = {
        "results": results,
        "target": target,
        "drafter": {"weights_sha256": "0"},
        "settings": {},
    }
    write_json(folder / "metrics.json", metrics)
    write_answers(folder / "answers.jsonl", ["chain of 3"], [answers])
    write_sums(folder)
    return folder


@pytest.fixture
def reference() -> Reference:
    random = np.random.default_rng(3)
    rows = [
        (250, sum(GOOD) * scale, *(scale * share for share in GOOD))
        for scale in random.normal(1, 0.1, 40)
    ]
    return reference_of("r", np.array(rows))


class Server(ThreadingHTTPServer):
    """A server of vLLM's counters: every page shows one more window of ``shares``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.shares = GOOD
        self.counters = counted(GOOD, 0)
        self.pages = 0
        self.swap = 10**9  # the page at which it starts again with a bad drafter
        self.bare = 10**9  # the page without counters

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def page(self) -> str:
        self.pages += 1
        if self.pages == self.bare:
            return ""
        if self.pages == self.swap:
            self.shares = BAD
            self.counters = counted(BAD, 0)
        self.counters = self.counters.add(counted(self.shares, 1))
        name = "vllm:spec_decode_num"
        lines = [
            f"{name}_drafts_total {self.counters.passes}",
            f"{name}_accepted_tokens_total {self.counters.accepted}",
        ]
        for position, count in enumerate(self.counters.by_position):
            lines.append(f'{name}_accepted_tokens_per_pos_total{{position="{position}"}} {count}')
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    """Its only page is /metrics; /locked/metrics wants a key."""

    server: Server

    def do_GET(self) -> None:
        is_page = self.path == "/metrics"
        body = (self.server.page() if is_page else "Not Found").encode()
        locked = self.path.startswith("/locked/")
        self.send_response(200 if is_page else 401 if locked else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A server that serves within the block."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def served() -> Iterator[Server]:
    with running() as server:
        yield server


def test_a_reference_is_the_evaluations_own_figures(
    evaluation: Path, answers: list[Answer]
) -> None:
    known = read_reference(evaluation, None)
    assert known.length == pytest.approx(acceptance_length(answers))
    assert [share.mean for share in known.by_position] == sorted(
        (share.mean for share in known.by_position), reverse=True
    )
    assert known.length.mean == pytest.approx(1 + sum(share.mean for share in known.by_position))
    # prompts differ, so the mean of a window varies more than passes that are alike by chance alone would make it
    within = np.var([count for answer in answers for count in answer.accepted])
    assert known.variance > 1.2 * within


def test_the_evaluation_is_named_if_it_is_no_reference(evaluation: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no draft shape chain of 9: it has chain of 3"):
        read_reference(evaluation, "chain:depth=9")
    assert read_reference(evaluation, "chain:depth=3") == read_reference(evaluation, None)
    (tmp_path / "b").symlink_to(evaluation)
    with pytest.raises(ValueError, match="holds several evaluations, give one"):
        read_reference(tmp_path, None)
    with pytest.raises(ValueError, match="cannot fall below an interval that begins at 1"):
        reference_of("r", np.array([(250, 0, 0)] * 3))
    with pytest.raises(ValueError, match="at least two prompts"):
        reference_of("r", np.array([(250, 100, 100)]))


def verdicts(watcher: Watcher, pages: list[Counters], begin: float = 0.0) -> list[str]:
    events = [event for at, page in enumerate(pages) for event in watcher.look(page, begin + at)]
    return [text_line(event) for event in events if event.kind == "verdict"]


def test_a_swap_is_seen_once_and_dated(reference: Reference) -> None:
    watcher = Watcher(reference, 0, 250)
    assert verdicts(watcher, [counted(GOOD, n) for n in range(300)]) == []
    good = counted(GOOD, 299)
    swapped = [good.add(counted(BAD, n)) for n in range(1, 30)]
    (line,) = verdicts(watcher, swapped, 300.0)
    assert watcher.accepts_less
    # the bonus token counts: a pass that accepts nothing is a token
    assert "accepts less than in the reference: 1.06 tokens per pass against 2.79 [" in line
    assert line.endswith(":04:59.")  # the page before the first window of the bad drafter


def test_short_and_silent_windows_wait(reference: Reference) -> None:
    watcher = Watcher(reference, 0, 250)
    pages = [counted(GOOD, windows) for windows in (0, 0.4, 0.8, 1.2, 1.2)]
    kinds = [[event.kind for event in watcher.look(page, 0.0)] for page in pages]
    assert kinds == [["start"], [], [], ["window"], []]
    assert [event.kind for event in watcher.look(pages[-1], QUIET)] == ["idle"]
    assert watcher.look(pages[-1], 2 * QUIET) == []


def test_another_number_of_drafts_is_refused(reference: Reference) -> None:
    with pytest.raises(ValueError, match="drafts 2 tokens a pass, the reference 3"):
        Watcher(reference, 0, 250).look(counted((9, 4), 1), 0.0)


def test_drafts_that_are_counted_later_are_compared_too(reference: Reference) -> None:
    watcher = Watcher(reference, 0, 250)
    watcher.look(counted((), 0), 0.0)
    with pytest.raises(ValueError, match="drafts 2 tokens a pass, the reference 3"):
        watcher.look(counted((9, 4), 1), 1.0)


def test_the_first_passes_are_the_reference_without_an_evaluation() -> None:
    random = np.random.default_rng(0)
    watcher = Watcher(None, 2500, 250)
    total = counted(GOOD, 0)
    for at in range(30):
        watcher.look(total, at)
        total = total.add(counted(GOOD, float(random.normal(1, 0.05))))
    assert watcher.reference is not None and watcher.reference.name == "the first 3,003 passes"
    assert watcher.reference.length.mean == pytest.approx(1 + sum(GOOD) / 250)
    assert not watcher.accepts_less


def test_a_busy_servers_reference_takes_several_windows() -> None:
    watcher = Watcher(None, 5000, 250)
    total = counted(GOOD, 0)
    for at, windows in enumerate((40, 44, 36, 40, 44, 36, 40, 44)):  # 10,000 passes a page
        watcher.look(total, at)
        assert watcher.reference is None
        total = total.add(counted(GOOD, windows))
    watcher.look(total, 8.0)
    assert watcher.reference is not None and watcher.reference.name.startswith("the first ")


def test_from_the_command_line(
    served: Server, evaluation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gauges = tmp_path / "watch.prom"
    argv = ["watch", served.url, "--reference", str(evaluation), "--every", "0.01"]
    files = ["--prometheus", str(gauges)]
    assert main([*argv, *files, "--seconds", "0.4"]) == 0
    shown = capsys.readouterr().out
    assert "2.80 tokens per pass, by position 90 60 30 %, 250 passes: fits" in shown
    assert f'specdec_watch_accepts_less{{url="{served.url}"}} 0\n' in gauges.read_text()
    served.swap = served.pages + 20
    assert main([*argv, *files, "--fail", "--format", "jsonl"]) == 3
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [row["event"] for row in rows]
    assert kinds.count("restart") == 1 and kinds[-1] == "verdict"
    assert kinds[kinds.index("restart") :].count("window") < 20
    assert rows[-1]["acceptance_length"] == pytest.approx(1 + sum(BAD) / 250)
    assert rows[-1]["accepted_per_position"] == pytest.approx([12 / 250, 2 / 250, 0])
    page = gauges.read_text()
    assert f'specdec_watch_accepts_less{{url="{served.url}"}} 1\n' in page
    assert f'specdec_watch_accepted_share{{url="{served.url}",position="1"}} 0.048\n' in page


def test_one_look(served: Server, evaluation: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", served.url, "--reference", str(evaluation), "--once"]) == 0
    assert "2.80 tokens per pass" in capsys.readouterr().out and served.pages == 1


def test_a_server_that_is_away_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["watch", url, "--every", "0.05", "--seconds", "0.3"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "is the server up? (asked again every 0.05 s)" in line


@pytest.mark.slow
def test_a_watch_ends_with_its_reader(served: Server) -> None:
    command = [sys.executable, "-m", "specdec", "watch", served.url, "--every", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert "passes so far" in watch.stdout.readline()
        watch.stdout.close()
        assert watch.wait(timeout=30) == 0


def test_a_page_without_counters_is_a_mistake_at_first_and_later_a_server_that_starts(
    served: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    served.bare = 3
    assert main(["watch", served.url, "--every", "0.02", "--seconds", "0.4"]) == 0
    lines = capsys.readouterr().out
    assert lines.index("no counters of speculative") < lines.index("the server answers again")
    served.bare = served.pages + 1
    assert main(["watch", served.url]) == 2


def test_after_a_restart_with_other_drafts_the_first_passes_are_learned_again() -> None:
    watcher = Watcher(None, 500, 250)
    total = counted(GOOD, 0)
    for at in range(12):
        watcher.look(total, at)
        total = total.add(counted(GOOD, 1 + at % 2 / 10))
    assert watcher.reference is not None
    (event,) = watcher.look(counted((9, 4), 1), 12.0)
    assert event.kind == "restart" and watcher.reference is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (lambda url: [url, "--baseline", "2000000"], "lower it, or raise --window"),
        (lambda url: [url + "/locked"], "set $VLLM_API_KEY or $LLAMA_API_KEY to the server's key"),
        (lambda url: [url + "/elsewhere"], "has no page /metrics: vLLM counts drafts when"),
        (lambda url: [url, "--reference_shape", "chain:depth=3"], "give --reference as well"),
        (lambda url: [url, "--reference", "/nowhere"], "nowhere"),
        (lambda url: [url, "--prometheus", __file__], "it exists and is another file"),
        (lambda url: ["ftp://a"], "no URL of a server"),
    ],
)
def test_mistakes_are_one_line(
    served: Server,
    words: Callable[[str], list[str]],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["watch", *words(served.url), "--seconds", "1"]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
