"""Paired comparison of answers, and ``specdec compare`` from the directories to the text."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.cli import main
from specdec.data.regions import CALL, CODE, TEXT
from specdec.evaluation import compare
from specdec.evaluation.compare import compare_answers
from specdec.evaluation.metrics import Answer, acceptance_length, write_answers
from tests.evaluation.made import answer, clustered

A = [answer("p", (1, 0)), answer("q", (2,)), answer("r", (0, 0, 1)), answer("q", (3, 0))]
B = [answer("q", (3, 3)), answer("p", (1, 1)), answer("r", (1, 0)), answer("q", (0,))]


def length(answers: list[Answer]) -> float:
    return 1 + sum(sum(one.accepted) for one in answers) / sum(len(one.accepted) for one in answers)


def test_a_comparison_by_hand() -> None:
    found = compare_answers(A, B)
    assert (found.prompts, found.a, found.b) == (3, length(A), length(B))
    assert found.difference.mean == pytest.approx(length(B) - length(A))
    assert found.ratio.mean == pytest.approx(length(B) / length(A))
    assert compare_answers([*A, answer("s", ())], [*B, answer("s", ())]).prompts == 3
    for other in ([], B[:1]):
        with pytest.raises(ValueError, match="takes at least 2"):
            compare_answers(A, other)


def test_the_p_value_is_that_of_every_relabelling() -> None:
    observed, reached = abs(length(B) - length(A)), 0
    for swapped in itertools.product((False, True), repeat=3):
        of = dict(zip("pqr", swapped, strict=True))
        one = [x for x in A if not of[x.prompt_id]] + [x for x in B if of[x.prompt_id]]
        two = [x for x in B if not of[x.prompt_id]] + [x for x in A if of[x.prompt_id]]
        reached += abs(length(two) - length(one)) >= observed - 1e-12
    assert compare_answers(A, B).p_value == reached / 8


def test_a_comparison_is_symmetrical_and_equal_answers_do_not_differ() -> None:
    one, two = clustered(np.random.default_rng(3), 40, better=0.05)
    there, back = compare_answers(one, two), compare_answers(two, one)
    assert there.p_value == back.p_value
    assert (there.difference.low, there.difference.high) == pytest.approx(
        (-back.difference.high, -back.difference.low)
    )
    assert there.ratio.mean == pytest.approx(1 / back.ratio.mean)
    found = compare_answers(one, one[::-1])
    assert found.difference == (0.0, 0.0, 0.0) and found.p_value == 1.0


def test_pairing_sees_what_unpaired_intervals_do_not() -> None:
    """Prompts differ by far more than the drafters do."""
    one, two = clustered(np.random.default_rng(5), 60, better=0.06)
    found = compare_answers(one, two)
    assert 0 < found.difference.low < 0.3 < found.difference.high and found.p_value < 0.01
    alone = [acceptance_length(answers) for answers in (one, two)]
    assert alone[0].high > alone[1].low and alone[0].mean == found.a


def test_without_a_difference_it_is_seen_as_seldom_as_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "RELABELLINGS", 400)
    generator, trials = np.random.default_rng(0), 300
    found = [compare_answers(*clustered(generator, 20)) for _ in range(trials)]
    assert 0.02 <= sum(each.p_value < 0.05 for each in found) / trials <= 0.09
    assert (
        0.89
        <= sum(each.difference.low <= 0 <= each.difference.high for each in found) / trials
        <= 0.98
    )


ONE, TWO = clustered(np.random.default_rng(0), 12, better=0.1)
SETTINGS = {
    "source": "x", "dtype": "float32", "max_new_tokens": 64, "prompts": ["a.jsonl"], "prompts_sha256": "1",
    "torch_threads": 2,
}  # fmt: skip
Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An evaluation's directory."""

    def made(
        name: str,
        shapes: dict[str, list[Answer]],
        target: str = "t",
        drafter: str = "d",
        **changes: Any,
    ) -> str:
        out = tmp_path / name
        out.mkdir()
        results = [{"shape": shape} for shape in shapes]
        metrics = {
            "results": results,
            "target": {"fingerprint": target},
            "settings": SETTINGS | changes,
        }
        metrics["drafter"] = {"weights_sha256": drafter}
        (out / "metrics.json").write_text(json.dumps(metrics))
        write_answers(out / "answers.jsonl", list(shapes), list(shapes.values()))
        return str(out)

    return made


