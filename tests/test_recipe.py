"""The whole chain in small: a chat target, its own answers, their features, a drafter from these, its evaluation."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specdec.cli import main
from specdec.drafter import load_drafter

STEPS, ROWS = 6, 24
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def question(n: int) -> str:
    return f"Tom has {n} apples and eats one. How many has he?"


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions and answers as GSM8K writes its rows."""
    rows = [
        {"question": question(n), "answer": f"Tom has fewer.\n#### {n % 3}"} for n in range(240)
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.chdir(tmp_path)
    return path


def fitted(target: Path, answers: Path, out: str, *more: str) -> list[float]:
    """The losses of a short run."""
    config = f"""
model: {{target: {{source: {target}}}, drafter: {{draft_vocab_size: 200, aux_layers: [1, 3, 5]}}, ttt_steps: 3}}
data: {{class_path: ChatData, init_args: {{train: {answers}, seq_len: 96, batch_size: 4, val_fraction: 0.2}}}}
trainer: {{max_steps: {STEPS}, log_every_n_steps: 1, accelerator: cpu, enable_model_summary: false}}
acceptance: {{max_new_tokens: 8, count: 2}}
"""
    Path("run.yaml").write_text(config)
    assert main(["fit", "--config", "run.yaml", "--out", out, *more]) == 0
    with next(Path(out).glob("csv/*/metrics.csv")).open() as stream:
        losses = [
            float(row["train/loss"]) for row in csv.DictReader(stream) if row.get("train/loss")
        ]
    assert len(losses) == STEPS
    return losses


def test_from_conversations_to_an_evaluated_drafter(
    sums: Path, tmp_path: Path, target_directory: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    target = shutil.copytree(target_directory, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    asked = [
        "--target",
        str(target),
        "--data",
        str(sums),
        "--limit",
        str(ROWS),
        "--max_new_tokens",
        "24",
    ]
    assert main(["regenerate", *asked, "--truncated", "keep", "--out", str(answers)]) == 0
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == [question(n) for n in range(ROWS)]
    on_the_fly = fitted(
        target, answers, "fly", "--model.features", "OnTheFly", "--model.features.rows", "1"
    )
    assert main(["cache", "--config", "run.yaml", "--out", "features"]) == 0
    cached = fitted(
        target,
        answers,
        "cached",
        "--model.features",
        "Cached",
        "--model.features.directory",
        "features",
    )
    assert cached == on_the_fly
    load_drafter(Path("cached/drafter"))
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text(
        "".join(json.dumps({"turns": [question(n)], "question_id": n}) + "\n" for n in (240, 241))
    )
    judged = [
        "--target",
        str(target),
        "--drafter",
        "cached/drafter",
        "--prompts",
        str(prompts),
        "--shape",
        "chain:depth=2",
    ]
    assert (
        main(
            [
                "evaluate",
                *judged,
                "--max_new_tokens",
                "16",
                "--compile",
                "off",
                "--out",
                "evaluated",
            ]
        )
        == 0
    )
    (result,) = json.loads(Path("evaluated/metrics.json").read_text())["results"]
    assert result["identical_outputs"] == result["compared_outputs"] == 2
