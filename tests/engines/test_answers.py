"""The engine behind a server: what is asked, at how much at a time, and what becomes of refusals."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.engines import answers
from specdec.engines.answers import Dialogue, RegenerateConfig, Remote, TurnAnswer
from specdec.engines.client import Endpoint
from tests.data.tiny import write_jsonl
from tests.engines.fake_vllm import FakeVllm


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def talk(name: str, *said: str) -> Dialogue:
    return Dialogue(name, f"in.jsonl, line {name}", [[user(text)] for text in said])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BACKOFF", 0.01)
    monkeypatch.setattr(answers, "RETRIES", 3)


def remote(server: FakeVllm, users: int = 4, patience: float = 10.0, engine: Any = "vllm", **asking: Any) -> Remote:
    config = RegenerateConfig(
        data=[], out=Path("x.jsonl"), url=server.url, engine=engine, concurrency=users, max_new_tokens=9, **asking
    )
    return Remote(Endpoint(server.url, patience=patience), "m", config)


def test_every_turn_follows_the_answers_before_it(server: FakeVllm) -> None:
    talks = [talk(f"{n}", f"a{n}", f"b{n}", f"c{n}") for n in range(5)]
    found = list(remote(server).answers(talks))
    assert len(found) == 15 and all(one.done for one in talks)
    for n, one in enumerate(talks):
        assert [answer.text for answer in one.answers] == [f"<a{n}>", f"<b{n}>", f"<c{n}>"]
    last = next(body for body in server.bodies if body["messages"][-1]["content"] == "c3")
    assert last["messages"] == [
        user("a3"), {"role": "assistant", "content": "<a3>"}, user("b3"), {"role": "assistant", "content": "<b3>"},
        user("c3"),
    ]  # fmt: skip


@pytest.mark.parametrize("users", [3])
def test_so_many_are_asked_at_a_time(users: int, server: FakeVllm) -> None:
    server.delay = 0.05
    talks = [talk(f"{n}", f"a{n}") for n in range(9)]
    assert len(list(remote(server, users).answers(talks))) == 9
    assert server.most_at_once == users


def test_passing_failures_are_asked_again(server: FakeVllm) -> None:
    server.failures = {"a": [429, 503, "cut"], "b": [500], "c": ["cut", "cut"], "d": [429]}
    talks = [talk(name, name) for name in "abcde"]
    assert all(one.failed is None for one in remote(server).answers(talks))
    assert {name: len(times) for name, times in server.times.items()} == {"a": 4, "b": 2, "c": 3, "d": 2, "e": 1}


def test_enough_is_enough_and_a_refusal_is_final(server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "RETRIES", 2)
    server.failures = {"a": [500] * 9, "b": [400], "c": [404]}
    talks = [talk(name, name, "more") for name in "abc"]
    found = list(remote(server).answers(talks))
    assert {one.row: len(server.times[one.row]) for one in found} == {"a": 3, "b": 1, "c": 1}
    assert all(one.failed and one.turn == 0 for one in found)
    reasons = {one.row: str(one.failed) for one in found}
    assert reasons["a"].endswith("/v1/chat/completions: status 500: not now") and "status 400" in reasons["b"]


def test_an_answer_that_takes_too_long_is_asked_for_again(server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "RETRIES", 1)
    server.delay = 0.5
    (found,) = remote(server, patience=0.1).answers([talk("a", "a")])
    assert found.failed and "timed out" in found.failed and len(server.times["a"]) == 2


def test_a_server_that_is_gone_ends_the_run(server: FakeVllm) -> None:
    server.failures, server.away = {f"a{n}": ["cut"] * 9 for n in range(3, 99)}, True
    talks = [talk(f"{n}", f"a{n}") for n in range(40)]
    seen: list[TurnAnswer] = []
    with pytest.raises(ValueError, match=r"is the server up\?"):
        seen.extend(remote(server, users=1).answers(talks))
    assert sum(bool(one.answers) for one in talks) == 3 and len(server.times["a3"]) == 4
    assert not any(one.failed for one in talks)  # they are asked when the run goes on


def test_whoever_leaves_waits_for_nobody(server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BACKOFF", 60.0)
    server.failures = {"a1": [503]}
    before = set(threading.enumerate())
    coming = remote(server, 2).answers([talk(f"{n}", f"a{n}") for n in range(5)])
    next(coming)
    begin = time.monotonic()
    coming.close()
    assert time.monotonic() - begin < 1
    assert [thread for thread in threading.enumerate() if not thread.daemon and thread not in before] == []


def test_all_of_vllms_own_fields_are_given(server: FakeVllm) -> None:
    """Else the target's generation config would draw otherwise than is recorded."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    asking = {"temperature": 0.7, "top_p": 0.9}
    for more in ({"thinking": False}, {"thinking": False, "engine": "openai"}, {"top_k": 20, "engine": "openai"}):
        list(remote(server, **asking, **more).answers([Dialogue("a", "", [[user("a")]], tools)]))
    first, second, third = server.bodies
    common = {
        "model": "m", "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "seed": remote(server).config.seed_of("a", 0),
        "messages": [user("a")], "tools": tools, "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert first == {**common, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert second == common
    assert (third["top_k"], "min_p" in third, "chat_template_kwargs" in third) == (20, False, False)


@pytest.mark.parametrize(
    ("message", "finish", "reason"),
    [
        ({"tool_calls": [{}], "content": None}, "stop", "made a tool call of"),
        ({}, "content_filter", "for another reason: content_filter"),
        ({"content": 7}, "stop", "no answer in the server's response"),
        ({"content": "\ud800"}, "stop", "UnicodeEncodeError"),
    ],
)
def test_answers_that_are_none(message: dict[str, Any], finish: str, reason: str, server: FakeVllm) -> None:
    server.message, server.finish = message, {"a": finish}
    (found,) = remote(server).answers([talk("a", "a", "b")])
    assert found.failed and reason in found.failed


BAD: dict[str, Any] = {
    "infinite": {"usage": {"completion_tokens": float("1e999")}}, "words": {"usage": {"completion_tokens": "abc"}},
    "negative": {"usage": {"completion_tokens": -1}}, "a fraction": {"usage": {"completion_tokens": 1.5}},
    "too many": {"usage": {"completion_tokens": 2**70}}, "no choices": {"choices": []}, "null": {"choices": None},
    "a number": {"choices": 7}, "no message": {"choices": [{"finish_reason": "stop"}]}, "usage": {"usage": [1]},
    "message": {"choices": [{"message": "x", "finish_reason": "stop"}]}, "choice": {"choices": ["x"]},
    "reasoning": {"choices": [{"message": {"content": "x", "reasoning": ["y"]}, "finish_reason": "stop"}]},
    "finish": {"choices": [{"message": {"content": "x"}, "finish_reason": ["\x1b[31m"]}]},
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_answer_costs_one_row(bad: str, server: FakeVllm) -> None:
    good = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
    server.failures = {"b": [json.dumps({**good, **BAD[bad]}).replace("Infinity", "1e999").encode()]}
    talks = [talk(name, name) for name in "abc"]
    found = {one.row: one.failed for one in remote(server).answers(talks)}
    assert found["a"] is found["c"] is None and len(server.times["b"]) == 1
    assert found["b"] and len(found["b"]) < 400 and "\x1b" not in found["b"]


@pytest.mark.parametrize("body", [b"[" * 100_000, b"<html>", [b"x" * 2**20]])
def test_no_answer_at_all_costs_one_row(body: Any, server: FakeVllm) -> None:
    server.failures, server.haste = {"b": [body] * 9}, 0.0
    server.models = b"nothing"  # nor need it say what it serves
    found = {one.row: one.failed for one in remote(server, patience=5.0).answers([talk(name, name) for name in "abc"])}
    assert found["a"] is found["c"] is None and found["b"]


def test_a_trickle_costs_one_row(server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "RETRIES", 1)
    server.failures, server.haste = {"b": [[b" "]] * 9}, 0.05
    found = {one.row: one.failed for one in remote(server, patience=0.3).answers([talk(name, name) for name in "abc"])}
    assert found["a"] is found["c"] is None and "timed out" in str(found["b"])


def test_reasoning_that_a_server_takes_out_is_kept(server: FakeVllm) -> None:
    server.message = {"reasoning": "hm"}
    one = talk("a", "a", "b")
    list(remote(server).answers([one]))
    assert one.messages()[1] == {"role": "assistant", "content": "<a>", "reasoning_content": "hm"}
    assert server.bodies[1]["messages"][1]["reasoning_content"] == "hm"


def test_from_the_command_line(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")
    server.failures, server.finish = {"b": [400]}, {"c": "length"}
    data = write_jsonl(tmp_path / "in.jsonl", [{"id": name, "messages": [user(name)]} for name in "abcd"])
    out = tmp_path / "out.jsonl"
    argv = ["regenerate", "--engine", "openai", "--url", f"{server.url}/v1"]
    argv += ["--data", str(data), "--out", str(out)]
    assert main(argv) == 1  # a quarter of the rows failed
    assert [row["id"] for row in map(json.loads, out.read_text().splitlines())] == ["a", "d"]
    told = json.loads(out.with_suffix(".json").read_text())
    assert told["target"] == {"engine": "openai", "model": "the-target"}
    assert (told["counts"]["failed"], told["counts"]["truncated"], list(told["failed"])) == (1, 1, ["b"])
    assert all(headers["Authorization"] == "Bearer very-secret" for _, _, headers in server.seen)
    assert main(argv) == 0  # the refused one is asked again, and answered
    assert [row["id"] for row in map(json.loads, out.read_text().splitlines())] == ["a", "b", "d"]
    assert {name: len(times) for name, times in server.times.items()} == {"a": 1, "b": 2, "c": 1, "d": 1}
    said = capsys.readouterr()
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert not any("very-secret" in text for text in [*written, caplog.text, said.out, said.err])
