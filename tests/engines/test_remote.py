"""The engine behind a server: what is asked, at how much at a time, and what becomes of refusals."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.answering.dialogue import LENGTH, STOP, Dialogue, Turn, TurnAnswer, unpack_ids
from specdec.cli import main
from specdec.data.chat import read_conversations
from specdec.data.form import SWITCHES
from specdec.engines import remote as engine
from specdec.engines.client import Endpoint
from specdec.engines.regenerate_options import RegenerateConfig
from specdec.engines.remote import Remote, as_sent
from tests.data.tiny import write_jsonl
from tests.engines.fake_vllm import FakeVllm


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


def call(arguments: Any, name: str = "add", **more: Any) -> dict[str, Any]:
    return {"type": "function", **more, "function": {"name": name, "arguments": arguments}}


def talk(name: str, *said: str) -> Dialogue:
    return Dialogue(name, f"in.jsonl, line {name}", [Turn([user(text)]) for text in said])


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BACKOFF", 0.01)
    monkeypatch.setattr(engine, "RETRIES", 3)


def remote(
    server: FakeVllm, users: int = 4, timeout: float = 10.0, engine: Any = "vllm", **asking: Any
) -> Remote:
    config = RegenerateConfig(
        data=[],
        out=Path("x.jsonl"),
        url=server.url,
        engine=engine,
        concurrency=users,
        max_new_tokens=9,
        **asking,
    )
    return Remote(Endpoint(server.url, timeout=timeout), "m", config)


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
def test_concurrent_requests_are_limited(users: int, server: FakeVllm) -> None:
    server.delay = 0.05
    talks = [talk(f"{n}", f"a{n}") for n in range(9)]
    assert len(list(remote(server, users).answers(talks))) == 9
    assert server.most_at_once == users


def test_passing_failures_are_asked_again(server: FakeVllm) -> None:
    server.failures = {"a": [429, 503, "cut"], "b": [500], "c": ["cut", "cut"], "d": [429]}
    talks = [talk(name, name) for name in "abcde"]
    assert all(one.failed is None for one in remote(server).answers(talks))
    assert {name: len(times) for name, times in server.times.items()} == {
        "a": 4,
        "b": 2,
        "c": 3,
        "d": 2,
        "e": 1,
    }


def test_enough_is_enough_and_a_refusal_is_final(
    server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RETRIES", 2)
    server.failures = {"a": [500] * 9, "b": [400], "c": [404]}
    talks = [talk(name, name, "more") for name in "abc"]
    found = list(remote(server).answers(talks))
    assert {one.row: len(server.times[one.row]) for one in found} == {"a": 3, "b": 1, "c": 1}
    assert all(one.failed and one.turn == 0 for one in found)
    reasons = {one.row: str(one.failed) for one in found}
    assert (
        reasons["a"].endswith("/v1/chat/completions: status 500: not now")
        and "status 400" in reasons["b"]
    )


def test_an_answer_that_takes_too_long_is_asked_for_again(
    server: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RETRIES", 1)
    server.delay = 0.5
    (found,) = remote(server, timeout=0.1).answers([talk("a", "a")])
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
    monkeypatch.setattr(engine, "BACKOFF", 60.0)
    server.failures = {"a1": [503]}
    before = set(threading.enumerate())
    coming = remote(server, 2).answers([talk(f"{n}", f"a{n}") for n in range(5)])
    next(coming)
    begin = time.monotonic()
    coming.close()
    assert time.monotonic() - begin < 1
    assert [
        thread for thread in threading.enumerate() if not thread.daemon and thread not in before
    ] == []


def test_all_of_vllms_own_fields_are_given(server: FakeVllm) -> None:
    """Else the target's generation config would draw otherwise than is recorded."""
    asking = {"temperature": 0.7, "top_p": 0.9}
    for more in ({}, {"thinking": False, "engine": "openai"}, {"top_k": 20, "engine": "openai"}):
        list(
            remote(server, **asking, **more).answers(
                [Dialogue("a", "", [Turn([user("a")])], TOOLS)]
            )
        )
    first, second, third = server.bodies
    common = {
        "model": "m", "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "seed": remote(server).config.seed_of("a", 0),
        "messages": [user("a")], "tools": TOOLS, "tool_choice": "auto",
    }  # fmt: skip
    assert first == {
        **common,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }
    assert second == {**common, "chat_template_kwargs": dict.fromkeys(SWITCHES, False)}
    assert third == {**common, "top_k": 20}


