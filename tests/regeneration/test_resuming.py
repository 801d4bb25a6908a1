"""A run that ends early, in whatever way, goes on where it was, and ends as if nothing had been."""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.files import sha256
from specdec.regeneration.journal import Journal
from specdec.regeneration.talk import Answer, Failed
from tests.data.tiny import write_jsonl
from tests.regeneration.fake_openai import FakeOpenAI
from tests.serving.conftest import soon
from tests.tiny import largest_file

ANSWER = Answer("a", 0, "schön\u2028\n", "stop", 3, 4)


@pytest.fixture
def argv(server: FakeOpenAI, tmp_path: Path) -> list[str]:
    rows = [
        {"id": f"{n}", "messages": [{"role": "user", "content": f"{turn} {n}"} for turn in "ab"[: 1 + n % 2]]}
        for n in range(30)
    ]
    for row in rows:  # two turns each, of every second
        row["messages"] = [part for turn in row["messages"] for part in (turn, {"role": "assistant", "content": "-"})]
    data = write_jsonl(tmp_path / "in.jsonl", rows)
    return ["regenerate", "--engine", "openai", "--url", server.url, "--data", str(data), "--concurrency", "2"]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_killed_run_goes_on(server: FakeOpenAI, argv: list[str], tmp_path: Path) -> None:
    calm, out = tmp_path / "calm.jsonl", tmp_path / "out.jsonl"
    assert main([*argv, "--out", str(calm)]) == 0
    asked = len(server.seen)
    server.delay = 0.05
    journal = tmp_path / "out.jsonl.journal"
    process = multiprocessing.get_context("fork").Process(target=main, args=([*argv, "--out", str(out)],))
    process.start()
    assert soon(lambda: len(lines(journal)) > 11, 60)
    process.kill()
    process.join()
    assert not out.exists() and not out.with_suffix(".json").exists()
    with journal.open("a") as stream:
        stream.write('{"row": "29", "tur')  # a line that was cut off
    done = len(lines(journal)) - 3
    assert main([*argv, "--out", str(out)]) == 0
    assert sha256(out) == sha256(calm)
    assert len(server.seen) - 2 * asked <= 2  # those that were on their way are asked twice, at most
    told = json.loads(out.with_suffix(".json").read_text())
    assert told["sessions"] == 2 and told["answers"]["number"] == 45
    assert told["last_session"]["tokens"] < told["answers"]["tokens"] and done >= 9
    assert told["seconds"] > 0.05 * 11 / 2


