"""The model card: what a machine reads of it is what was measured and trained."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from markdown_it import MarkdownIt

from specdec.cli import main
from specdec.drafter import Drafter, DrafterSpec, ScalarMix, save_drafter
from specdec.drafter.io import weights_sha256
from specdec.export import export_drafter
from specdec.export.card import hub_id, trained, training_text
from specdec.target import Target, TargetSource
from tests.export.made import evaluation, made_drafter
from tests.short_run import short_run
from tests.tiny import presets, variants

REPO = "me/small"
TRAINED = {
    "steps": 3, "tokens": 4, "data": ["a.jsonl"], "ttt_steps": 2, "loss": "x", "seed": 0, "resumed": 0,
    "date": "2026-01-01", "gpus": [], "cpu": "c", "versions": {"torch": "2"}, "git_commit": None, "command": "specdec",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(target_directory: Path) -> Target:
    return Target.load(target_directory)


def pushed(directory: Path, capsys: pytest.CaptureFixture[str], *more: str) -> ModelCard:
    """The card that a push would upload, read back as the Hub reads it."""
    capsys.readouterr()
    assert main(["push", "--drafter", str(directory), "--repo", REPO, "--dry_run", *more]) == 0
    card = ModelCard(capsys.readouterr().out)  # of an invalid front matter: ValueError
    assert str(card).startswith("---\n")
    return card


def quoted(directory: Path, drafter: Drafter, **settings: object) -> Path:
    of = drafter.config.to_json() | {"weights_sha256": weights_sha256(drafter)}
    return evaluation(directory, of, drafter.config.target["fingerprint"], **settings)


def test_figures_come_back_as_they_were_measured(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = made_drafter(DrafterSpec(draft_vocab_size=200), target)
    directory = save_drafter(drafter, tmp_path / "drafter")
    quoted(tmp_path / "a", drafter)  # in the folder around it: found without being named
    away = tmp_path / "away"
    away.mkdir()
    drawn = quoted(
        away / "b",
        drafter,
        prompts=["hub:openai/gsm8k@v1:main:test"],
        sampling={"temperature": 0.7},
    )
    card = pushed(directory, capsys)
    length, speed, single = card.data.eval_results
    conditions = {
        "max_new_tokens": 128, "temperature": 0.0, "batch_size": 1, "dtype": "float32", "device": "Xeon, 2 cores",
        "prompts_sha256": "0" * 64, "interval": "95 % Student's t",
    }  # fmt: skip
    assert length == EvalResult(
        task_type="text-generation", task_name="Speculative decoding", dataset_type="mt_bench",
        dataset_name="mt_bench.jsonl", metric_type="acceptance_length", metric_value=2.3456,
        metric_name="Acceptance length, bonus token included, chain of 5 [2.10, 2.60]",
        metric_args={"shape": {"class": "Chain", "depth": 5}, "prompts": 80, "low": 2.1, "high": 2.6, **conditions},
    )  # fmt: skip
    assert (speed.metric_type, speed.metric_value, speed.metric_args["high"]) == (
        "speedup",
        1.72,
        1.9,
    )
    assert (
        single.metric_value == 3.0
        and "low" not in single.metric_args
        and "[" not in single.metric_name
    )
    front = card.data.to_dict()
    assert model_index_to_eval_results(front["model-index"]) == ("small", card.data.eval_results)
    assert (
        "intervals are wide" in card.text
        and "| 1 | 0 | tree | 3.00 | - | not compared | 10% | 2.10 [" in card.text
    )
    assert "Warning: up to 10% of the answers repeat themselves" in card.text
    suite = {"title": "GSM8K", "published": "EAGLE's 80 questions of GSM8K", "rows_sha256": "1"}
    of_suite = quoted(away / "c", drafter, suite=suite)
    told = "| GSM8K (EAGLE's 80 questions of GSM8K) | 80 | 0 | chain of 5 | 2.35 [2.10, 2.60] |"
    assert told in pushed(directory, capsys, "--evaluation", str(of_suite)).text
    both = pushed(directory, capsys, "--evaluation", str(tmp_path / "a"), str(drawn))
    assert both.data.eval_results[:3] == card.data.eval_results and len(both.data.eval_results) == 6
    one = both.data.eval_results[3]
    of_hub = one.dataset_type, one.dataset_config, one.dataset_split, one.dataset_revision
    assert of_hub == ("openai/gsm8k", "main", "test", "v1") and "temperature 0.7" in one.metric_name
    other = quoted(
        tmp_path / "other", made_drafter(DrafterSpec(draft_vocab_size=200), target, seed=1)
    )
    assert pushed(directory, capsys).data.eval_results == card.data.eval_results  # of other weights
    argv = [
        "push",
        "--drafter",
        str(directory),
        "--repo",
        REPO,
        "--dry_run",
        "--evaluation",
        str(other),
    ]
    assert (
        main(argv) == 2 and "not an evaluation of this drafter's weights" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("spec", "name", "tags"),
    [
        (presets()["eagle1"], "EAGLE-1", ["eagle", "eagle-1"]),
        (variants()["dflash"], "DFlash", ["dflash"]),
        (presets()["eagle3"], "EAGLE-3", ["eagle3", "eagle-3"]),
        (presets()["eagle3_1"], "EAGLE-3.1", ["eagle3", "eagle-3.1"]),
        (DrafterSpec(ScalarMix(), draft_vocab_size=40), "EAGLE", ["eagle3", "eagle"]),
    ],
)
def test_a_card_says_what_the_drafter_is(
    spec: DrafterSpec,
    name: str,
    tags: list[str],
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = save_drafter(made_drafter(spec, target), tmp_path / "drafter")
    card = pushed(directory, capsys, "--license", "apache-2.0", "--base_model", "org/target")
    assert card.data.to_dict() == {
        "base_model": "org/target", "library_name": "specdec", "pipeline_tag": "text-generation",
        "license": "apache-2.0", "tags": ["speculative-decoding", "draft-model", *tags, "specdec"],
    }  # fmt: skip
    assert f"# {name} drafter for org/target\n" in card.text and "Nothing was measured" in card.text
    assert f"specdec evaluate --target org/target --drafter {REPO}" in card.text
    assert f"`{target.identity['fingerprint']}`" in card.text
    bare = pushed(directory, capsys).data.to_dict()
    assert "base_model" not in bare and "license" not in bare  # the target is a directory


def test_an_export_keeps_all_that_its_card_needs(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, served = (
        made_drafter(DrafterSpec(draft_vocab_size=200), target),
        TargetSource("org/target", "v2"),
    )
    made = quoted(tmp_path / "a", drafter)
    out = tmp_path / "served" / "out"
    exported = export_drafter(
        drafter, target, out, draft_tokens=5, served=served, evaluation=[made]
    )
    own = ModelCard.load(out / "README.md")
    assert (
        own.data.base_model == "org/target"
        and exported.command in own.text
        and own.data.model_name == "out"
    )
    card = pushed(out, capsys)
    assert card.data.eval_results == own.data.eval_results and card.data.model_name == "small"
    assert exported.command.replace(str(out), REPO) in card.text and "--revision v2" in card.text
    assert card.data.tags[-1] == "vllm" and f"specdec import --checkpoint {REPO}" in card.text
    later = pushed(
        out, capsys, "--evaluation", str(quoted(tmp_path / "b", drafter, max_new_tokens=9))
    )
    assert {one.metric_args["max_new_tokens"] for one in later.data.eval_results} == {9}


TOKENS = 3 * 2 * 2 * 32


@pytest.fixture
def run(
    target_directory: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The directory of a run of three steps, each of two batches of two rows of 32 tokens."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    small = {
        "trainer__max_steps": 3,
        "trainer__log_every_n_steps": 1,
        "trainer__limit_val_batches": 0,
    }
    argv = [
        "fit",
        *short_run(target_directory, text_file, trainer__accumulate_grad_batches=2, **small),
    ]
    assert main([*argv, "--seed_everything", "5", "--out", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def test_a_run_tells_how_it_was_trained(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = pushed(run / "drafter", capsys)
    assert f"3 steps, {TOKENS} tokens with padding, on functions.txt; 2 unrolled steps" in card.text
    assert (
        re.search(r"loss SoftCrossEntropy\S*, seed 5\. 20", card.text)
        and "\nspecdec fit --model" in card.text
    )
    (run / "DONE.json").unlink()  # a run that was interrupted
    assert "an unknown number of steps, on functions.txt" in pushed(run / "drafter", capsys).text
    best = shutil.copytree(run / "drafter", run / "drafter_best")
    stored = json.loads((best / "config.json").read_text())
    chosen = {"step": 2, "mean": 2.3123, "low": 2.1, "high": 2.5, "decoded": {}}
    (best / "config.json").write_text(json.dumps(stored | {"chosen_by": chosen}))
    (best / "SHA256SUMS").unlink()
    text = pushed(best, capsys).text
    assert (
        f"2 steps, {TOKENS * 2 // 3} tokens" in text
        and "acceptance length 2.31 [2.10, 2.50]" in text
    )
    for wrong in ("best", {"step": 2}, {"step": 2, "mean": "2"}):
        (best / "config.json").write_text(json.dumps(stored | {"chosen_by": wrong}))
        with pytest.raises(ValueError, match="chosen_by is not as specdec fit writes it"):
            trained(best)
    moved = (run / "drafter").rename(tmp_path / "elsewhere")
    assert "record of its training is missing" in pushed(moved, capsys).text


def test_a_run_its_evaluation_and_its_export_say_the_same(
    run: Path, target_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, of = (
        tmp_path / "p.txt",
        ["--target", str(target_directory), "--drafter", str(run / "drafter")],
    )
    prompts.write_text("def add_3(a, b):\n    return\ndef add_4(a,\n")
    measured = [
        "evaluate",
        *of,
        "--shape",
        "chain",
        "--prompts",
        str(prompts),
        "--max_new_tokens",
        "6",
    ]
    assert main([*measured, "--compile", "off", "--out", str(run / "measured")]) == 0
    card = pushed(run / "drafter", capsys)
    metrics: dict[str, Any] = json.loads((run / "measured" / "metrics.json").read_text())
    (found,) = (one for one in card.data.eval_results if one.metric_type == "acceptance_length")
    length = metrics["results"][0]["acceptance_length"]
    assert found.metric_value == round(length["mean"], 4) and found.metric_args["low"] == round(
        length["low"], 4
    )
    assert (
        found.dataset_name == "p.txt"
        and found.metric_args["shape"] == metrics["results"][0]["shape_config"]
    )
    assert main(["export", *of, "--out", str(tmp_path / "served")]) == 0
    exported = pushed(tmp_path / "served", capsys)
    assert (
        exported.data.eval_results == card.data.eval_results and f"{TOKENS} tokens" in exported.text
    )


def test_what_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    for source, found in (
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"), ("models/mine", None), ("embedded", None), ("/data/models/x", None),
        ("../x", None), (str(tmp_path), None),
    ):  # fmt: skip
        assert hub_id(source) == found


def test_a_record_of_any_text_is_shown_and_not_obeyed(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = made_drafter(DrafterSpec(draft_vocab_size=200), target)
    directory = save_drafter(drafter, tmp_path / "drafter")
    hostile = "![p](http://evil/p.png)<img src=x>|`a`[c](javascript:alert(1))"
    quoted(
        tmp_path / "a",
        drafter,
        prompts=[f"{hostile}.jsonl"],
        dtype=f"{hostile}\n\n# Title\n\x1b[31m",
    )
    body = pushed(directory, capsys).text
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(body)
    assert not re.search(r"<img|href=|src=|<h1>Title|\x1b", html.replace("&lt;img src=", ""))
    rows = [line for line in body.splitlines() if "p.png" in line and line.startswith("|")]
    assert rows and html.count("p.png") >= 2
    assert training_text(None).startswith("The record")
    told = training_text(
        TRAINED | {"loss": hostile, "command": "specdec fit\n```\n# Title", "cpu": "<b>"}
    )
    assert "<b>" not in told and "](http" not in told and told.count("\n```") == 2
