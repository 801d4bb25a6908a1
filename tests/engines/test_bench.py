"""``specdec serve --bench`` against a stand-in for vLLM whose answers are known."""

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specdec.cli import main
from specdec.embedded import embedded_target
from specdec.engines.bench import _measured, as_text
from specdec.evaluation.tune import schedules
from tests.engines.conftest import alive
from tests.engines.fake_vllm import DRAFTS, pieces
from tests.export.made import names

TOKENS = 12


@pytest.fixture
def argv(tmp_path: Path, fake: str, target_directory: Path) -> list[str]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}" * 2}) + "\n" for n in range(4)))
    return ["serve", "--bench", str(path), "--target", str(target_directory), "--vllm", fake, "--port", "0",
            "--max_new_tokens", str(TOKENS), "--out", str(tmp_path / "out")]  # fmt: skip


def test_with_and_without_a_drafter(
    argv: list[str], drafter_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with open(argv[2], "a") as file:
        file.write(json.dumps({"prompt_id": "void", "prompt": " "}) + "\n")
    more = [
        "--drafter",
        str(drafter_directory),
        "--concurrency",
        "4",
        "1",
        "--",
        "--dtype",
        "float32",
    ]
    assert main([*argv, *more]) == 0
    out = tmp_path / "out"
    files = [f"{name}-{users}.json" for name in ("baseline", "drafter") for users in (1, 4)]
    assert names(out) == ["SHA256SUMS", *files, "provenance.json"]
    passes = [accepted for _, accepted in pieces(TOKENS, True) if accepted is not None]
    for users, count in ((1, 4), (4, 16)):
        ours, plain = (
            json.loads((out / f"{name}-{users}.json").read_text())
            for name in ("drafter", "baseline")
        )
        for one, per_answer in ((ours, len(passes) + 1), (plain, TOKENS)):
            assert (one["completed"], one["total_output_tokens"]) == (count, count * TOKENS)
            assert one["max_concurrency"] == users
            assert one["output_throughput"] <= TOKENS / (0.005 * per_answer)
            assert 5 <= one["median_ttft_ms"] <= one["p95_ttft_ms"]
        assert (ours["spec_decode_num_drafts"], "spec_decode_num_drafts" in plain) == (
            count * len(passes),
            False,
        )
        assert ours["spec_decode_acceptance_length"] == pytest.approx(1 + sum(passes) / len(passes))
        shares = [sum(a > k for a in passes) / len(passes) for k in range(DRAFTS)]
        assert ours["spec_decode_per_position_acceptance_rates"] == pytest.approx(shares)
        assert ours["generated_texts"] == plain["generated_texts"]
    told = json.loads((out / "provenance.json").read_text())
    assert told["command"].startswith("specdec serve") and "--max_new_tokens 12" in told["command"]
    shown = capsys.readouterr().out
    ours, plain = (
        json.loads((out / f"{name}-4.json").read_text()) for name in ("drafter", "baseline")
    )
    assert f"({ours['output_throughput'] / plain['output_throughput']:.2f}x)" in shown
    assert (
        "4 of 4" in shown
        and "16 of 16" in shown
        and f"{1 + sum(passes) / len(passes):.2f}" in shown
    )
    said = json.loads((tmp_path / "said").read_text())  # by the second, without a drafter
    assert "--speculative-config" not in said["argv"] and not any(map(alive, said["pids"]))
    assert said["argv"][-3:] == ["--no-enable-prefix-caching", "--dtype", "float32"]
    assert "left out 1 of 5 prompts (void)" in caplog.text


@pytest.mark.slow
def test_several_numbers_of_drafts_and_the_schedule(
    argv: list[str], drafter_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        "--drafter",
        str(drafter_directory),
        "--draft_tokens",
        "3",
        "1",
        "--concurrency",
        "1",
        "2",
    ]
    assert main([*argv, *more]) == 0
    out, kinds = tmp_path / "out", ["baseline", "drafter-1", "drafter-3"]
    files = [f"{name}-{users}.json" for name in kinds for users in (1, 2)]
    assert names(out) == ["SHA256SUMS", *files, "provenance.json", "schedule.json"]
    rate = {file: json.loads((out / file).read_text())["output_throughput"] for file in files}
    best = {
        n: max((0, 1, 3), key=lambda k, n=n: rate[f"{kinds[min(k, 2)]}-{n}.json"]) for n in (1, 2)
    }
    assert json.loads((out / "schedule.json").read_text()) == schedules(best)
    shown = capsys.readouterr().out
    assert shown.count("drafter-1") == shown.count("drafter-3") == shown.count("baseline") == 2
    assert (
        main(
            [*argv[:1], *argv[3:], "--drafter", str(drafter_directory), "--draft_tokens", "1", "3"]
        )
        == 2
    )


@pytest.mark.slow
def test_answers_that_differ_are_counted(
    argv: list[str],
    drafter_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "differs")
    assert main([*argv, "--drafter", str(drafter_directory), "--concurrency", "1"]) == 0
    assert "0 of 4" in capsys.readouterr().out


def test_the_server_is_asked_what_specdec_would_ask(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_target())
    prompts = [tokenizer.encode(text) for text in ("def add(", "    return <s>")]
    assert tokenizer.split_special_tokens and prompts[0][0] == tokenizer.bos_token_id
    assert as_text(prompts, tokenizer) == (["def add(", "    return <s>"], True)
    bare = [ids[1:] for ids in prompts]
    assert as_text(bare, tokenizer) == (["def add(", "    return <s>"], False)
    assert caplog.text == ""
    assert as_text([prompts[0], *bare], tokenizer)[1] is False
    assert "1 of 3 prompts are other tokens" in caplog.text


@pytest.mark.slow
def test_nothing_is_left_of_what_failed(
    argv: list[str], drafter_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, long = tmp_path / "out", tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 200}) + "\n")
    drafter = ["--drafter", str(drafter_directory)]
    for wrong, message in (
        ([*drafter, "--bench", str(long), "--concurrency", "1"], "4 requests without an answer: "),
        ([*drafter, "--concurrency", "0"], "must be at least 1"),
        ([], "drafter"),
        ([*drafter, "--", "--port", "1"], "--port after --"),
        (["--drafter", str(tmp_path / "none")], "no such drafter directory"),
    ):
        assert main([*argv, *wrong]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists() and not list(tmp_path.glob(".tmp*"))
    out.mkdir()
    assert main([*argv, *drafter]) == 2
    assert "exists already" in capsys.readouterr().err


def test_what_it_says_lies_where_a_kill_is_cleaned_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [
        sys.executable,
        "-c",
        f"import os, sys; print(os.listdir({str(tmp_path)!r})); sys.exit(3)",
    ]
    with pytest.raises(ValueError, match=r"ended with status 3: \['bench.log'\]"):
        _measured(command, tmp_path / "result.json", tmp_path / "bench.log")


def test_stopped_while_its_server_starts(
    argv: list[str],
    drafter_directory: Path,
    end: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "never")
    end((tmp_path / "said").exists, signal.SIGTERM)
    assert main([*argv, "--drafter", str(drafter_directory)]) == 128 + signal.SIGTERM
    assert not any(map(alive, json.loads((tmp_path / "said").read_text())["pids"]))
    assert not (tmp_path / "out").exists()
