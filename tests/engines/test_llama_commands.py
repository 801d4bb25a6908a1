"""parity, export and serve with a real llama.cpp, at the command line."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.cli import main
from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.drafter import save_drafter
from specdec.engines.client import Endpoint
from specdec.engines.llama import VARIABLE
from specdec.engines.server import free_port
from specdec.target import Target
from tests.engines.gguf_target import write_target_gguf
from tests.engines.test_llama import SIZES

pytest.importorskip("xllamacpp")
ONE_THREAD = ["--", "--threads", "1"]


@pytest.fixture
def files(target_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A target, its GGUF file, and an EAGLE-3 drafter in ``tmp_path / "drafter"``."""
    monkeypatch.delenv(VARIABLE, raising=False)
    target = Target.load(target_directory)
    save_drafter(loud_drafter(target, loud_spec(target, "eagle3")), tmp_path / "drafter")
    file = write_target_gguf(target.model, tmp_path / "target.gguf")
    return ["--target", str(target_directory), "--engine", "llama.cpp", "--target_gguf", str(file)]


@pytest.mark.slow
def test_parity_compares_every_proposal(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = ["--drafter", str(tmp_path / "drafter")]
    assert main(["parity", *files, *drafter, "--out", str(tmp_path / "out"), *ONE_THREAD]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("PASS: training, decoding and llama.cpp (xllamacpp ")
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["engine"]["holds"] and report["engine"]["probes"][0]["changed"] > 50
    assert main(["parity", *files, "--design", "eagle3_1", *ONE_THREAD]) == 1
    printed = capsys.readouterr().out
    assert "it never reads it, and feeds the raw state back" in printed and "NOT SERVED" in printed


@pytest.mark.slow
def test_an_export_is_served_until_it_is_asked_to_end(
    files: list[str],
    tmp_path: Path,
    end: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    export = ["export", "--drafter", str(tmp_path / "drafter"), *files[:2], "--format", "gguf"]
    assert main([*export, "--out", str(tmp_path / "served")]) == 0
    assert capsys.readouterr().out.startswith("llama-server --model TARGET.gguf --spec-draft-model")
    port = free_port()
    answers: list[dict[str, object]] = []
    body = {"prompt": [5, 9, 17], "n_predict": 16, "temperature": 0, "return_tokens": True}

    def served() -> bool:
        if "http" not in capsys.readouterr().out:
            return False
        answers.append(Endpoint(f"http://127.0.0.1:{port}").complete("/completion", body))
        return True

    end(served, signal.SIGTERM)
    serve = ["serve", *files, "--drafter", str(tmp_path / "served"), "--port", str(port)]
    assert main([*serve, *ONE_THREAD]) == 0
    (answer,) = answers
    timings = answer["timings"]
    assert isinstance(timings, dict) and timings["draft_n"] > 0
    tokens = answer["tokens"]
    assert isinstance(tokens, list) and len(tokens) == 16


@pytest.mark.slow
def test_the_bench_compares_with_plain_decoding(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"def f{number}(x):"}) + "\n" for number in range(3)]
    prompts.write_text("".join(lines))
    out = tmp_path / "out"
    bench = ["serve", *files, "--drafter", str(tmp_path / "drafter"), "--bench", str(prompts)]
    numbers = ["--concurrency", "1", "2", "--max_new_tokens", "12", "--out", str(out)]
    assert main([*bench, *numbers, *ONE_THREAD]) == 0
    for users, count in ((1, 4), (2, 8)):
        drafted = json.loads((out / f"drafter-{users}.json").read_text())
        plain = json.loads((out / f"baseline-{users}.json").read_text())
        assert drafted["completed"] == plain["completed"] == count
        assert drafted["generated_tokens"] == plain["generated_tokens"]
        assert drafted["spec_decode_acceptance_length"] >= 1
        assert "spec_decode_acceptance_length" not in plain
    shown = capsys.readouterr().out
    assert "llama.cpp (xllamacpp " in shown and "8 of 8" in shown


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (
            "parity",
            ["--engine", "llama.cpp", "--design", "eagle3"],
            "reads GGUF files, and .* is none",
        ),
        ("serve", ["--engine", "llama.cpp"], "reads GGUF files, and .* is none"),
        (
            "serve",
            ["--engine", "llama.cpp", "--target_gguf", "away.gguf"],
            "away.gguf: no such file",
        ),
        ("serve", ["--target_gguf", __file__], "--target_gguf goes with --engine llama.cpp only"),
        (
            "serve",
            ["--engine", "llama.cpp", "--vllm", "python"],
            "--vllm goes with --engine vllm only",
        ),
        (
            "serve",
            ["--min_probability", "0.5"],
            "--min_probability goes with --engine llama.cpp only",
        ),
        (
            "parity",
            ["--target_gguf", __file__, "--design", "eagle3"],
            "--target_gguf goes with --engine llama.cpp only",
        ),
    ],
)
def test_mistakes_are_one_line(
    command: str,
    words: list[str],
    message: str,
    target_directory: Path,
    drafter_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = ["--drafter", str(drafter_directory)] if command == "serve" else []
    assert main([command, "--target", str(target_directory), *drafter, *words]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len([line for line in errors if "error:" in line]) == 1
    assert re.search(message, errors[-1]), errors


@pytest.mark.parametrize("engine", ["serve", "parity"])
def test_a_file_that_is_not_the_targets_is_refused_at_once(
    engine: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [engine, *files[:4], "--drafter", str(tmp_path / "drafter"), "--target_gguf"]
    words = tmp_path / "words.gguf"
    words.write_text("hello" * 20)
    assert main([*command, str(words)]) == 2
    assert "words.gguf: not a GGUF file" in capsys.readouterr().err
    assert main([*command, str(tmp_path)]) == 2
    assert f"--target_gguf {tmp_path}: no such file" in capsys.readouterr().err
    other = LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 96}))
    file = write_target_gguf(other.float(), tmp_path / "other.gguf")
    assert main([*command, str(file)]) == 2
    assert "embedding_length is 96 there, and 32 in" in capsys.readouterr().err
    assert (
        main(
            ["export", *files[:2], *command[5:7], "--format", "gguf", "--out", str(tmp_path / "e")]
        )
        == 0
    )
    assert main([*command, str(tmp_path / "e" / "drafter.gguf")]) == 2
    assert "it is a drafter: give the target's file" in capsys.readouterr().err


