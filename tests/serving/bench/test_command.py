"""``specdec bench`` against servers that are known."""

import json
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.evaluation.prompts import Prompt
from specdec.serving.bench.asking import Asking
from specdec.serving.bench.endpoint import Endpoint
from specdec.serving.bench.load import requests, run_level
from specdec.serving.bench.summary import told
from specdec.serving.server import free_port
from tests.serving.conftest import alive, soon
from tests.serving.fake_vllm import DRAFTS, FakeVllm, pieces

Servers = Callable[..., FakeVllm]
TOKENS = 12


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"p{n}" * 2} for n in range(3)] + [{"turns": ["hello", "again"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def bench(prompts: str, out: Path, *more: str) -> int:
    return main(["bench", "--prompts", prompts, "--max_new_tokens", str(TOKENS), "--out", str(out), *more])


def expected_passes() -> list[int]:
    return [accepted for _, accepted in pieces(TOKENS, True) if accepted is not None]


def test_with_and_without_a_drafter(
    prompts: str, served: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, plain = served(True, delay=0.01), served(False, delay=0.01)
    more = ["--url", ours.url, "--baseline_url", f"{plain.url}/v1", "--concurrency", "4", "1"]
    assert bench(prompts, tmp_path / "out", *more) == 0
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [level["concurrency"] for level in found["levels"]] == [1, 4]
    passes = expected_passes()
    for level, count in zip(found["levels"], (4, 16), strict=True):
        for one, per_answer in ((level["served"], len(passes) + 1), (level["baseline"], TOKENS)):
            assert (one["requests"], one["tokens"]) == (count, count * TOKENS)
            rate = one["tokens_per_second"]
            assert rate["user"] <= TOKENS / (0.01 * per_answer)
            assert rate["user"] == pytest.approx(one["tokens"] / sum(answer["seconds"] for answer in one["answers"]))
            assert rate["total"] == pytest.approx(one["tokens"] / one["seconds"])
            assert 0.01 <= one["first_token_seconds"]["median"] <= one["first_token_seconds"]["p95"]
            assert one["inter_token_seconds"]["median"] >= 0.01 * (per_answer - 1) / (TOKENS - 1)
        assert level["baseline"]["acceptance"] is None
        acceptance = level["served"]["acceptance"]
        assert acceptance["passes"] == count * len(passes)
        assert acceptance["drafts"] == DRAFTS * acceptance["passes"]
        assert acceptance["acceptance_length"] == pytest.approx(1 + sum(passes) / len(passes))
        assert acceptance["accepted_at"] == [count * sum(a > k for a in passes) for k in range(DRAFTS)]
        ratio = level["ratio"]
        for of in ("user", "total"):
            served_rate, plain_rate = (level[one]["tokens_per_second"][of] for one in ("served", "baseline"))
            assert ratio[of] == pytest.approx(served_rate / plain_rate)
        assert (ratio["identical_outputs"], ratio["compared_outputs"]) == (count, count)
    assert found["servers"]["served"]["model"] == "the-target"
    assert found["settings"]["max_new_tokens"] == TOKENS and found["provenance"]["command"].startswith("specdec bench")
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert " ".join(f"{count / (16 * len(passes)):.2f}" for count in acceptance["accepted_at"]) in shown
    assert "16 of 16" in shown and f"{1 + sum(passes) / len(passes):.2f}" in shown
    assert (ours.most_at_once, plain.most_at_once) == (4, 4)


def test_answers_that_differ_are_counted(prompts: str, served: Servers, tmp_path: Path) -> None:
    ours, plain = served(True), served(False)
    plain.words = "other "
    more = ["--url", ours.url, "--baseline_url", plain.url, "--concurrency", "1"]
    assert bench(prompts, tmp_path / "a", *more) == 0
    assert bench(prompts, tmp_path / "b", *more, "--temperature", "1") == 0
    for name, compared in (("a", 4), ("b", 0)):
        ratio = json.loads((tmp_path / name / "bench.json").read_text())["levels"][0]["ratio"]
        assert (ratio["identical_outputs"], ratio["compared_outputs"]) == (0, compared)


def test_one_server_alone(prompts: str, served: Servers, tmp_path: Path) -> None:
    assert bench(prompts, tmp_path / "out", "--url", served(False).url, "--concurrency", "2", "--limit", "1") == 0
    level = json.loads((tmp_path / "out" / "bench.json").read_text())["levels"][0]
    assert level["baseline"] is level["ratio"] is None and level["served"]["requests"] == 8


def test_a_blank_prompt_is_left_out_by_name(
    prompts: str, served: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Path(prompts).open("a") as file:
        file.write(json.dumps({"question_id": "void", "turns": ["hello", " "]}) + "\n")
    assert bench(prompts, tmp_path / "out", "--url", served(False).url, "--concurrency", "1") == 0
    level = json.loads((tmp_path / "out" / "bench.json").read_text())["levels"][0]
    assert level["served"]["requests"] == 4
    assert "1 of 5 prompts were left out (void); void: it is empty, or a part of it is" in caplog.text


def test_a_drafter_is_served_and_then_its_target_alone(
    prompts: str, fake: str, target_directory: Path, drafter_directory: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pair = ["--target", str(target_directory), "--drafter", str(drafter_directory), "--vllm", fake, "--port", "0"]
    more = ["--concurrency", "2", "--timeout", "20", "--", "--dtype", "float32"]
    assert bench(prompts, tmp_path / "out", *pair, *more) == 0
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    (level,) = found["levels"]
    assert level["served"]["acceptance"] and level["baseline"]["acceptance"] is None and level["ratio"]
    assert found["settings"]["draft_tokens"] == 3 and found["settings"]["extra"] == ["--dtype", "float32"]
    assert found["servers"]["served"]["url"] != found["servers"]["baseline"]["url"]
    said = json.loads((tmp_path / "said").read_text())
    assert "--speculative-config" not in said["argv"] and not any(map(alive, said["pids"]))


def test_nothing_is_left_of_what_failed(
    prompts: str, served: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, out = served(False).url, tmp_path / "out"
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt_id": "long", "prompt": "x" * 200}) + "\n")
    for wrong, message in (
        (["--prompts", str(long), "--url", url], "prompt long: "),
        (["--url", f"http://127.0.0.1:{free_port()}"], "is the server up?"),
        (["--url", url, "--concurrency", "0"], "concurrency must be numbers from 1 on"),
        (["--url", url, "--concurrency", "2", "2"], "each once, not 2 2"),
        (["--url", url, "--drafter", "x"], "give either --url"),
        ([], "give either --url"),
        (["--drafter", "x", "--baseline_url", url], "--baseline_url goes with --url"),
        (["--url", url, "--", "--dtype", "half"], "flags after --"),
        (["--url", url, "--engine", "sglang"], "engine"),
        (["--url", url, "--target", "x", "--draft_tokens", "5"], "--target, --draft_tokens would start vLLM"),
        (["--url", url, "--max_new_tokens", "0"], "max_new_tokens must be at least 1"),
    ):
        assert bench(prompts, out, *wrong) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists() and not list(tmp_path.glob(".tmp*"))
    out.mkdir()
    assert bench(prompts, out, "--url", url) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle(
    number: int, prompts: str, served: Servers, end: Callable[..., None], tmp_path: Path
) -> None:
    server = served(True, delay=0.2)
    end(lambda: server.at_once == 2, number)
    begin = time.monotonic()
    more = ["--url", server.url, "--concurrency", "2", "--max_new_tokens", "200"]
    assert bench(prompts, tmp_path / "out", *more) == 128 + number
    assert time.monotonic() - begin < 10 and not (tmp_path / "out").exists()


def test_stopped_while_its_server_starts(
    prompts: str, fake: str, target_directory: Path, drafter_directory: Path, end: Callable[..., None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_VLLM", "never")
    end((tmp_path / "said").exists, signal.SIGTERM)
    pair = ["--target", str(target_directory), "--drafter", str(drafter_directory), "--vllm", fake, "--port", "0"]
    assert bench(prompts, tmp_path / "out", *pair) == 128 + signal.SIGTERM
    assert not any(map(alive, json.loads((tmp_path / "said").read_text())["pids"]))
    assert not (tmp_path / "out").exists()


def test_somebody_else_at_the_server_is_warned_of(served: Servers, caplog: pytest.LogCaptureFixture) -> None:
    server = served(False)
    prompts = [Prompt(str(n), None, None, None, f"p{n}") for n in range(2)]

    def work(number: int) -> None:
        def on_answer(answer: object) -> None:
            server.generated += number

        with caplog.at_level(logging.WARNING):
            run_level(Endpoint(server.url), Asking("m", 3), prompts, 1, on_answer)

    work(0)
    assert not caplog.text
    work(5)
    assert "somebody else uses it" in caplog.text


def test_a_failure_breaks_the_others_off(served: Servers) -> None:
    server = served(False, delay=0.1)
    slow, refused = Prompt("slow", None, None, None, "p"), Prompt("long", None, None, None, "x" * 200)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="prompt long: "):
        run_level(Endpoint(server.url), Asking("m", 200), [slow, refused], 2)
    assert time.monotonic() - begin < 10  # the slow one would take twenty seconds
    assert soon(lambda: server.at_once == 0)


def test_every_prompt_is_asked_and_every_user_has_some_requests() -> None:
    prompts = [Prompt(str(n), None, None, None, "p") for n in range(3)]
    assert [one.prompt_id for one in requests(prompts, 1)] == ["0", "1", "2", "0"]
    assert len(requests(prompts, 5)) == 20 and len(requests(prompts * 10, 5)) == 30


def test_answers_of_one_token_have_no_time_between(served: Servers) -> None:
    prompt = Prompt("1", None, None, None, "p")
    found = told(run_level(Endpoint(served(True).url), Asking("m", 1), [prompt], 1))
    assert found["inter_token_seconds"] is None and found["acceptance"] is None