@pytest.fixture
def stop() -> Iterator[Callable[[Callable[[], bool], int], None]]:
    """Signals this process once something is true."""
    threads: list[threading.Thread] = []

    def start(when: Callable[[], bool], number: int) -> None:
        threads.append(threading.Thread(target=lambda: soon(when, 20) and os.kill(os.getpid(), number)))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_keeps_what_is_done(
    number: int, status: int, server: FakeOpenAI, argv: list[str], stop: Callable[..., None], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    server.delay = 0.05
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    stop(lambda: len(lines(journal)) > 5, number)
    assert main([*argv, "--out", str(out)]) == status
    assert capsys.readouterr().err.endswith(f"what is done is kept in {journal}: the same command goes on\n")
    assert not out.exists() and len(lines(journal)) > 5
    server.delay, before = 0.0, len(server.seen)
    assert main([*argv, "--out", str(out)]) == 0
    assert 0 < len(server.seen) - before < 43 and len(lines(out)) == 30


def test_a_server_that_is_gone_costs_nothing(
    server: FakeOpenAI, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, more = tmp_path / "out.jsonl", ["--retries", "0"]
    server.failures = {f"a {n}": ["cut"] for n in range(5, 30)}
    assert main([*argv, "--out", str(out), *more]) == 2
    assert "the same command goes on" in capsys.readouterr().err and not out.exists()
    server.failures = {}
    assert main([*argv, "--out", str(out)]) == 0
    assert len(lines(out)) == 30


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "0.5"], "asking.temperature 0.0 there, 0.5 now"),
        (["--seed", "3"], "asking.seed 0 there, 3 now"),
        (["--thinking", "true"], "asking.thinking none there, yes now"),
        (["--model", "other"], "target.model the-target there, other now"),
        (["--limit", "3"], "input.rows 30 there, 3 now; input.sha256"),
    ],
)
def test_other_settings_are_refused(
    more: list[str], message: str, server: FakeOpenAI, argv: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out.jsonl"
    assert main([*argv, "--out", str(out)]) == 0
    before = sha256(out), sha256(tmp_path / "out.jsonl.journal")
    assert main([*argv, "--out", str(out), *more]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert before == (sha256(out), sha256(tmp_path / "out.jsonl.journal"))


def test_what_the_answers_do_not_depend_on_may_differ(server: FakeOpenAI, argv: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert main([*argv, "--out", str(out)]) == 0
    os.rename(tmp_path / "in.jsonl", tmp_path / "moved.jsonl")
    moved = [word.replace("in.jsonl", "moved.jsonl") for word in argv]
    assert main([*moved, "--out", str(out), "--concurrency", "7", "--retries", "1", "--truncated", "keep"]) == 0
    assert len(server.seen) == 45


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", "x.json"], "name it FILE.jsonl"),
        (["--out", "there.jsonl"], "there.jsonl exists already, without there.jsonl.journal"),
        (["--out", "x.jsonl", "--batch_size", "3"], "--batch_size: --engine openai at a --url has no use for it"),
        (["--out", "x.jsonl", "--target", "somewhere"], "--target: --engine openai at a --url"),
        (["--out", "x.jsonl", "--port", "3", "--", "--dtype", "float32"], "--port, flags after --: --engine openai"),
        (["--out", "x.jsonl", "--engine", "transformers"], "--url is asked with --engine vllm"),
        (["--out", "x.jsonl", "--temperature", "-1"], "temperature must be 0 (greedy)"),
        (["--out", "x.jsonl", "--max_new_tokens", "0"], "max_new_tokens must be at least 1"),
        (["--out", "x.jsonl", "--concurrency", "0"], "concurrency must be at least 1"),
        (["--out", "x.jsonl", "--retries", "-1"], "retries and backoff must be at least 0"),
        (["--out", "x.jsonl", "--truncated", "perhaps"], "truncated"),
        (["--out", "x.jsonl", "--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--out", "x.jsonl", "--layout", "alpaca"], "layout alpaca needs"),
        (["--out", "x.jsonl", "--broken", "maybe"], "broken"),
    ],
)
def test_mistakes_are_one_line(
    more: list[str], message: str, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("")
    assert main([*argv, *more]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "there.jsonl"]


@pytest.mark.parametrize("more", [["--key_variable", "sk-very-secret"], ["--url", "http://me:very-secret@127.0.0.1:1"]])
def test_a_secret_given_in_the_wrong_place_is_not_repeated(
    more: list[str], argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--out", str(tmp_path / "out.jsonl"), *more]) == 2
    err = capsys.readouterr().err
    assert "key" in err and "very-secret" not in err
    assert not (tmp_path / "out.jsonl.journal").exists()


def test_a_journal_keeps_answers_and_forgets_failures(tmp_path: Path) -> None:
    path, settings = tmp_path / "j", {"a": {"b": 1}}
    with Journal(path, settings) as journal:
        journal.write(ANSWER)
        journal.write(Failed("a", 1, "busy"))
        journal.write(Failed("b", 0, "busy"))
    with Journal(path, settings) as journal:
        assert journal.answers == {"a": [ANSWER]} and journal.sessions == 2
        journal.write(ANSWER._replace(turn=1))
    with Journal(path, settings) as journal:
        assert journal.answers == {"a": [ANSWER, ANSWER._replace(turn=1)]}


def test_a_journal_is_for_one_process_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", {}), pytest.raises(ValueError, match="another process writes it"):
        Journal(tmp_path / "j", {}).__enter__()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 3: not JSON"),
        ("{}", "line 3: not an entry"),
        ('{"row": "a", "at": 1}', "line 3: not an answer"),
        (json.dumps({**ANSWER._asdict(), "turn": 2, "at": 1}), "line 3: turn 2 of a is out of order"),
    ],
)
def test_a_broken_journal_is_named_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    with Journal(tmp_path / "j", {}):
        pass
    with (tmp_path / "j").open("a") as stream:
        stream.write(f"{line}\n")
    with pytest.raises(ValueError, match=message):
        Journal(tmp_path / "j", {}).__enter__()


def test_something_else_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="not a journal of specdec regenerate"):
        Journal(tmp_path / "j", {}).__enter__()


def test_a_full_disk_loses_nothing_that_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, {}) as journal:
        journal.write(ANSWER)
        size = path.stat().st_size
        with largest_file(size + 20), pytest.raises(ValueError, match="j: "):
            journal.write(ANSWER._replace(turn=1))
    with Journal(path, {}) as journal:
        assert journal.answers == {"a": [ANSWER]}
