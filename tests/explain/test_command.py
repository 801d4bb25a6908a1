"""``specdec explain``, from the command line to the files."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli import main
from specdec.decoding import Chain, SpeculativeDecoder
from specdec.drafter import load
from specdec.evaluation.record import read_answers
from specdec.explain import command, run
from specdec.explain.command import parser
from specdec.signals import Asked
from specdec.target import Target
from tests.serving.conftest import fake, served
from tests.serving.fake_vllm import DRAFTS, FakeVllm

__all__ = ["fake", "served"]
TEXTS = ("def add(a, b):", "def add_3(", "return a")


@pytest.fixture
def line(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "p.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    common = ["--target", str(target_directory), "--drafter", str(drafter_directory)]
    return [*common, "--prompts", str(tmp_path / "p.txt"), "--max_new_tokens", "8"]


def test_it_explains_what_evaluate_measures(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, evaluated = tmp_path / "out", tmp_path / "evaluated"
    assert main(["explain", *line, "--depth", "2", "--exported", "new", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"explain.json", "explain.png", "report.md"}
    told = json.loads((out / "explain.json").read_text())
    assert told["prompts"] == ["line-1", "line-2", "line-3"] and told["check"]["holds"] and told["depth"] == 2
    names = ["perfect", "vocabulary", "true_features", "own_features", "own_tokens", "observed", "exported"]
    assert [level["name"] for level in told["levels"]] == names
    shown = capsys.readouterr().out
    assert "The bars add up: 3.000" in " ".join(shown.split()) and "exported checkpoint" in shown
    arguments = [*line, "--growth", "chain:depth=2", "--plain", "false", "--compile", "off", "--out", str(evaluated)]
    assert main(["evaluate", *arguments]) == 0
    (answers,) = read_answers(evaluated / "answers.jsonl", 1)
    for level in told["levels"][-3:]:
        assert level["passes"] == [len(answer.accepted) for answer in answers]
        assert level["committed"] == [sum(answer.accepted) + len(answer.accepted) for answer in answers]

    monkeypatch.setattr(run, "observed", lambda *args: [[2] * 5] * len(args[2]))
    monkeypatch.setattr(command, "filler", lambda: lambda: ["import os\n" * 40])
    perturb = ["--perturb", "context:tokens=16"]
    assert main(["explain", *line, "--depth", "2", *perturb, "--out", str(tmp_path / "other")]) == 1
    told = json.loads((tmp_path / "other" / "explain.json").read_text())
    assert told["levels"][-1]["name"] == "perturbed context:tokens=16" and all(told["levels"][-1]["passes"])
    assert "THE BARS DO NOT ADD UP" in capsys.readouterr().out
    assert "THE BARS DO NOT ADD UP" in (tmp_path / "other" / "report.md").read_text()


def test_a_real_engine_is_a_level(
    line: list[str],
    served: Callable[..., FakeVllm],
    target_directory: Path,
    drafter_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, server = Target.load(target_directory), served(True)
    decoder = SpeculativeDecoder(target, load(drafter_directory), Chain(DRAFTS))
    expected = []
    for text in TEXTS:
        prompt = target.tokenizer(text)["input_ids"]
        made = decoder.generate(prompt, 8)
        server.plans[tuple(prompt)] = (made.ids, made.accepted)
        expected.append(len(made.accepted))
    line += ["--engine", "vllm", "--url", f"{server.url}/v1"]
    assert main(["explain", *line, "--depth", str(DRAFTS), "--out", str(tmp_path / "out")]) == 0
    told = json.loads((tmp_path / "out" / "explain.json").read_text())
    exported, engine = told["levels"][-2:]
    assert (exported["name"], engine["name"]) == ("exported", "engine")
    assert engine["passes"] == expected and told["beyond"][-1]["loss"]["mean"] == 0
    capsys.readouterr()
    assert main(["explain", *line, "--depth", "2"]) == 2
    assert "vLLM drafts 3 tokens a pass, not 2" in capsys.readouterr().err


def test_an_engine_that_fails_loses_nothing_else(
    line: list[str], fake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line += ["--depth", "2", "--engine", "vllm", "--vllm", fake, "--timeout", "20"]
    assert main(["explain", *line, "--out", str(tmp_path / "out"), "--", "--max-model-len", "64"]) == 2
    assert "sends no token_ids" in capsys.readouterr().err.splitlines()[-1]
    told = json.loads((tmp_path / "out" / "explain.json").read_text())
    assert told["levels"][-1]["name"] == "exported" and "sends no token_ids" in told["engine_failed"]
    words = json.loads((tmp_path / "said").read_text())["argv"]
    assert words[-4:] == ["--dtype", "float32", "--max-model-len", "64"]
    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 2

    def ended(*args: object) -> None:
        raise Asked(signal.SIGTERM)

    monkeypatch.setattr(command, "ask_all", ended)
    assert main(["explain", *line, "--out", str(tmp_path / "ended")]) == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "ended" / "explain.json").read_text())["levels"][-1]["name"] == "exported"


def test_bad_input_is_one_line(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    for arguments, message in (
        (["--depth", "0"], "depth must be at least 1"),
        (["--max_new_tokens", "1"], "max_new_tokens must be at least 2"),
        (["--max_new_tokens", "300"], "305 new ones exceed"),
        (["--out", str(tmp_path / "there")], "exists already"),
        (["--exported", "nowhere"], "nowhere: no such directory; --exported new"),
        (["--exported", str(tmp_path / "there")], "config.json is missing"),
        (["--format", "gguf"], "unknown format 'gguf'"),
        (["--perturb", "no_bos"], "perturb no_bos: no prompt begins with a BOS token"),
        (["--perturb", "louder"], "condition 'louder'"),
        (["--perturb", "context:tokens=512"], "perturb context:tokens=512: "),
        (["--url", "http://127.0.0.1:9"], "without --engine vllm"),
        (["--growth", "tree"], "growth"),
        (["--target.dtype", "float64", "--engine", "vllm", "--url", "http://127.0.0.1:9"], "vLLM has no float64"),
    ):
        assert main(["explain", *line, *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1, error
    assert not list(tmp_path.glob("runs*"))


def test_prompts_without_a_pass_are_told(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run.answered

    def short(*args: object) -> list:
        first, *others = made(*args)  # type: ignore[arg-type]
        return [first._replace(kept=1), *others]

    monkeypatch.setattr(run, "answered", short)
    assert main(["explain", *line, "--depth", "2", "--out", str(tmp_path / "out")]) == 0
    told = json.loads((tmp_path / "out" / "explain.json").read_text())
    assert told["prompts"] == ["line-2", "line-3"] and told["without_a_pass"] == ["line-1"]


def test_its_parser_is_there_for_others() -> None:
    assert parser().get_defaults().depth == 5
