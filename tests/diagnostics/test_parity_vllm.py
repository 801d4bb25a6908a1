"""``specdec parity --engine vllm`` beside a stand-in; tests/engines/test_vllm.py has the real vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.diagnostics.parity import PROMPTS
from specdec.drafter import Drafter, DrafterSpec, ScalarMix, load_drafter, save_drafter
from specdec.engines.proposals import RecordedAnswer
from specdec.export.formats import DRAFT_TOKENS
from specdec.target import Target
from tests.diagnostics.conftest import SMALL
from tests.diagnostics.recorded import recorded_answers, with_draft
from tests.export.made import made_drafter

TOKENS = 8
ENGINE = ["--engine", "vllm"]


def write_answers(folder: Path, answers: list[RecordedAnswer]) -> None:
    made: list[dict[str, Any]] = []
    for answer in answers:
        made.append(
            {"ids": answer.ids, "passes": [recorded._asdict() for recorded in answer.passes]}
        )
    (folder / "answer.json").write_text(json.dumps({"answers": made}))


def sound_answers(target: Target, drafter: Drafter) -> list[RecordedAnswer]:
    prompts = [target.tokenizer(text)["input_ids"] for text in PROMPTS]
    return recorded_answers(target, drafter, prompts, TOKENS + DRAFT_TOKENS, DRAFT_TOKENS)


def test_every_proposal_is_compared(
    line: list[str],
    target_directory: Path,
    tmp_path: Path,
    fake_proposals: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = Target.load(target_directory)
    answers = sound_answers(target, load_drafter(tmp_path / "drafter"))
    write_answers(fake_proposals, answers)
    assert (
        main([*line, *ENGINE, "--out", str(tmp_path / "out"), "--", "--max-model-len", "64"]) == 0
    )
    printed = capsys.readouterr().out
    assert "what vLLM 0.0.fake (V1 model runner) proposes and what this drafter says" in printed
    last = printed.splitlines()[-1]
    assert f"vLLM 0.0.fake (V1 model runner) agree on all {3 * 11 * 3} proposals" in last
    assert f"of {3 * 11 * 3} depend on more than the last token" in last
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["holds"] and report["engine"]["holds"] and report["engine"]["tokens"] == 3 * 11
    assert report["engine"]["probes"][0]["fault"] == "attention limited to the current token"
    (job,) = json.loads((fake_proposals / "jobs.json").read_text())
    assert job["tokens"] == TOKENS + DRAFT_TOKENS and len(job["prompts"]) == 3
    assert job["serve"][-4:] == ["--dtype", "float32", "--max-model-len", "64"]
    speculative = json.loads(job["serve"][job["serve"].index("--speculative-config") + 1])
    assert (speculative["method"], speculative["num_speculative_tokens"]) == (
        "eagle3",
        DRAFT_TOKENS,
    )

    write_answers(
        fake_proposals,
        [with_draft(answers[0], 4, 2, (answers[0].passes[4].drafts[2] + 1) % 300), *answers[1:]],
    )
    assert main([*line, *ENGINE]) == 1
    printed = capsys.readouterr().out
    assert "the first differences" in printed
    assert printed.splitlines()[-1] == "NOT THE SAME: 1 of 99 proposals are not this drafter's"

    unknown = next(
        token
        for token in range(300)
        if token not in set(load_drafter(tmp_path / "drafter").vocab.target_ids_D.tolist())
    )
    write_answers(fake_proposals, [with_draft(answers[0], 4, 2, unknown), *answers[1:]])
    assert main([*line, *ENGINE, "--out", str(tmp_path / "unknown")]) == 1
    report = json.loads((tmp_path / "unknown" / "parity.json").read_text())
    assert report["engine"]["differences"][0]["margin"] is None


@pytest.mark.slow
def test_few_proposals_are_no_verdict(
    line: list[str],
    target_directory: Path,
    tmp_path: Path,
    fake_proposals: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = Target.load(target_directory)
    answers = sound_answers(target, load_drafter(tmp_path / "drafter"))
    write_answers(fake_proposals, [answer._replace(passes=answer.passes[:5]) for answer in answers])
    assert main([*line, *ENGINE, "--out", str(tmp_path / "out")]) == 1
    assert (
        "NO VERDICT: no proposal differs, but only 45 were compared, and 50 are needed"
        in capsys.readouterr().out
    )
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert not report["holds"] and not report["engine"]["holds"] and report["engine"]["no_verdict"]


@pytest.mark.slow
def test_a_design_is_made_and_checked(
    target_directory: Path, fake_proposals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target.load(target_directory)
    write_answers(
        fake_proposals, sound_answers(target, loud_drafter(target, loud_spec(target, "eagle3")))
    )
    argv = ["parity", "--target", str(target_directory), *SMALL, "--design", "eagle3", *ENGINE]
    assert main(argv) == 0
    assert "PASS: training, decoding and vLLM" in capsys.readouterr().out.splitlines()[-1]


def test_what_vllm_refuses_is_told(
    line: list[str], fake_proposals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake_proposals / "answer.json").write_text('{"refused": "ValueError: no room"}')
    assert main([*line, *ENGINE]) == 2
    seen = capsys.readouterr()
    assert "vLLM refuses: ValueError: no room" in seen.err.splitlines()[-1]
    assert "training and export" in seen.out  # what was compared before is shown


def test_what_is_not_servable_is_not_served(
    target_directory: Path, tmp_path: Path, fake_proposals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = made_drafter(
        DrafterSpec(ScalarMix(), draft_vocab_size=200), Target.load(target_directory)
    )
    save_drafter(drafter, tmp_path / "sum")
    argv = ["parity", "--target", str(target_directory), "--drafter", str(tmp_path / "sum"), *SMALL]
    assert main([*argv, *ENGINE]) == 1
    printed = capsys.readouterr().out
    assert (
        "fusion ScalarMix: states are concatenated" in printed
        and "training and export" not in printed
    )
    assert "NOT SERVED" in printed and not (fake_proposals / "jobs.json").exists()


def test_mistakes_are_one_line(
    line: list[str], fake_proposals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [word for word in line if word not in line[3:5]]
    for argv, message in (
        (
            [*line, "--draft_tokens", "5"],
            "--draft_tokens would go to an engine, and none is asked without --engine",
        ),
        ([*line, "--", "--enforce-eager"], "flags after -- would go to an engine"),
        ([*line, *ENGINE, "--", "--dtype=half"], "--dtype after -- is not passed on"),
        ([*line, *ENGINE, "--", "--model=x"], "--model after -- is not passed on"),
        ([*line, *ENGINE, "--target.dtype", "float64"], "--engine vllm has no float64"),
        ([*line, "--design", "eagle3"], "give either --drafter DIR or --design PRESET, not both"),
        (bare, "give either --drafter DIR or --design PRESET, not both"),
        ([*bare, "--design", "eagle9"], "no preset 'eagle9'"),
        (
            [*bare, "--design", "eagle3", "--exported", "."],
            "--exported is of a drafter that you have",
        ),
    ):
        assert main(argv) == 2
        assert message in capsys.readouterr().err.splitlines()[-1], argv
