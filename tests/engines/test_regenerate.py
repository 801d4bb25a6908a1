"""The target's answers to a data set: which are due, who gives them, and how a run goes on that ended early."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.data.chat import encode, read_conversations
from specdec.decoding import PlainDecoder
from specdec.engines import remote
from specdec.engines.server import VllmLaunch
from specdec.target import Target, TargetSource
from specdec.utils.reading import sha256
from specdec.utils.vllm import VARIABLE, find_vllm
from tests.data.tiny import write_jsonl
from tests.engines import inside_vllm
from tests.engines.chats import LEARNT, SYSTEM, asked, messages
from tests.engines.conftest import soon
from tests.engines.fake_vllm import FakeVllm


def run(target: Path, data: Path, out: Path, *more: str) -> int:
    argv = [
        "regenerate",
        "--target",
        str(target),
        "--data",
        str(data),
        "--out",
        str(out),
        "--max_new_tokens",
        "40",
    ]
    return main([*argv, "--batch_size", "3", *more])


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def words(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row's messages without their tokens."""
    return [
        {name: message[name] for name in message if not name.endswith("token_ids")}
        for message in row["messages"]
    ]


def record(out: Path) -> dict[str, Any]:
    return json.loads(out.with_suffix(".json").read_text())


def test_the_targets_own_words_take_the_place_of_others(
    chat_target: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    assert run(chat_target, chats, out) == 0
    assert {row["id"]: words(row) for row in rows(out)} == {
        f"row-{n}": messages(s) for n, s in enumerate(LEARNT)
    }
    told = record(out)
    assert told["counts"] == {
        "rows": 4, "complete": 4, "ended": 0, "truncated": 0, "failed": 0, "skipped": 0, "written": 4, "answers": 6,
        "tokens": told["counts"]["tokens"],
    }  # fmt: skip
    assert told["asking"]["temperature"] == 0 and told["asking"]["max_new_tokens"] == 40
    assert len(told["target"]["fingerprint"]) == 64 and told["target"]["engine"] == "transformers"
    assert "specdec regenerate" in told["provenance"]["command"]
    assert told["counts"]["tokens"] > 6


def test_a_broken_row_may_be_left_out(chat_target: Path, chats: Path, tmp_path: Path) -> None:
    out, broken = tmp_path / "out.jsonl", tmp_path / "broken.jsonl"
    broken.write_text(chats.read_text() + '{"conversations": [{"from": ["x"], "value": "y"}]}\n')
    assert run(chat_target, broken, out) == 2
    assert run(chat_target, broken, out, "--broken", "drop") == 0
    assert len(rows(out)) == len(LEARNT)
    (left_out,) = record(out)["left_out"]
    assert left_out.startswith(f"{broken}, line 5: unknown speaker")


def test_training_sees_the_tokens_that_were_generated(
    chat_target: Path, chats: Path, tmp_path: Path
) -> None:
    """What ChatData supervises is what the target generates greedily, turn after turn, end of turn included."""
    out = tmp_path / "out.jsonl"
    assert run(chat_target, chats, out) == 0
    target = Target.load(chat_target)
    tokenizer, decoder, ends = target.tokenizer, PlainDecoder(target), target.eos_token_ids
    documents = list(encode(read_conversations(str(out)), tokenizer, 256))
    for said, document in zip(LEARNT, documents, strict=True):
        history: list[dict[str, Any]] = []
        expected: list[int] = []
        for question in asked(said)[::2]:
            history.append(question)
            prompt = tokenizer.apply_chat_template(
                history, add_generation_prompt=True, tokenize=False
            )
            ids = decoder.generate(tokenizer.encode(prompt, add_special_tokens=False), 40, ends).ids
            assert ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids[:-1]
            expected += ids
            history.append({"role": "assistant", "content": tokenizer.decode(ids[:-1])})
        assert document.ids_T[document.loss_mask_T].tolist() == expected


def test_system_and_tools_stay(
    chat_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    more = [{"role": "user", "content": "hello there"}, call, {"role": "tool", "content": "4"}]
    path = write_jsonl(
        tmp_path / "in.jsonl",
        [
            {"conversations": [SYSTEM, *asked(LEARNT[0])], "tools": tools},
            {"messages": [*asked(LEARNT[1]), *more], "tools": tools},
            {"messages": more[1:]},
        ],
    )
    out = tmp_path / "out.jsonl"
    assert run(chat_target, path, out) == 0
    first, second = rows(out)
    assert words(first) == [SYSTEM, *messages(LEARNT[0])] and first["tools"] == tools
    assert words(second)[:5] == [*messages(LEARNT[1]), more[0]] and second["tools"] == tools
    assert len(second["messages"]) == 6  # the target's own answer, which calls nothing, is the last
    told = record(out)
    assert told["skipped"] == {"the assistant speaks before any user does": 1}
    assert told["ended"] == {"the target did not call where the row calls a tool": 1}
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 2 of 3 rows written, {told['counts']['tokens']} tokens",
        "  1 row answered to the end",
        "  1 row ended early, kept up to that answer: the target did not call where the row calls a tool",
        "  1 row skipped: the assistant speaks before any user does",
    ]


def test_answers_that_run_out_of_tokens(
    chat_target: Path, chats: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, short = tmp_path / "out.jsonl", ["--max_new_tokens", "6"]
    assert run(chat_target, chats, out, *short) == 0
    left = {row["id"] for row in rows(out)}
    counts = record(out)["counts"]
    assert 0 < counts["truncated"] < 4 and len(left) == counts["written"] == 4 - counts["truncated"]
    assert "--truncated keep" in caplog.text
    before = (tmp_path / "out.jsonl.journal").read_text()
    assert run(chat_target, chats, out, *short, "--truncated", "keep") == 0
    assert (tmp_path / "out.jsonl.journal").read_text() == before  # nothing is asked again
    whole = {row["id"]: row["messages"] for row in rows(out)}
    for turn in (turn for said in whole.values() for turn in said if turn["role"] == "assistant"):
        cut_off = turn.get("finish_reason") == "length"
        assert (
            (len(turn["token_ids"]) == 6 and turn["token_ids"][-1] != 3)
            if cut_off
            else turn["token_ids"][-1] == 3
        )
    assert list(whole) == [f"row-{n}" for n in range(4)]
    ended = whole["row-3"][-1]["content"]  # after its first six tokens
    assert LEARNT[3][1].startswith(ended) and ended != LEARNT[3][1]


def test_what_fails_is_told_and_left_out(chat_target: Path, chats: Path, tmp_path: Path) -> None:
    data = write_jsonl(
        tmp_path / "in.jsonl",
        [{"messages": asked(LEARNT[0])}, {"id": "long", "messages": asked(["the sky " * 200])}],
    )
    out = tmp_path / "out.jsonl"
    assert run(chat_target, data, out) == 1  # half of all, and a tenth may
    assert len(rows(out)) == 1
    told = record(out)
    assert told["counts"]["failed"] == 1
    assert told["failed"]["long"].startswith(f"{data}, line 2: a prompt of ")
    assert "exceed the target's 256 positions" in told["failed"]["long"]


def test_drawn_answers_depend_on_seed_row_and_turn_alone(chat_target: Path, tmp_path: Path) -> None:
    same = [{"id": f"{n}", "messages": [{"role": "user", "content": "the"}]} for n in range(8)]
    data = write_jsonl(tmp_path / "in.jsonl", same)
    hot = ["--temperature", "2", "--max_new_tokens", "4", "--truncated", "keep"]
    made = []
    for name, more in (("a", []), ("b", ["--batch_size", "8"]), ("c", ["--seed", "1"])):
        run(chat_target, data, tmp_path / f"{name}.jsonl", *hot, *more)
        made.append(rows(tmp_path / f"{name}.jsonl"))
    assert made[0] == made[1] != made[2]
    assert len({row["messages"][-1]["content"] for row in made[0]}) > 2


def test_a_target_without_a_chat_template(
    target_directory: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target_directory, chats, tmp_path / "out.jsonl") == 2
    assert "the target's tokenizer has no chat template" in capsys.readouterr().err


@pytest.fixture
def argv(server: FakeVllm, tmp_path: Path) -> list[str]:
    rows = [
        {
            "id": f"{n}",
            "messages": [{"role": "user", "content": f"{turn} {n}"} for turn in "ab"[: 1 + n % 2]],
        }
        for n in range(30)
    ]
    for row in rows:  # two turns each, of every second
        row["messages"] = [
            part
            for turn in row["messages"]
            for part in (turn, {"role": "assistant", "content": "-"})
        ]
    data = write_jsonl(tmp_path / "in.jsonl", rows)
    return [
        "regenerate",
        "--engine",
        "openai",
        "--url",
        server.url,
        "--data",
        str(data),
        "--concurrency",
        "2",
    ]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_killed_run_goes_on(server: FakeVllm, argv: list[str], tmp_path: Path) -> None:
    calm, out = tmp_path / "calm.jsonl", tmp_path / "out.jsonl"
    assert main([*argv, "--out", str(calm)]) == 0
    asked = len(server.seen)
    server.delay = 0.05
    journal = tmp_path / "out.jsonl.journal"
    process = multiprocessing.get_context("fork").Process(
        target=main, args=([*argv, "--out", str(out)],)
    )
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
    # of each of two users the one that was not kept yet, at most
    assert len(server.seen) - 2 * asked <= 2
    told = json.loads(out.with_suffix(".json").read_text())
    assert told["counts"]["answers"] == 45 and done >= 9


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130)])
def test_a_stopped_run_keeps_what_is_done(
    number: int, status: int, server: FakeVllm, argv: list[str], end: Callable[..., None], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    server.delay = 0.05
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    end(lambda: len(lines(journal)) > 5, number)
    assert main([*argv, "--out", str(out)]) == status
    assert capsys.readouterr().err.endswith(
        f"what is done is kept in {journal}: the same command resumes\n"
    )
    assert not out.exists() and len(lines(journal)) > 5
    server.delay, before = 0.0, len(server.seen)
    assert main([*argv, "--out", str(out)]) == 0
    assert 0 < len(server.seen) - before < 43 and len(lines(out)) == 30


def test_a_server_that_is_gone_costs_nothing(
    server: FakeVllm, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(remote, "BACKOFF", 0.01)
    out, more = tmp_path / "out.jsonl", ["--model", "the-target"]
    server.failures, server.away = {f"a {n}": ["cut"] * 99 for n in range(5, 30)}, True
    assert main([*argv, "--out", str(out), *more]) == 2
    assert "the same command resumes" in capsys.readouterr().err and not out.exists()
    server.failures, server.away = {}, False
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
    more: list[str], message: str, server: FakeVllm, argv: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out.jsonl"
    assert main([*argv, "--out", str(out)]) == 0
    before = sha256(out), sha256(tmp_path / "out.jsonl.journal")
    assert main([*argv, "--out", str(out), *more]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert before == (sha256(out), sha256(tmp_path / "out.jsonl.journal"))


def test_a_vllm_whose_template_has_no_switch_is_refused_at_once(
    server: FakeVllm, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    vllm = ["--engine", "vllm", "--thinking", "true", "--out", str(out)]
    assert main([*argv, *vllm]) == 2
    err = capsys.readouterr().err
    assert "has no switch for thinking" in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    server.switch = "thinking"
    assert main([*argv, *vllm]) == 0


def test_what_the_answers_do_not_depend_on_may_differ(
    server: FakeVllm, argv: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    assert main([*argv, "--out", str(out)]) == 0
    os.rename(tmp_path / "in.jsonl", tmp_path / "moved.jsonl")
    moved = [word.replace("in.jsonl", "moved.jsonl") for word in argv]
    assert main([*moved, "--out", str(out), "--concurrency", "7", "--truncated", "keep"]) == 0
    assert len(server.seen) == 45


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", "x.json"], "name it FILE.jsonl"),
        (["--out", "there.jsonl"], "there.jsonl exists already, without there.jsonl.journal"),
        (["--out", "x.jsonl", "--engine", "transformers"], "need the --url of a running server"),
        (["--out", "x.jsonl", "--temperature", "-1"], "temperature must be 0 (greedy)"),
        (["--out", "x.jsonl", "--max_new_tokens", "0"], "max_new_tokens must be at least 1"),
        (["--out", "x.jsonl", "--concurrency", "0"], "concurrency must be at least 1"),
        (["--out", "x.jsonl", "--truncated", "perhaps"], "truncated"),
        (["--out", "x.jsonl", "--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--out", "x.jsonl", "--layout", "alpaca"], "no known layout (alpaca: ins"),
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


@pytest.mark.parametrize("more", [["--url", "http://me:very-secret@127.0.0.1:1"]])
def test_a_secret_given_in_the_wrong_place_is_not_repeated(
    more: list[str], argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--out", str(tmp_path / "out.jsonl"), *more]) == 2
    err = capsys.readouterr().err
    assert "key" in err and "very-secret" not in err
    assert not (tmp_path / "out.jsonl.journal").exists()


def test_a_broken_journal_is_named_with_its_line(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    assert main([*argv, "--out", str(out)]) == 0
    journal.write_text(f"{journal.read_text()}nonsense\n")
    assert main([*argv, "--out", str(out)]) == 2
    assert "line 47: damaged" in capsys.readouterr().err


def command(target: Path, data: Path, out: Path, *more: str) -> list[str]:
    return ["regenerate", "--target", str(target), "--data", str(data), "--out", str(out), *more]


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_vllm_says_what_the_target_says_here(
    chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy in float32, conversations of several turns."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no Python with vLLM; docs/serve.md says how to make one")
    for variable, value in inside_vllm.QUIET.items():
        monkeypatch.setenv(variable, value)
    talks = [
        {"messages": [*([SYSTEM] if n % 2 else []), *asked(said)]} for n, said in enumerate(LEARNT)
    ]
    data = write_jsonl(tmp_path / "chats.jsonl", talks)
    flags = (
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
        "--enforce-eager",
    )
    launch = VllmLaunch(
        find_vllm(), TargetSource(str(chat_target)), port=0, timeout=300, extra=flags
    )
    here, there, more = (
        tmp_path / "here.jsonl",
        tmp_path / "there.jsonl",
        ["--max_new_tokens", "40"],
    )
    assert main(command(chat_target, data, here, *more)) == 0
    with launch.server(None, tmp_path / "log") as server:
        assert (
            main(command(chat_target, data, there, *more, "--engine", "vllm", "--url", server.url))
            == 0
        )
    ours, theirs = (json.loads(path.with_suffix(".json").read_text()) for path in (here, there))
    assert rows(here) == rows(there) and ours["counts"] == theirs["counts"]  # their tokens, too
    assert ours["counts"]["tokens"] > 0
    done = [words(row) for row in rows(there)]
    assert done[0] == messages(LEARNT[0]) and done[1] == [SYSTEM, *messages(LEARNT[1])]


def test_a_journal_is_of_one_tokenizer(
    chat_target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, out = Path(shutil.copytree(chat_target, tmp_path / "copy")), tmp_path / "out.jsonl"
    assert run(copy, chats, out) == 0
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "a"}))
    assert run(copy, chats, out) == 2
    error = capsys.readouterr().err
    assert "out.jsonl.journal" in error and f"target.tokenizer {copy}: " in error


def test_a_journal_is_of_one_targets_weights_to_the_last_bit(
    chat_target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(chat_target, tmp_path / "copy"))
    out = tmp_path / "out.jsonl"
    assert run(copy, chats, out) == 0
    (weights,) = copy.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    # the lowest bit of a float32
    content[-4] ^= 1
    weights.write_bytes(content)
    assert run(copy, chats, out) == 2
    error = capsys.readouterr().err
    assert "out.jsonl.journal" in error and f"target.exact {copy}: " in error
