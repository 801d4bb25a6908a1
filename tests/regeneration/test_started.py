"""The engine that starts vLLM: a stand-in's, and a real one's."""

import json
import os
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.data.documents import read_jsonl
from specdec.serving.engine import VARIABLE
from tests.data.tiny import write_jsonl
from tests.regeneration.made import LEARNT, SYSTEM, asked, messages
from tests.serving import inside_vllm
from tests.serving.conftest import alive


def argv(target: Path, data: Path, out: Path, *more: str) -> list[str]:
    return ["regenerate", "--target", str(target), "--data", str(data), "--out", str(out), *more]


def test_vllm_is_started_asked_and_ended(fake: str, chat_target: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    more = ["--engine", "vllm", "--vllm", fake, "--concurrency", "3", "--timeout", "20", "--", "--dtype", "float32"]
    assert main(argv(chat_target, chats, out, *more)) == 0
    said = json.loads((tmp_path / "said").read_text())
    assert said["argv"][:2] == ["serve", str(chat_target)] and said["argv"][-2:] == ["--dtype", "float32"]
    assert "--speculative-config" not in said["argv"]
    assert not any(map(alive, said["pids"]))
    last = [row["messages"][-1]["content"] for _, row in read_jsonl(out)]
    assert last == [f"<{asked(said)[-2]['content']}>" for said in LEARNT]
    told = json.loads(out.with_suffix(".json").read_text())
    identity = {"engine": "vllm", "source": str(chat_target), "revision": None, "flags": "--dtype float32"}
    assert told["target"] == identity
    (tmp_path / "said").unlink()
    assert main(argv(chat_target, chats, out, *more)) == 0  # nothing is left to ask, so nothing is started
    assert not (tmp_path / "said").exists()


@pytest.mark.parametrize(
    ("how", "message"), [("crash", "status 3"), ("fall", "vLLM ended by itself with status 4: ValueError: fell")]
)
def test_a_vllm_that_falls_ends_the_run(
    how: str, message: str, fake: str, chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_VLLM", how)
    rows = [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(4000)]
    data = write_jsonl(tmp_path / "in.jsonl", rows)
    more = ["--engine", "vllm", "--vllm", fake, "--concurrency", "1", "--timeout", "20"]
    assert main(argv(chat_target, data, tmp_path / "out.jsonl", *more)) == 2
    err = capsys.readouterr().err
    assert message in err and err.endswith("the same command goes on\n")
    assert "fake vLLM starts" in err


@pytest.mark.parametrize("flag", ["--api-key", "--api_key=s3cret", "--hf-token"])
def test_secrets_are_not_taken_where_they_would_be_recorded(
    flag: str, fake: str, chat_target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--engine", "vllm", "--vllm", fake, "--", flag, "s3cret"]
    assert main(argv(chat_target, chats, tmp_path / "out.jsonl", *more)) == 2
    err = capsys.readouterr().err
    assert "in the environment" in err and "s3cret" not in err
    assert not (tmp_path / "out.jsonl.journal").exists()


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_vllm_says_what_the_target_says_here(
    chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy in float32: conversations of several turns, and texts, of which one draws a special token."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no Python with vLLM; docs/serve.md says how to make one")
    for variable, value in inside_vllm.QUIET.items():
        monkeypatch.setenv(variable, value)
    rows = [{"messages": [*([SYSTEM] if n % 2 else []), *asked(said)]} for n, said in enumerate(LEARNT)]
    rows.append({"messages": asked(["something that nobody ever said to it", "-", "hello there", "-"])})
    chats = write_jsonl(tmp_path / "chats.jsonl", rows)
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "the sky is green"}, {"text": "what is two plus six"}])
    flags = ["--timeout", "300", "--", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]  # fmt: skip # noqa: E501
    for name, data, more in (("chats", chats, []), ("texts", texts, ["--prompt_tokens", "3", "--truncated", "keep"])):
        here, there = tmp_path / f"{name}-here.jsonl", tmp_path / f"{name}-there.jsonl"
        more = ["--max_new_tokens", "40", "--max_failed", "1", *more]
        assert main(argv(chat_target, data, here, *more)) == 0
        assert main(argv(chat_target, data, there, *more, "--engine", "vllm", *flags)) == 0
        ours, theirs = (json.loads(path.with_suffix(".json").read_text()) for path in (here, there))
        assert here.read_text() == there.read_text() and ours["counts"] == theirs["counts"]
        assert ours["answers"] == theirs["answers"] and ours["answers"]["tokens"] > 0
        assert ours["failed"] == theirs["failed"]
    assert "holds <|im_start|>" in next(iter(theirs["failed"].values()))
    done = [row["messages"] for _, row in read_jsonl(tmp_path / "chats-there.jsonl")]
    assert done[0] == messages(LEARNT[0]) and done[1] == [SYSTEM, *messages(LEARNT[1])]
