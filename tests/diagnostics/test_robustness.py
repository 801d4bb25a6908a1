"""``specdec robustness``: decoding under conditions, what is kept of acceptance, and the command's files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.cli import main
from specdec.decoding import Chain
from specdec.diagnostics import robustness as module
from specdec.diagnostics.conditions import CleanRun, parse_conditions
from specdec.diagnostics.robustness import CLEAN as UNDISTURBED
from specdec.diagnostics.robustness import (
    ConditionRun,
    Counts,
    counts,
    decode_runs,
    kept_figures,
    planned_run,
    record,
)
from specdec.evaluation.benchmark import benchmark
from specdec.evaluation.compare import compare_answers
from specdec.evaluation.metrics import answer_warnings
from specdec.evaluation.prompts import Prompt
from specdec.report.plots import figure_files
from specdec.utils.reading import SUMS
from tests.diagnostics.chat_target import CHAT, OWN, RAW, ChatPair, clean_run, copycat, pair
from tests.evaluation.made import answer, clustered

CLEAN: Counts = {"a": (30, 10), "b": (20, 10), "c": (7, 1)}
PROMPTS = [CHAT, RAW, OWN]
EVERY = [
    "no_bos", "no_template", "template:family=gemma", "system:text=short", "language:code=zh",
    "context:tokens=60", "temperature:value=1.0", "noise_hidden:alpha=1.0",
    "noise_embedding:alpha=1.0",
]  # fmt: skip
ON_FILE = [
    "no_template",
    "system:text=short",
    "noise_hidden:alpha=0",
    "noise_hidden:alpha=1",
    "context:tokens=9999",
]


@pytest.fixture(scope="module")
def chat() -> ChatPair:
    return pair()


def outcomes(
    one: ChatPair, clean: CleanRun, texts: Sequence[str], **how: Any
) -> list[ConditionRun]:
    runs = [planned_run(condition, clean) for condition in (UNDISTURBED, *parse_conditions(texts))]
    decode_runs(clean, one.drafter, Chain(3), runs, **how)
    return runs


def counted(outcome: ConditionRun) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.prompt_id, one.accepted) for one in outcome.answers]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the benchmark was asked for."""
    seen: list[dict[str, Any]] = []

    def spy(*args: Any, **how: Any) -> Any:
        seen.append(how)
        return benchmark(*args, **how | ({"plain": True} if seen[0] == {"plain": True} else {}))

    monkeypatch.setattr(module, "benchmark", spy)
    return seen


def test_every_condition_is_lossless(chat: ChatPair, calls: list[dict[str, Any]]) -> None:
    calls.append({"plain": True})
    found = outcomes(chat, clean_run(chat.target, PROMPTS, new=4), EVERY, batch=2)
    assert len(found) == 1 + len(EVERY) and all(one.skipped is None for one in found)
    for one in found:
        turns = {prompt.prompt_id: len(prompt.turns or [""]) for prompt in one.prompts}
        assert len(one.answers) == sum(turns.values()) and all(
            answer.identical is True for answer in one.answers
        )
        assert set(turns) | set(one.left_out) == {"chat", "raw", "own"} and not set(turns) & set(
            one.left_out
        )


@pytest.mark.slow
def test_noise_hurts_what_is_read_whatever_the_batch() -> None:
    one = copycat()
    texts = [
        "noise_embedding:alpha=0.3",
        "noise_hidden:alpha=9",
        "noise_embedding:alpha=0",
        "temperature:value=1.0",
    ]
    clean = clean_run(one.target, PROMPTS, new=6)
    alone, together = (outcomes(one, clean, texts, batch=batch, seed=4) for batch in (1, 3))
    assert [counted(each) for each in alone] == [counted(each) for each in together]
    assert all(accepted == 3 for each in alone[0].answers for accepted in each.accepted)
    lengths = [sum(map(sum, (each.accepted for each in own.answers))) for own in alone]
    assert 0 < lengths[1] < lengths[0]
    assert counted(alone[2]) == counted(alone[3]) == counted(alone[0])