def test_two_runs(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    a = make("a", {"chain of 5": ONE, "only A's": ONE})
    b = make("b", {"chain of 5": TWO}, source="y", prompts=["b.jsonl"], torch_threads=9)
    assert main(["compare", a, b]) == 0
    shown, found = capsys.readouterr().out, compare_answers(ONE, TWO)
    assert f"A {found.a:.3f}, B {found.b:.3f}" in shown and "chain of 5, 12 prompts" in shown
    assert (
        f"+{found.difference.mean:.3f} [+{found.difference.low:.3f}, +{found.difference.high:.3f}]"
        in shown
    )
    assert f"p = {found.p_value:.2g}" in shown and "only A's" not in shown
    assert main(["compare", b, a]) == 0
    shown = capsys.readouterr().out
    assert f"{-found.difference.mean:.3f} [-" in shown


def test_runs_of_agents_are_compared_by_region(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """B accepts more in calls alone; of code there is one prompt, which says nothing."""
    where = (TEXT, CALL, CALL, TEXT)
    a = [answer(name, (1, 0, 1, 2), regions=where) for name in "pqr"]
    b = [answer(name, (1, 3, 2, 2), regions=where) for name in "pqr"]
    a.append(answer("s", (1, 1), regions=(TEXT, CODE)))
    b.append(answer("s", (1, 0), regions=(TEXT, CODE)))
    runs = [make(name, {"chain of 3": answers}) for name, answers in (("a", a), ("b", b))]
    assert main(["compare", *runs]) == 0
    shown = capsys.readouterr().out
    calls = compare_answers(
        [answer(name, (0, 1)) for name in "pqr"], [answer(name, (3, 2)) for name in "pqr"]
    )
    assert (
        f"tool call, 3 prompts: A 1.500, B 3.500, B - A +2.000 [+2.000, +2.000], p = {calls.p_value:.2g}"
        in shown
    )
    assert "text,      4 prompts: A 2.429, B 2.429, B - A +0.000" in shown
    assert "code," not in shown and "thought," not in shown and "exploratory" in shown
    plain = [make(f"plain {name}", {"chain of 3": TWO}) for name in "ab"]
    assert main(["compare", *plain]) == 0
    assert "region" not in capsys.readouterr().out


def test_one_drafter_and_two_verifiers(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (
        make("a", {"chain": ONE}),
        make("b", {"chain": TWO}, "another", dtype="bfloat16", revision="x"),
    )
    assert main(["compare", a, b]) == 0
    assert f"p = {compare_answers(ONE, TWO).p_value:.2g}" in capsys.readouterr().out


def test_suites_are_compared_one_by_one_and_loops_are_told(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    looping = [one._replace(loops=n < 3) for n, one in enumerate(TWO)]
    for name, answers in (("a", ONE), ("b", looping)):
        (tmp_path / name).mkdir()
        for part in ("gsm8k-t0", "gsm8k-t1", *(["mbpp-t0"] if name == "a" else [])):
            make(f"{name}/{part}", {"chain": answers})
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    told = capsys.readouterr().out
    found = compare_answers(ONE, TWO)
    assert [f"gsm8k-t{t}, chain, 12 prompts" in told for t in (0, 1, 2)] == [True, True, False]
    assert told.count(f"p = {found.p_value:.2g}") == 2
    without = acceptance_length([one for one in looping if not one.loops])
    assert "B: 25% of the answers repeat themselves" in told and "A: " not in told
    assert f"acceptance length {found.b:.2f}, without them {without.mean:.2f}" in told
    assert "in one of the two alone, and not compared: mbpp-t0" in caplog.text
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "b" / "gsm8k-t0")]) == 2
    assert "share no suite (gsm8k-t0, gsm8k-t1 and none in folders)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"target": "u", "drafter": "e"},
            r"differ in their target (its weights or configuration) and their drafter",
        ),
        ({"target": "u", "max_new_tokens": 128}, "differ in max_new_tokens: 64 and 128"),
        ({"max_new_tokens": 128}, "differ in max_new_tokens: 64 and 128"),
        ({"thinking": False}, "differ in thinking: None and False"),
        ({"prompts_sha256": "2"}, "differ in their prompts"),
        ({"shapes": {"chain": TWO[:-1]}}, "differ in the prompts that were left out"),
        ({"shapes": {"tree": TWO}}, "share no draft shape (chain and tree)"),
        ({"shapes": {}}, "it holds no result"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    make: Make, capsys: pytest.CaptureFixture[str], other: dict[str, Any], message: str
) -> None:
    runs = [make("a", {"chain": ONE}), make("b", **{"shapes": {"chain": TWO}} | other)]
    assert main(["compare", *runs]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_what_is_no_evaluation_is_refused(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("a", {"chain": ONE})
    Path(run, "answers.jsonl").unlink()
    assert main(["compare", run, run]) == 2
    assert "answers.jsonl: no such file" in capsys.readouterr().err
    Path(run, "metrics.json").write_text("{}")
    assert main(["compare", run, run]) == 2
    assert "not written by specdec evaluate, without 'results'" in capsys.readouterr().err