@pytest.mark.parametrize(
    ("message", "finish", "reason"),
    [
        ({"tool_calls": [{}], "content": None}, "stop", "KeyError: 'function'"),
        (
            {"tool_calls": [{"function": {"name": 7}}]},
            "tool_calls",
            "the name of a call is no string",
        ),
        ({"tool_calls": "f()"}, "tool_calls", "no answer in the server's response"),
        ({}, "content_filter", "for another reason: content_filter"),
        ({"content": 7}, "stop", "no answer in the server's response"),
        ({"content": "\ud800"}, "stop", "UnicodeEncodeError"),
    ],
)
def test_answers_that_are_none(
    message: dict[str, Any], finish: str, reason: str, server: FakeVllm
) -> None:
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
    server.failures = {
        "b": [json.dumps({**good, **BAD[bad]}).replace("Infinity", "1e999").encode()]
    }
    talks = [talk(name, name) for name in "abc"]
    found = {one.row: one.failed for one in remote(server).answers(talks)}
    assert found["a"] is found["c"] is None and len(server.times["b"]) == 1
    assert found["b"] and len(found["b"]) < 400 and "\x1b" not in found["b"]


@pytest.mark.parametrize("body", [b"[" * 100_000, b"<html>", [b"x" * 2**20]])
def test_no_answer_at_all_costs_one_row(body: Any, server: FakeVllm) -> None:
    server.failures, server.haste = {"b": [body] * 9}, 0.0
    server.models = b"nothing"  # nor need it say what it serves
    found = {
        one.row: one.failed
        for one in remote(server, timeout=5.0).answers([talk(name, name) for name in "abc"])
    }
    assert found["a"] is found["c"] is None and found["b"]


def test_a_trickle_costs_one_row(server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RETRIES", 1)
    server.failures, server.haste = {"b": [[b" "]] * 9}, 0.05
    found = {
        one.row: one.failed
        for one in remote(server, timeout=0.3).answers([talk(name, name) for name in "abc"])
    }
    assert found["a"] is found["c"] is None and "timed out" in str(found["b"])


def test_reasoning_that_a_server_takes_out_is_kept(server: FakeVllm) -> None:
    server.message = {"reasoning": "hm"}
    row = talk("a", "a", "b")
    list(remote(server).answers([row]))
    assert row.messages()[1] == {"role": "assistant", "content": "<a>", "reasoning_content": "hm"}
    assert server.bodies[1]["messages"][1]["reasoning_content"] == "hm"


def test_the_tokens_of_a_vllm_are_kept(server: FakeVllm) -> None:
    server.ids = [3, 1, 4, 1, 5]
    row = talk("a", "abc", "de")
    first, second = remote(server).answers([row])
    assert unpack_ids(str(first.token_ids)) == unpack_ids(str(second.token_ids)) == [3, 1, 4, 1, 5]
    assert (first.tokens, first.finish) == (5, STOP)
    assert row.messages(ids=True)[3] == {
        "role": "assistant", "content": "<de>", "prompt_token_ids": [3, 5, 2], "token_ids": [3, 1, 4, 1, 5],
    }  # fmt: skip
    assert "token_ids" not in server.bodies[1]["messages"][1]  # nor are they sent back


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (None, "it has no token_ids"),
        ([], "it has no token_ids"),
        (["7"], "its token_ids are not all"),
        ([True], "not all"),
        ([-1], "not all"),
        ([2**31], "not all"),
    ],
)
def test_a_vllm_without_usable_tokens_fails_its_row(
    ids: Any, reason: str, server: FakeVllm
) -> None:
    server.ids = ids
    (answer,) = remote(server).answers([talk("a", "a")])
    assert reason in str(answer.failed)


def test_another_server_is_not_asked_for_tokens(server: FakeVllm) -> None:
    row = talk("a", "a")
    list(remote(server, engine="openai").answers([row]))
    assert "return_token_ids" not in server.bodies[0]
    assert row.messages(ids=True)[1] == {"role": "assistant", "content": "<a>"}


def tools_row(*turns: Turn) -> Dialogue:
    return Dialogue("a", "in.jsonl, line 1", list(turns), TOOLS)


RESULT = {"role": "tool", "content": "4"}


def test_a_call_is_followed_by_the_recorded_result(server: FakeVllm) -> None:
    server.messages = {
        "u": {"content": None, "tool_calls": [call('{"b": 2, "a": 2}', id="chatcmpl-tool-77")]}
    }
    server.finish = {"u": "tool_calls"}
    recorded = call({"a": 2, "b": 2}, id="call_1")
    row = tools_row(Turn([user("u")], [recorded]), Turn([{**RESULT, "tool_call_id": "call_1"}]))
    first, second = remote(server).answers([row])
    assert (first.finish, second.text, row.complete) == (STOP, "<4>", True)
    assert [body["tool_choice"] for body in server.bodies] == ["auto", "auto"]
    assert server.bodies[1]["messages"] == [
        user("u"),
        {"role": "assistant", "content": "", "tool_calls": [call('{"b": 2, "a": 2}', id="call_1")]},
        {**RESULT, "tool_call_id": "call_1"},
    ]


