"""An evaluation that is interrupted, and the same command again."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.decoding import PlainDecoder
from specdec.evaluation import benchmark as module
from specdec.evaluation import partial, run
from specdec.evaluation.metrics import Answer, read_answers
from specdec.evaluation.partial import PartialResults
from specdec.utils.journal import Journal
from specdec.utils.reading import explained

TIMES = {"seconds", "plain_seconds", "draft_ms", "verify_ms"}
PROMPTS = 11
TOO_LONG = (3, 9)  # of the prompts, for the target
WAVE = 2  # prompts decoded together, for each sequence of a batch


class Killed(BaseException):
    """As a process that ends: nothing catches it."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "specdec.evaluation.results_figure.plot", lambda metrics, path: path.touch()
    )
    monkeypatch.setattr(module, "WAVE", WAVE)
    return tmp_path / "cache"


@pytest.fixture
def arguments(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    rows = [
        {"prompt_id": f"{n}", "prompt": "def f(" * (300 if n in TOO_LONG else 1 + n % 3), "category": f"{n % 2}"}
        for n in range(PROMPTS)
    ]  # fmt: skip
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "evaluate", "--target", str(target_directory), "--drafter", str(drafter_directory), "--prompts",
        str(tmp_path / "p.jsonl"), "--shape", "chain:depth=2", "chain:depth=1", "--max_new_tokens", "6",
        "--compile", "off", "--sampling.temperature", "1", "--sampling.rule", "without_replacement",
    ]  # fmt: skip


def decoded(monkeypatch: pytest.MonkeyPatch, ends_after: int | None = None) -> list[str]:
    """The ids of the prompts that are decoded from now on; the process ends after so many."""
    prompts: list[str] = []
    real = module._Decoders.decode_wave

    def decode_wave(self: Any, wave: Sequence[module.PromptRun], seed: int) -> None:
        if ends_after is not None and len(prompts) >= ends_after:
            raise Killed
        prompts.extend(prompt_run.prompt.prompt_id for prompt_run in wave)
        real(self, wave, seed)

    monkeypatch.setattr(module._Decoders, "decode_wave", decode_wave)
    return prompts


def untimed(folder: Path) -> list[list[dict[str, Any]]]:
    def columns(answer: Answer) -> dict[str, Any]:
        return {name: value for name, value in answer._asdict().items() if name not in TIMES}

    return [
        [columns(answer) for answer in of_shape]
        for of_shape in read_answers(folder / "answers.jsonl", 2)
    ]


@pytest.mark.parametrize(("batch", "ends"), [(1, [1, 7]), (2, [4, 8])])
def test_the_same_command_decodes_the_rest_and_all_answers_are_the_same(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, batch: int, ends: list[int],
) -> None:  # fmt: skip
    arguments = [*arguments, "--batch_size", str(batch)]
    whole = tmp_path / "whole"
    assert main([*arguments, "--out", str(whole)]) == 0
    expected = json.loads((whole / "metrics.json").read_text())
    assert "continued_after_prompts" not in expected["provenance"]
    for ends_after in ends:
        out = tmp_path / f"killed-{ends_after}"
        killed = [*arguments, "--out", str(out)]
        caplog.clear()
        with monkeypatch.context() as patch:
            before = decoded(patch, ends_after)
            with pytest.raises(Killed):
                main(killed)
        assert "the same command continues" in caplog.text and len(before) == ends_after
        (journal,) = cache.glob("evaluations/*.journal")
        assert not out.exists()
        with monkeypatch.context() as patch:
            rest = decoded(patch)
            assert main(killed) == 0
        assert before + rest == [f"{n}" for n in range(PROMPTS)]
        assert untimed(out) == untimed(whole) and not journal.exists()
        metrics = json.loads((out / "metrics.json").read_text())
        assert metrics["skipped"] == expected["skipped"] and len(metrics["skipped"]) == 2
        assert metrics["provenance"]["continued_after_prompts"] == [ends_after]
        assert f"Interrupted after {ends_after} prompts" in (out / "report.md").read_text()