def test_parity_refuses_a_file_that_rounds(
    files: list[str], target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Target.load(target_directory).model.half()
    file = write_target_gguf(model, tmp_path / "half.gguf")
    line = ["parity", *files[:4], "--target_gguf", str(file), "--design", "eagle3"]
    assert main(line) == 2
    assert (
        "has matrices in F16, which round otherwise than the target in float32"
        in capsys.readouterr().err
    )


def test_an_export_is_pushed_and_not_imported(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = ["--drafter", str(tmp_path / "drafter")]
    served = str(tmp_path / "served")
    assert main(["export", *files[:2], *drafter, "--format", "gguf", "--out", served]) == 0
    card = (tmp_path / "served" / "README.md").read_text()
    assert "specdec import" not in card and "drafter.gguf" in card
    assert main(["push", "--drafter", served, "--repo", "me/mine", "--dry_run", "true"]) == 0
    assert "this would be uploaded to me/mine: drafter.gguf" in caplog.text
    back = ["import", "--checkpoint", served, *files[:2], "--out", str(tmp_path / "back")]
    assert main(back) == 2
    assert "a GGUF export, of which specdec reads nothing back" in capsys.readouterr().err
    assert main(["serve", *files, "--drafter", f"{served}/drafter.gguf"]) == 2
    assert f"drafter.gguf: a file: give its directory, {served}" in capsys.readouterr().err


def test_a_flag_that_specdec_gives_is_refused(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = [
        "serve",
        *files,
        "--drafter",
        str(tmp_path / "drafter"),
        "--",
        "--spec-draft-n-max",
        "5",
    ]
    assert main(serve) == 2
    assert "--spec-draft-n-max after -- is not passed on" in capsys.readouterr().err


def test_a_missing_server_is_told_with_what_to_do(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "away"))
    assert main(["serve", *files, "--drafter", str(tmp_path / "drafter")]) == 2
    assert f"{VARIABLE} {tmp_path / 'away'}: no such executable" in capsys.readouterr().err