def test_a_call_whose_arguments_are_broken_ends_the_row(server: FakeVllm, tmp_path: Path) -> None:
    server.messages = {"u": {"tool_calls": [call('{"a": 2')]}}
    row = tools_row(Turn([user("u")], [call({"a": 2})]), Turn([RESULT]))
    (answer,) = remote(server, engine="openai").answers([row])
    assert (
        answer.failed is None
        and row.ended == "the target named a tool, but its call cannot be read"
    )
    (_, message) = row.messages(ids=True)  # weight: nobody knows the tokens that made it
    assert message == {"role": "assistant", "content": '<u>\nadd {"a": 2', "weight": 0}
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"messages": row.messages(ids=True), "tools": TOOLS}]
    )
    # it is a row like others
    assert read_conversations(str(path))[0].messages[1]["content"] == message["content"]


@pytest.mark.parametrize(("tokens", "finish"), [([1] * 8, STOP), ([1] * 9, LENGTH)])
def test_a_second_call_may_be_cut_off(tokens: list[int], finish: str, server: FakeVllm) -> None:
    """vLLM gives tool_calls as the reason to end also where the tokens ended."""
    server.message = {"tool_calls": [call("{}")]}
    server.finish = {"a": "tool_calls"}
    server.ids = tokens
    (answer,) = remote(server).answers([talk("a", "a")])
    assert answer.finish == finish


def test_ids_of_calls_are_made_where_the_row_has_none() -> None:
    sent = as_sent([user("u"), {"role": "assistant", "content": "", "tool_calls": [call({"a": "ä"}), call("{}")]},
                    RESULT, {"role": "tool", "content": "5"}])  # fmt: skip
    assert sent[1]["tool_calls"] == [call('{"a": "ä"}', id="call00000"), call("{}", id="call00001")]
    assert [message["tool_call_id"] for message in sent[2:]] == ["call00000", "call00001"]


def test_a_vllm_without_a_parser_of_calls(
    server: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that call tools cannot be answered; others can, and are told of once."""
    server.reads_calls = False
    rows = [
        tools_row(Turn([user(text)], calls))
        for text, calls in (("p", []), ("q", [call({})]), ("r", []))
    ]
    for row, name in zip(rows, "pqr", strict=True):
        row.id = name
    answers = {answer.row: answer for answer in remote(server, users=1).answers(rows)}
    assert (answers["p"].text, answers["r"].text) == ("<p>", "<r>")
    assert "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME" in str(
        answers["q"].failed
    )
    assert [body["tool_choice"] for body in server.bodies] == ["auto", "none", "auto", "none"]
    assert caplog.text.count("cannot read calls of tools") == 1


def test_a_switch_of_thinking_is_looked_for_first(server: FakeVllm) -> None:
    for name in ("enable_thinking", "thinking"):
        server.switch = name
        assert [
            answer.text for answer in remote(server, thinking=False).answers([talk("a", "a")])
        ] == ["<a>"]
    server.switch = None
    before = len(server.bodies)
    with pytest.raises(ValueError, match=r"has no switch for thinking.*: leave --thinking out"):
        remote(server, thinking=True)
    assert all(body["max_tokens"] == 1 for body in server.bodies[before:])  # nothing was answered


def test_another_server_does_not_tell_whether_it_has_a_switch(
    server: FakeVllm, caplog: pytest.LogCaptureFixture
) -> None:
    list(remote(server, thinking=True, engine="openai").answers([talk("a", "a")]))
    assert "cannot be seen from here" in caplog.text and len(server.bodies) == 1
    assert server.bodies[0]["chat_template_kwargs"] == dict.fromkeys(SWITCHES, True)


def test_from_the_command_line(
    server: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")
    server.failures, server.finish = {"b": [400]}, {"c": "length"}
    data = write_jsonl(
        tmp_path / "in.jsonl", [{"id": name, "messages": [user(name)]} for name in "abcd"]
    )
    out = tmp_path / "out.jsonl"
    argv = ["regenerate", "--engine", "openai", "--url", f"{server.url}/v1"]
    argv += ["--data", str(data), "--out", str(out)]
    assert main(argv) == 1  # a quarter of the rows failed
    assert [row["id"] for row in map(json.loads, out.read_text().splitlines())] == ["a", "d"]
    told = json.loads(out.with_suffix(".json").read_text())
    assert told["target"] == {"engine": "openai", "model": "the-target"}
    assert (told["counts"]["failed"], told["counts"]["truncated"], list(told["failed"])) == (
        1,
        1,
        ["b"],
    )
    assert all(headers["Authorization"] == "Bearer very-secret" for _, _, headers in server.seen)
    assert main(argv) == 0  # the refused one is asked again, and answered
    assert [row["id"] for row in map(json.loads, out.read_text().splitlines())] == ["a", "b", "d"]
    assert {name: len(times) for name, times in server.times.items()} == {
        "a": 1,
        "b": 2,
        "c": 1,
        "d": 1,
    }
    said = capsys.readouterr()
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert not any("very-secret" in text for text in [*written, caplog.text, said.out, said.err])