def test_what_is_decoded(
    chat: ChatPair, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer long texts side by side; nothing of what cannot be measured; no prompt whose later turn does not fit."""
    monkeypatch.setattr(module, "SLOTS", 60)
    texts = ["context:tokens=40", "context:tokens=300", "no_template"]
    found = outcomes(chat, clean_run(chat.target, [RAW]), texts, batch=8)
    assert [call["batch"] for call in calls] == [8, 7, 1]
    assert found[3].skipped and found[3].answers == []
    long = Prompt("long", None, ["a", "b" * 380], None, None)
    found = outcomes(chat, clean_run(chat.target, [long, CHAT]), ["context:tokens=100"])
    assert [{one.prompt_id for one in each.answers} for each in found] == [
        {"long", "chat"},
        {"chat"},
    ]
    assert "exceed the target's 512 positions" in found[1].left_out["long"]


def test_shares_by_hand_on_the_prompts_of_both() -> None:
    assert counts([answer("a", (2, 0)), answer("b", ()), answer("a", (3,))]) == {
        "a": (8, 3),
        "b": (0, 0),
    }
    # 1.5 and 2.5 tokens a pass
    found = kept_figures({"a": (20, 10), "b": (10, 10), "c": (0, 0), "d": (9, 1)}, CLEAN)
    assert found["measured_prompts"] == 2 and found["acceptance_length"]["mean"] == 1.5
    assert found["length_kept"]["mean"] == pytest.approx(1.5 / 2.5)
    assert found["drafts_kept"]["mean"] == pytest.approx(0.5 / 1.5)
    never = kept_figures({"a": (10, 10), "b": (10, 10)}, CLEAN)
    assert never["drafts_kept"] == {"mean": 0, "low": 0, "high": 0}
    assert never["length_kept"]["mean"] == pytest.approx(1 / 2.5)
    same = kept_figures(CLEAN, CLEAN)
    assert same["length_kept"] == same["drafts_kept"] == {"mean": 1, "low": 1, "high": 1}


def test_the_intervals_are_those_of_compare_and_absent_where_no_value_is_left_without_a_prompt() -> (
    None
):
    clean, under = clustered(np.random.default_rng(0), 20, better=0.1)
    found = kept_figures(counts(under), counts(clean))["length_kept"]
    assert tuple(found.values()) == pytest.approx(
        tuple(compare_answers(clean, under).ratio), abs=2e-3
    )
    none = {"a": (10, 10), "b": (10, 10)}
    assert (
        kept_figures(none, none)["drafts_kept"] is None
        and kept_figures(none, none)["length_kept"] is not None
    )
    assert kept_figures({}, CLEAN)["length_kept"] is None
    lonely = kept_figures({"a": (20, 10), "b": (10, 10)}, {"a": (30, 10), "b": (10, 10)})[
        "drafts_kept"
    ]
    assert lonely["low"] is None  # without a there is nothing to keep
    rare: Counts = {"a": (30, 10), "b": (30, 10)} | {f"z{n}": (10, 10) for n in range(4)}
    assert kept_figures(dict.fromkeys(rare, (10, 10)), rare)["drafts_kept"] == {
        "mean": 0,
        "low": 0,
        "high": 0,
    }


def test_answers_that_loop_under_a_condition_are_told() -> None:
    clean, other = (ConditionRun(one) for one in parse_conditions(["no_bos", "no_system"]))
    for run in (clean, other):
        run.prompts = [Prompt(name, None, None, None, "a") for name in "ab"]
        run.answers = [answer("a", (3, 3), loops=run is other), answer("b", (1, 1))]
    _, row = record([clean, other])["conditions"]
    assert (row["looping_answers"], row["looping_share"]) == (1, 0.5)
    assert answer_warnings("no_system", row) == [
        "no_system: 50% of the answers repeat themselves, which is easy to draft: acceptance length 3.00, without them "
        "2.00"
    ]


@pytest.fixture
def line(target_directory: Path, drafter_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "p.txt").write_text("def add(a, b):\ndef add_3(\nreturn a\n")
    return [
        "robustness", "--target", str(target_directory), "--drafter", str(drafter_directory), "--prompts",
        str(tmp_path / "p.txt"), "--shape", "chain:depth=2", "--max_new_tokens", "6", "--conditions", *ON_FILE,
    ]  # fmt: skip


def test_one_drafter(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*line, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "robustness.json",
        "report.md",
        *figure_files("robustness.png"),
        SUMS,
    }
    found = json.loads((out / "robustness.json").read_text())
    assert (found["version"], found["clean"], found["prompts"]) == (
        1,
        "clean",
        ["line-1", "line-2", "line-3"],
    )
    by_name = {one["name"]: one for one in found["conditions"]}
    assert list(by_name) == ["clean", *ON_FILE]
    for one in found["conditions"]:
        assert len(one["committed"]) == len(one["passes"]) == 3
        if one["skipped"] is None:
            assert all(c >= p > 0 for c, p in zip(one["committed"], one["passes"], strict=True))
        else:
            assert one["committed"] == one["passes"] == [0, 0, 0] and one["length_kept"] is None
    assert by_name["no_template"]["skipped"] == "the condition changes no prompt"
    assert by_name["context:tokens=9999"]["skipped"].endswith("exceed the target's 256 positions")
    assert by_name["noise_hidden:alpha=0"]["committed"] == by_name["clean"]["committed"]
    under, clean = (
        dict(zip(found["prompts"], zip(one["committed"], one["passes"], strict=True), strict=True))
        for one in (by_name["system:text=short"], by_name["clean"])
    )
    assert kept_figures(under, clean).items() <= by_name["system:text=short"].items()
    assert (
        found["drafter"]["made_for_this_target"] is True
        and found["settings"]["shape_config"]["depth"] == 2
    )
    report = (out / "report.md").read_text()
    assert "| no_template | the condition changes no prompt |" in report
    assert "| system:text=short |" in report and "take at least 10" in report
    shown = capsys.readouterr().out
    assert "noise_hidden:alpha=1" in shown and "context:tokens=9999" in shown
    assert main([*line, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--conditions", "dark"], "expected one of no_bos"),
        (["--shape", "bush"], "bush"),
        (["--batch_size", "0"], "batch_size"),
        (["--seed", "-1"], "seed"),
        (["--max_new_tokens", "999"], "positions"),
    ],
)
def test_wrong_input_leaves_nothing(
    line: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    message: str,
) -> None:
    before = set(tmp_path.rglob("*"))
    assert main([*line, *extra, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert set(tmp_path.rglob("*")) == before
