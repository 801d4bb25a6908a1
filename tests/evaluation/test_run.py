"""``specdec evaluate``, from the command line to the files."""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.evaluation import run as module
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.metrics import read_answers
from specdec.evaluation.summary import shape_summary
from specdec.report.plots import figure_files
from specdec.utils.reading import SUMS


@pytest.fixture
def arguments(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "p.txt").write_text("def add(a, b):\ndef add_3(\n")
    return [
        "evaluate", "--target", str(target_directory), "--drafter", str(drafter_directory),
        "--prompts", str(tmp_path / "p.txt"), "--shape", "chain:depth=2", "--max_new_tokens", "6", "--compile", "off",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _drawn_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests have an empty picture."""
    if request.node.name != "test_evaluate_writes_metrics_report_and_answers":
        monkeypatch.setattr(
            "specdec.evaluation.results_figure.plot", lambda metrics, path: path.touch()
        )


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}[]{% endif %}"
)


def sums(folder: Path) -> Path:
    """Two questions, the second too long for the target."""
    path = folder / "sums.jsonl"
    rows = [{"question": text, "answer": "2"} for text in ("1 + 1?", "1 + 1? " * 200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_evaluate_writes_metrics_report_and_answers(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([*arguments, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "metrics.json",
        "report.md",
        *figure_files("report.png"),
        "answers.jsonl",
        SUMS,
    }
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["results"][0]["identical_outputs"] == 2
    assert metrics["drafter"]["made_for_this_target"] is True
    assert metrics["skipped"] == [] and metrics["settings"]["thinking"] is None
    assert metrics["settings"]["chat_template_sha256"] is None
    ((one, two),) = read_answers(out / "answers.jsonl", 1)
    assert [one.prompt_id, two.prompt_id] == ["line-1", "line-2"]
    assert (
        shape_summary("", {}, [one, two])["acceptance_length"]
        == metrics["results"][0]["acceptance_length"]
    )


def test_an_evaluation_can_be_compared_with_one_of_other_files_of_the_same_prompts(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = (tmp_path / "p.txt").read_text()
    for name, text in (("a", prompts), ("b", prompts), ("c", prompts.replace("add_3", "add_4"))):
        (tmp_path / f"{name}.txt").write_text(text)
        assert (
            main(
                [
                    *arguments,
                    "--prompts",
                    str(tmp_path / f"{name}.txt"),
                    "--out",
                    str(tmp_path / name),
                ]
            )
            == 0
        )
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "B - A              +0.000 [+0.000, +0.000], p = 1" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "differ in their prompts" in capsys.readouterr().err


def test_older_results_are_never_overwritten(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([*arguments, "--out", str(out)]) == 0
    before = (out / "metrics.json").read_bytes()
    assert main([*arguments, "--out", str(out)]) == 2
    assert (out / "metrics.json").read_bytes() == before


def test_what_another_leaves_meanwhile_is_not_removed(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two at once: while one decodes, another is refused; and what stands in the place in the end stays."""
    out = tmp_path / "out"

    def decodes(*given: Any, **more: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(module, "benchmark", benchmark)
            assert main([*arguments, "--out", str(out)]) == 2
        out.mkdir()
        (out / "mine").touch()
        return benchmark(*given, **more)

    monkeypatch.setattr(module, "benchmark", decodes)
    assert main([*arguments, "--out", str(out)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "is claimed by another run" in first and "directory not empty" in second
    assert [path.name for path in out.iterdir()] == ["mine"] and not [*tmp_path.glob(".*")]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max_new_tokens", "999"], "positions"),
        (["--system", "Be brief."], "system"),
        (["--limit", "0"], "limit"),
        (["--sampling.temperature", "-0.5"], "temperature"),
        (["--shape", "static:depth=3"], "takes no parameters"),
        (["--baselines", "assisted"], "assisted:DIR"),
        (["--thinking", "true"], "thinking"),
        (["--thinking", "maybe"], "thinking"),
        (["--layouts", "mmlu"], "no layout 'mmlu'"),
        (["--prompts", "hub:gsm8k"], "hub:REPOSITORY"),
        (["--prompts", "SUMS"], "no chat template"),
    ],
)
def test_wrong_input_of_evaluate_leaves_nothing(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    message: str,
) -> None:
    out = tmp_path / "out"
    extra = [word.replace("SUMS", str(sums(tmp_path))) for word in extra]
    assert main([*arguments, *extra, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_refused_first(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("decoded in vain")

    monkeypatch.setattr("specdec.evaluation.run.benchmark", never)
    (tmp_path / "file").write_text("")
    assert main([*arguments, "--out", str(tmp_path / "file" / "out")]) == 2
    assert "not a directory" in capsys.readouterr().err.lower()


def test_a_suite_with_a_prompt_left_out(
    arguments: list[str],
    target_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, template in (("one", TEMPLATE), ("two", f"-{TEMPLATE}")):
        shutil.copytree(target_directory, tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(template)
    runs = {"a": ("one", "false"), "b": ("one", "true"), "c": ("two", "false")}
    for run, (target, thinking) in runs.items():
        more = [
            "--target",
            str(tmp_path / target),
            "--thinking",
            thinking,
            "--other_target",
            "true",  # its template is another
            "--out",
            str(tmp_path / run),
        ]
        assert main([*arguments, "--prompts", str(sums(tmp_path)), *more]) == 0
    assert "left out 1 of 2 prompts (line-2)" in caplog.text
    metrics = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert list(metrics["results"][0]["by_category"]) == ["gsm8k"]
    (skipped,) = metrics["skipped"]
    assert (
        skipped["prompt_id"] == "line-2"
        and "exceed the target's 256 positions" in skipped["reason"]
    )
    assert f"| line-2 | {skipped['reason']} |" in (tmp_path / "a" / "report.md").read_text()
    assert metrics["settings"]["thinking"] is False
    assert (
        metrics["settings"]["chat_template_sha256"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    )
    capsys.readouterr()
    for other, message in (
        ("b", "differ in thinking: False and True"),
        ("c", "differ in their target's tokenizer or chat template"),
    ):
        assert main(["compare", str(tmp_path / "a"), str(tmp_path / other)]) == 2
        assert message in capsys.readouterr().err


def test_a_certificate_on_demand(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "certified"
    assert main([*arguments, "--out", str(out), "--certify", "100"]) == 0
    stated, metrics = (
        json.loads((out / name).read_text()) for name in ("certificate.json", "metrics.json")
    )
    assert stated["holds"] is metrics["certified"] is True
    assert stated["target"] == metrics["target"] and stated["settings"] == metrics["settings"]
    assert [len(digest) for digest in stated["drafter_sha256"].values()] == [64]
    greedy = [check for check in stated["checks"] if check["check"] == "greedy"]
    assert [check["shape"] for check in greedy] == [
        result["shape"] for result in metrics["results"]
    ]
    assert all(check["tokens"] > 0 for check in greedy)


@pytest.mark.slow
@pytest.mark.timeout(600)  # graphs of a real decoder
def test_compiled_by_default_and_certified_so(
    arguments: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "compiled"
    with caplog.at_level(logging.INFO, "specdec"):
        assert main([*arguments[:-2], "--out", str(out), "--certify", "100"]) == 0
    told = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("compiled ") for text in told)
    stated, metrics = (
        json.loads((out / name).read_text()) for name in ("certificate.json", "metrics.json")
    )
    assert stated["holds"] and stated["greedy"] == {"compiled": True, "batch_size": 1}
    assert (
        metrics["settings"]["compile"] is True and metrics["results"][0]["identical_outputs"] == 2
    )


def test_a_certificate_that_does_not_hold_ends_the_command_with_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "specdec.evaluation.run.certify", lambda *_, **__: {"holds": False, "checks": []}
    )
    out = tmp_path / "refuted"
    assert main([*arguments, "--out", str(out), "--certify", "1"]) == 1
    assert json.loads((out / "certificate.json").read_text())["holds"] is False
    assert "see certificate.json" in caplog.text and ".tmp-" not in caplog.text

    def interrupted(*_: object, **__: object) -> None:
        raise ValueError("no prompt leaves room")

    monkeypatch.setattr("specdec.evaluation.run.certify", interrupted)
    assert main([*arguments, "--out", str(tmp_path / "kept"), "--certify", "1"]) == 2
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "metrics.json", "report.md", "report.png", "answers.jsonl", "SHA256SUMS",
    }  # fmt: skip
    assert main([*arguments, "--out", str(tmp_path / "none"), "--certify", "-1"]) == 2
    assert (
        "--certify must be at least 0, not -1" in capsys.readouterr().err
        and not (tmp_path / "none").exists()
    )
