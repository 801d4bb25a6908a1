"""``specdec bench`` against a stand-in for vLLM whose answers are known."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli import main
from tests.engines.conftest import alive
from tests.engines.fake_vllm import DRAFTS, FakeVllm, pieces

Servers = Callable[..., FakeVllm]
TOKENS = 12


@pytest.fixture
def argv(tmp_path: Path, fake: str, target_directory: Path) -> list[str]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}" * 2}) + "\n" for n in range(4)))
    return ["bench", "--prompts", str(path), "--target", str(target_directory), "--vllm", fake,
            "--max_new_tokens", str(TOKENS), "--out", str(tmp_path / "out")]  # fmt: skip


def test_with_and_without_a_drafter(
    argv: list[str], served: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, plain = served(True, delay=0.005), served(False, delay=0.005)
    assert main([*argv, "--url", ours.url, "--baseline_url", f"{plain.url}/v1", "--concurrency", "4", "1"]) == 0
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [level["concurrency"] for level in found["levels"]] == [1, 4]
    passes = [accepted for _, accepted in pieces(TOKENS, True) if accepted is not None]
    for level, count in zip(found["levels"], (4, 16), strict=True):
        for one, per_answer in ((level["drafter"], len(passes) + 1), (level["baseline"], TOKENS)):
            assert (one["requests"], one["tokens"]) == (count, count * TOKENS)
            assert one["tokens_per_second"]["user"] <= TOKENS / (0.005 * per_answer)
            assert one["tokens_per_second"]["all"] == pytest.approx(one["tokens"] / one["seconds"])
            assert 0.005 <= one["first_token_seconds"]["median"] <= one["first_token_seconds"]["p95"]
            assert one["inter_token_seconds"]["median"] >= 0.005 * (per_answer - 1) / (TOKENS - 1)
        assert level["baseline"]["acceptance"] is None
        acceptance = level["drafter"]["acceptance"]
        assert (acceptance["passes"], acceptance["drafts"]) == (count * len(passes), DRAFTS * count * len(passes))
        assert acceptance["acceptance_length"] == pytest.approx(1 + sum(passes) / len(passes))
        assert acceptance["per_position"] == pytest.approx(
            [sum(a > k for a in passes) / len(passes) for k in range(DRAFTS)]
        )
        speeds = [level[name]["tokens_per_second"]["all"] for name in ("drafter", "baseline")]
        assert level["ratio"]["all"] == pytest.approx(speeds[0] / speeds[1])
        assert level["identical_outputs"] == {"same": count, "of": count}
    assert found["settings"]["max_new_tokens"] == TOKENS and found["provenance"]["command"].startswith("specdec bench")
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "16 of 16" in shown and f"{1 + sum(passes) / len(passes):.2f}" in shown
    assert "| 16 of 16 |" in (tmp_path / "out" / "report.md").read_text()
    assert all(not body["add_special_tokens"] and body["temperature"] == 0 for body in ours.bodies)


def test_answers_that_differ_are_counted(argv: list[str], served: Servers, tmp_path: Path) -> None:
    ours, plain = served(True), served(False)
    plain.words = "other "
    assert main([*argv, "--url", ours.url, "--baseline_url", plain.url, "--concurrency", "1"]) == 0
    level = json.loads((tmp_path / "out" / "bench.json").read_text())["levels"][0]
    assert level["identical_outputs"] == {"same": 0, "of": 4}


def test_a_drafter_is_served_and_then_its_target_alone(
    argv: list[str], drafter_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open(argv[2], "a") as file:
        file.write(json.dumps({"prompt_id": "void", "prompt": " "}) + "\n")
    more = ["--drafter", str(drafter_directory), "--concurrency", "2", "--timeout", "20", "--", "--dtype", "float32"]
    assert main([*argv, *more]) == 0
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    (level,) = found["levels"]
    assert level["drafter"]["acceptance"] and level["baseline"]["acceptance"] is None and level["ratio"]
    assert found["settings"]["draft_tokens"] == 3 and found["settings"]["vllm_args"] == ["--dtype", "float32"]
    said = json.loads((tmp_path / "said").read_text())
    assert "--speculative-config" not in said["argv"] and not any(map(alive, said["pids"]))
    assert said["argv"][-3:] == ["--dtype", "float32", "--no-enable-prefix-caching"]
    assert "1 of 5 prompts were left out (void)" in caplog.text


def test_nothing_is_left_of_what_failed(
    argv: list[str], served: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, out = served(False).url, tmp_path / "out"
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 200}) + "\n")
    for wrong, message in (
        (["--prompts", str(long), "--url", url, "--concurrency", "1"], "4 requests were not answered: "),
        (["--url", "http://127.0.0.1:1"], "is the server up?"),
        (["--url", url, "--concurrency", "0"], "must be at least 1"),
        (["--url", url, "--drafter", "x"], "give either --url"),
        ([], "give either --url"),
        (["--drafter", "x", "--baseline_url", url], "--baseline_url goes with --url"),
        (["--url", url, "--", "--dtype", "half"], "flags after --"),
        (["--drafter", str(tmp_path)], "no such file"),
    ):
        assert main([*argv, *wrong]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists() and not list(tmp_path.glob(".tmp*"))
    out.mkdir()
    assert main([*argv, "--url", url]) == 2
    assert "exists already" in capsys.readouterr().err


def test_stopped_while_its_server_starts(
    argv: list[str], drafter_directory: Path, end: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "never")
    end((tmp_path / "said").exists, signal.SIGTERM)
    assert main([*argv, "--drafter", str(drafter_directory)]) == 128 + signal.SIGTERM
    assert not any(map(alive, json.loads((tmp_path / "said").read_text())["pids"]))
    assert not (tmp_path / "out").exists()