@pytest.mark.slow
def test_an_evaluation_may_be_interrupted_twice(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*arguments, "--out", str(tmp_path / "out")]
    for ends_after in (2, 4):
        with monkeypatch.context() as patch:
            decoded(patch, ends_after)
            with pytest.raises(Killed):
                main(arguments)
    assert main(arguments) == 0
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["provenance"]["continued_after_prompts"] == [2, 6]
    assert metrics["results"][0]["prompts"] == PROMPTS - len(TOO_LONG)


@pytest.mark.slow
def test_another_evaluation_begins_at_the_first_prompt(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*arguments, "--out", str(tmp_path / "out")]

    def begin(words: list[str], ends_after: int) -> list[str]:
        with monkeypatch.context() as patch:
            prompts = decoded(patch, ends_after)
            with pytest.raises(Killed):
                main([*arguments, *words])
        return prompts

    begin([], 5)
    changes = [
        ["--sampling.seed", "1"],
        ["--max_new_tokens", "7"],
        ["--shape", "chain:depth=2", "chain:depth=3"],
        ["--limit", "10"],
    ]
    for change in changes:
        assert begin(change, 1) == ["0"], change
    assert begin([], 1) == ["5"], "the first evaluation is kept meanwhile"


def test_a_changed_bit_in_what_was_decoded_is_named(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:  # fmt: skip
    arguments = [*arguments, "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        decoded(patch, 5)
        with pytest.raises(Killed):
            main(arguments)
    (journal,) = cache.glob("evaluations/*.journal")
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    assert main(arguments) == 2
    assert f"remove {journal}" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_decoders_keep_their_turns_and_are_warmed_up_again(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*arguments, "--out", str(tmp_path / "out")]
    first: list[int] = []  # which decoder goes first, by call
    plain_calls: list[int] = []
    real = module._Decoders.decode_wave
    generate_all = PlainDecoder.generate_all

    def decode_wave(self: Any, *args: Any) -> None:
        first.append(self.calls % len(self.all))
        real(self, *args)

    def counted(self: Any, requests: Any, *more: Any) -> Any:
        if self.name == "plain decoding":
            plain_calls.append(len(requests))
        return generate_all(self, requests, *more)

    monkeypatch.setattr(module._Decoders, "decode_wave", decode_wave)
    with monkeypatch.context() as patch:
        decoded(patch, 4)
        with pytest.raises(Killed):
            main(arguments)
    monkeypatch.setattr(PlainDecoder, "generate_all", counted)
    assert main(arguments) == 0
    decodable = PROMPTS - len(TOO_LONG)
    assert first[:3] == [0, 1, 2] and len(first) == PROMPTS
    # a prompt that is too long is no call
    assert first[4:] == [(n - sum(long < n for long in TOO_LONG)) % 3 for n in range(4, PROMPTS)]
    # one more than the prompts that are left
    assert len(plain_calls) == decodable - 3 + 1


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--temperatures", "0.5"]])
def test_it_continues_without_out_too(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if more:
        place = arguments.index("--sampling.temperature")
        arguments = [*arguments[:place], *arguments[place + 2 :], *more]
    with monkeypatch.context() as patch:
        decoded(patch, 5)
        with pytest.raises(Killed):
            main(arguments)
    rest = decoded(monkeypatch)
    assert main(arguments) == 0 and rest[0] == "5"


CONTEXT: dict[str, Any] = {
    "target": {"fingerprint": "a"},
    "drafter": {"weights_sha256": "b"},
    "settings": {"prompts_sha256": "c"},
    "provenance": {"cpu": "d", "cores": 2, "gpus": None, "versions": {"torch": "2"}, "date": "now"},
}
CHANGES: dict[str, dict[str, Any]] = {
    "target": {"target": {"fingerprint": "z"}},
    "drafter": {"drafter": {"weights_sha256": "z"}},
    "settings": {"settings": {"prompts_sha256": "z"}},
} | {
    name: {"provenance": CONTEXT["provenance"] | {name: value}}
    for name, value in {"cpu": "z", "cores": 3, "gpus": ["z"], "versions": {"torch": "3"}}.items()
}


@pytest.mark.parametrize("name", [*CHANGES, "code", "modules", "nothing"])
def test_whatever_decides_results_has_results_of_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one = PartialResults(CONTEXT).path
    if name in ("code", "modules"):
        function = "loaded_code" if name == "code" else "allowed_modules"
        monkeypatch.setattr(partial, function, lambda: {"files": "z"})
    context = CONTEXT | CHANGES.get(name, {})
    if name == "nothing":
        context = CONTEXT | {"provenance": CONTEXT["provenance"] | {"date": "later"}}
    other = PartialResults(context).path
    assert (one == other) == (name == "nothing")


@pytest.mark.parametrize("place", ["/proc/nothing", "FILE"])
def test_a_cache_that_cannot_be_written_costs_a_warning(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, place: str,
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", place.replace("FILE", str(tmp_path / "file")))
    assert main([*arguments, "--limit", "2", "--out", str(tmp_path / "out")]) == 0
    assert "if this evaluation is interrupted, it starts again" in caplog.text


def test_a_disk_that_fills_costs_a_warning(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def full(self: Any, entry: Any) -> None:
        with explained(self.path):
            raise OSError(errno.ENOSPC, "no space left on device")

    real = Journal.append
    calls: list[Any] = []

    def append(self: Any, entry: Any) -> None:
        calls.append(entry)
        (full if len(calls) > 4 else real)(self, entry)

    monkeypatch.setattr(Journal, "append", append)
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "no space left" in caplog.text and len(calls) == 5
    assert len(untimed(tmp_path / "out")[0]) == PROMPTS - len(TOO_LONG)
    assert list(cache.glob("evaluations/*.journal"))  # of the prompts before


@pytest.mark.slow
def test_one_of_two_at_a_time_is_kept(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The second decodes everything, and leaves alone what the first has kept."""
    real = module._Decoders.decode_wave
    waves: list[int] = []

    def decode_wave(self: Any, *args: Any) -> None:
        waves.append(1)
        if len(waves) == 3:
            assert main([*arguments, "--out", str(tmp_path / "second")]) == 0
            assert "another process writes it" in caplog.text
            assert len(list(cache.glob("evaluations/*.journal"))) == 1
        if len(waves) == PROMPTS + 5:
            raise Killed
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(module._Decoders, "decode_wave", decode_wave)
        with pytest.raises(Killed):
            main([*arguments, "--out", str(tmp_path / "first")])
    rest = decoded(monkeypatch)
    assert main([*arguments, "--out", str(tmp_path / "first")]) == 0
    assert rest == [f"{n}" for n in range(4, PROMPTS)]
    assert untimed(tmp_path / "first") == untimed(tmp_path / "second")


def test_nothing_is_kept_with_an_assistant(cache: Path) -> None:
    with PartialResults(CONTEXT, is_kept=False) as results:
        results.append({"begun_at": 0, "calls": 1, "prompts": [{"turns": [[]]}]})
    assert not cache.exists()


def test_a_refused_evaluation_leaves_nothing(
    arguments: list[str], tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "def f(" * 300}) + "\n")
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert not list(cache.glob("evaluations/*.journal"))


@pytest.mark.slow
def test_a_certificate_that_was_interrupted_is_written(
    arguments: list[str], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = arguments[: arguments.index("--sampling.temperature")]
    command = [*plain, "--temperatures", "0", "--certify", "64", "--out", str(tmp_path / "out")]

    def ends(*args: Any, **more: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run, "certify", ends)
        with pytest.raises(Killed):
            main(command)
    folder = tmp_path / "out/prompts-t0"
    assert (folder / "metrics.json").exists() and not (folder / "certificate.json").exists()
    assert main(command) == 0
    assert json.loads((folder / "certificate.json").read_text())["holds"]
    assert json.loads((folder / "metrics.json").read_text())["certified"] is True


@pytest.mark.slow
def test_a_killed_process_loses_one_prompt_at_most(
    arguments: list[str], tmp_path: Path, cache: Path
) -> None:
    command = [sys.executable, "-m", "specdec", *arguments, "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, env=os.environ | {"SPECDEC_CACHE": str(cache)}) as process:
        while sum(path.read_bytes().count(b"\n") for path in cache.glob("evaluations/*")) < 6:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    subprocess.run(command, env=os.environ | {"SPECDEC_CACHE": str(cache)}, check=True)
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    (point,) = metrics["provenance"]["continued_after_prompts"]
    assert point >= 5 and metrics["results"][0]["prompts"] == PROMPTS - len(TOO_LONG)
