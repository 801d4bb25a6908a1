"""``specdec parity --engine vllm``, with stand-ins for vLLM; tests/serving/test_vllm.py has the real one."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.decoding import Chain, SpeculativeDecoder
from specdec.drafter import DrafterSpec, WeightedSum, load, save
from specdec.export import export_drafter
from specdec.parity.texts import PROMPTS
from specdec.target import Target
from tests.export.made import made_drafter
from tests.parity_command.conftest import SMALL
from tests.serving.conftest import alive
from tests.serving.fake_vllm import DRAFTS, FakeVllm

Servers = Callable[..., FakeVllm]


@pytest.fixture
def server(line: list[str], served: Servers, target_directory: Path, tmp_path: Path) -> FakeVllm:
    """Answers as our own decoder does."""
    target, fake = Target.load(target_directory), served(True)
    decoder = SpeculativeDecoder(target, load(tmp_path / "drafter"), Chain(DRAFTS))
    for text in PROMPTS:
        prompt = target.tokenizer(text)["input_ids"]
        made = decoder.generate(prompt, 8)
        fake.plans[tuple(prompt)] = (made.ids, made.accepted)
    return fake


def test_a_server_that_runs(
    line: list[str], server: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line += ["--engine", "vllm", "--url", f"{server.url}/v1"]
    assert main([*line, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "24 greedy tokens of vLLM, beside cached decoding in float32" in " ".join(told.split())
    assert told.splitlines()[-1] == "what was trained is what is decoded and what vLLM serves"
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["holds"] and report["engine"]["holds"] and report["engine"]["tokens"] == 24
    assert [one["position"] for one in report["engine"]["positions"]] == [1, 2, 3]
    assert [one["accepted"] for one in report["engine"]["positions"]] == server.accepted_at
    assert server.passes == report["engine"]["positions"][0]["passes"] > 3

    prompt, (ids, accepted) = next(iter(server.plans.items()))
    server.plans[prompt] = (ids, [accepted[0] + 1, *accepted[1:]])
    assert main([*line, "--out", str(tmp_path / "other")]) == 1
    told = capsys.readouterr().out
    assert "DIFFERENT in 1" in told and "NOT THE SAME: vLLM accepts other drafts" in told.splitlines()[-1]
    assert not json.loads((tmp_path / "other" / "parity.json").read_text())["engine"]["holds"]

    server.plans[prompt] = ([(token + 1) % 300 for token in ids], accepted)
    assert main(line) == 1
    assert "tokens are not this target's" in capsys.readouterr().out.splitlines()[-1]


def test_one_that_is_started_and_ended(
    line: list[str], fake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line += ["--engine", "vllm", "--vllm", fake, "--draft_tokens", "3", "--timeout", "20"]
    assert main([*line, "--out", str(tmp_path / "out"), "--", "--max-model-len", "64"]) == 2
    report = json.loads((tmp_path / "out" / "parity.json").read_text())  # nor lost
    assert report["rows"] and "sends no token_ids" in report["engine_failed"] and not report["holds"]
    seen = capsys.readouterr()
    assert "sends no token_ids" in seen.err.splitlines()[-1]  # the stand-in has none without a plan
    assert "training and export" in seen.out  # what was found before is told all the same
    said = json.loads((tmp_path / "said").read_text())
    argv = said["argv"]
    assert argv[-4:] == ["--dtype", "float32", "--max-model-len", "64"]
    speculative = json.loads(argv[argv.index("--speculative-config") + 1])
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle3", 3)
    assert "model.safetensors" in said["drafter"] and not Path(speculative["model"]).exists()
    assert not any(map(alive, said["pids"]))

    assert main([*line, "--exported", str(tmp_path / "served")]) == 2
    argv = json.loads((tmp_path / "said").read_text())["argv"]
    assert json.loads(argv[argv.index("--speculative-config") + 1])["model"] == str(tmp_path / "served")
    assert (tmp_path / "served" / "config.json").is_file()


def test_one_that_does_not_come_up(
    line: list[str], fake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "crash")
    assert main([*line, "--engine", "vllm", "--vllm", fake]) == 2
    error = capsys.readouterr().err
    assert "ended by itself with status 3: RuntimeError: the engine did not start" in error.splitlines()[-1]
    assert "  fake vLLM starts" in error


def test_what_is_not_servable_is_not_served(
    line: list[str], fake: str, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = made_drafter(DrafterSpec(WeightedSum(), draft_vocab_size=200), Target.load(target_directory))
    save(drafter, tmp_path / "sum")
    argv = ["parity", "--target", str(target_directory), "--drafter", str(tmp_path / "sum"), *SMALL]
    assert main([*argv, "--engine", "vllm", "--vllm", fake]) == 1
    assert "NOT SERVED" in capsys.readouterr().out and not (tmp_path / "said").exists()


def test_mistakes_are_one_line(
    line: list[str], fake: str, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_drafter(load(tmp_path / "drafter"), Target.load(target_directory), tmp_path / "other", "sglang")
    engine = ["--engine", "vllm"]
    url = ["--url", "http://127.0.0.1:9"]
    for more, message in (
        (url, "--url would go to vLLM, which is not asked without --engine vllm"),
        (["--draft_tokens", "5"], "--draft_tokens would go to vLLM"),
        (["--", "--enforce-eager"], "flags after -- would go to vLLM"),
        ([*engine, *url, "--port", "8000"], "--port would start vLLM, which is not started with --url"),
        ([*engine, *url, "--", "--enforce-eager"], "flags after -- would start vLLM"),
        ([*engine, "--vllm", fake, "--", "--dtype=half"], "--dtype after -- is not passed on"),
        ([*engine, "--vllm", fake, "--", "--port", "1"], "--port after -- is not passed on"),
        ([*engine, "--vllm", "/nowhere"], "/nowhere: no such executable"),
        ([*engine, "--vllm", fake, "--exported", str(tmp_path / "other")], "exported for SGLang"),
        ([*engine, "--vllm", fake, "--draft_tokens", "0"], "draft_tokens must be at least 1"),
        ([*engine, *url], "is the server up?"),
        ([*engine, "--url", "nowhere"], "nowhere: no URL of a server"),
        ([*engine, *url, "--target.dtype", "float64"], "vLLM has no float64"),
        (["--engine", "trt"], "typing.Literal['vllm']"),
    ):
        assert main([*line, *more]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1], more
    assert not (tmp_path / "said").exists() and os.path.isdir(tmp_path / "served")
