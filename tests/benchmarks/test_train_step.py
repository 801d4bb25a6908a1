"""The training-step benchmark: one real run on the smallest workload, its arithmetic on made-up numbers."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.report import places
from benchmarks.training_step import floor, recipe
from benchmarks.training_step.agreement import compare, objections
from benchmarks.training_step.command import main
from benchmarks.training_step.measured import Measured
from benchmarks.training_step.report import markdown, to_json
from benchmarks.training_step.results import COLUMNS, Result
from benchmarks.training_step.session import Worker
from benchmarks.training_step.systems import ENTRIES, KEYS, Entry, Group, groups
from benchmarks.training_step.worker import Job
from specdec.training.ttt import supervised

BY_KEY = {entry.key: entry for entry in ENTRIES}


def made_up(key: str, seconds: float, growth: float = 100, losses: tuple[float, ...] = (5.0, 6.0)) -> Measured:
    """A measurement of three steps around ``seconds``."""
    steps = [
        {"seconds": seconds * x, "cpu_seconds": 0.1, "others": 0.0, "peak_mb": 500 + growth, "before_mb": 500}
        for x in (2, 1, 0.5)
    ]
    about = {"trainable": 10, "digest": [1.0], "products": "oneDNN", "versions": {"torch": "2"}, "operations": 10**9}
    warm_up = [{**steps[0]}]
    for step in steps:
        step["peak_mb"] -= 20  # compiling took more
    return Measured(BY_KEY[key], about, [] if key == "floor" else list(losses), warm_up, steps)


def made_up_result(mask: str = "all", **changes: Measured) -> Result:
    """Specdec at 1 s, speculators at 4 s, specforge at 2 s, the floor at half a second."""
    measured = {
        "specdec": made_up("specdec", 1.0, 60),
        "specdec-every": made_up("specdec-every", 0.9, 55, (5.5, 6.5)),
        "speculators": made_up("speculators", 4.0, 90, (5.501, 6.5)),
        "specforge": made_up("specforge", 2.0, 120, (5.0, 6.001)),
        "floor": made_up("floor", 0.5),
    }
    if mask != "all":
        measured["specdec-full"] = made_up("specdec-full", 1.6, losses=(9.0, 9.0))
    measured |= {key.replace("_", "-"): m for key, m in changes.items()}
    return Result.of(Group("T", "float32", mask, ()), list(measured.values()))


def test_a_run_writes_its_table_and_every_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "train_step_here_202601.md"
    command = "--workloads T --dtypes float32 --masks all --systems specdec-eager floor --steps 2 --threads 1"
    arguments = [*command.split(), "--out", str(out)]
    assert main(arguments) == 0
    said = capfd.readouterr().out
    assert "T, float32, all rows supervised" in said and "matrix products alone" in said
    text, data = out.read_text(), json.loads(out.with_suffix(".json").read_text())
    assert "| specdec | eager | in-vocab rows |" in text and "## How to read it" in text
    assert "2 measured steps are fewer than seven" in text
    (group,) = data["groups"]
    ours, matmuls = group["measurements"]
    for one in (ours, matmuls):
        assert [len(one["steps"]), len(one["warm_up"])] == [2, 2]
        assert all(0 < step["seconds"] < 10 and step["cpu_seconds"] > 0 for step in one["steps"])
    assert ours["median_seconds"] > matmuls["median_seconds"]
    assert 1 < ours["growth_mb"] < 300
    assert len(ours["losses"]) == 7 and all(5 < loss < 6 for loss in ours["losses"])  # log 256 is 5.5
    assert ours["trainable"] == 262656
    assert main(arguments) == 2
    assert "exists already" in capfd.readouterr().err.replace("\n", " ")


def test_places_are_beside_each_other_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    assert places(path, force=False) == (path, tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json exists already"):
        places(path, force=False)
    assert places(path, force=True) == (path, tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"must end in \.md"):
        places(tmp_path / "a.txt", force=False)


def test_a_worker_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    job = Job("of_specdec", [], "T", "float32", "all", 1, 0)
    with pytest.raises(ValueError, match=r"specdec: /nowhere/python cannot be run: No such file"):
        Worker("/nowhere/python", BY_KEY["specdec"], job, tmp_path / "log")
    with pytest.raises(ValueError, match=r"^specdec ended: .*cannot access|^specdec ended: ls: .*$"):
        Worker("/bin/ls", BY_KEY["specdec"], job, tmp_path / "log")


@pytest.mark.parametrize("mask", recipe.MASKS)
@pytest.mark.parametrize("name", ["T", "S"])
def test_every_rule_of_masks_means_the_same_rows(mask: str, name: str) -> None:
    size = recipe.WORKLOADS[name]
    answer_1T, documents_1T = recipe.answers(size, mask)[None], torch.zeros(1, size.tokens, dtype=torch.long)
    slots, positions = recipe.slot_mask(size, mask), recipe.taught(size, mask)
    for k in range(size.unroll):
        ours = supervised(answer_1T, documents_1T, k)[0].nonzero()[:, 0].tolist()
        assert ours == [t for t in range(size.tokens - k) if slots[t + k]]  # the peers shift their mask by k
        assert ours == [j - 1 - k for j in positions.tolist() if j >= 1 + k]
    rows = recipe.per_step(size, torch.ones(len(positions)), positions)
    assert rows[3] == len(positions[positions >= 4])
    if mask != "all":
        assert len(positions) == size.tokens // 2


def test_the_same_seed_draws_the_same_and_the_target_means_what_it_should() -> None:
    size = recipe.WORKLOADS["T"]
    weights, data = recipe.draw(size, 3)
    assert recipe.digest(*recipe.draw(size, 3)) == recipe.digest(weights, data) != recipe.digest(*recipe.draw(size, 4))
    everywhere = torch.arange(size.tokens)
    likeliest = recipe.over_positions(data, weights, everywhere, lambda logits: logits.argmax(-1))
    assert torch.equal(likeliest[:-1], data.ids[1:-1])
    inside = recipe.known(data, weights, everywhere)
    assert torch.equal(inside, torch.isin(likeliest, data.draft_ids_D))
    assert 0.85 < inside.float().mean() < 1
    p = (data.final[:1] @ weights.target_head_VH[data.draft_ids_D].T).double().softmax(-1)
    assert recipe.entropies(data, weights, everywhere)[0].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-4)


def test_the_floor_counts_each_product() -> None:
    size = recipe.Workload(16, 8, 4, 2, 12, 40, 10, unroll=2)
    todo = floor.products(size, "all", torch.float32)
    T, H, W, I, V, D = 16, 8, 16, 12, 40, 10  # noqa: E741
    linear = T * H * W + 14 * (H * H + 3 * H * I) + 13 * (H * W + H * H + 3 * H * I)  # all slots once, for their keys
    attention = 6 * 4 * (14 * 14 + 13 * 13) * 2
    rows = 14 + 13
    want = 2 * T * 3 * H * H + 3 * T * H * W + 14 * H * V + 3 * linear + attention + 3 * rows * H * D
    assert todo.operations == 2 * want
    todo()
    a, b, out = todo.todo[-1]
    torch.testing.assert_close(out, a @ b)
    late = floor.needed(size, recipe.taught(size, "half"), 1)
    assert late.tolist() == [position - 2 for position in recipe.taught(size, "half").tolist()]
    half = floor.products(size, "half", torch.float32).operations
    assert half < 0.75 * todo.operations


def test_alike_systems_are_given_ratios() -> None:
    result = made_up_result()
    assert result.objections == []
    assert [(c.key, c.with_key) for c in compare(result.measured)] == [
        ("speculators", "specdec-every"),
        ("specforge", "specdec"),
    ]
    lines = {tuple(line[:2]): line for line in result.lines()}
    assert all(len(line) == len(COLUMNS) for line in lines.values())
    assert lines["specdec", "compiled"][2] == "every row"
    ours = result.lines()[0]
    assert ours[4:] == ["1.000 [0.500, 2.000]", "60", "40", "0.50", "0.50", "2.00"]
    first, second = result.headline()
    assert first.startswith("0.50 of the time and 0.50 of the memory growth of the faster peer, specforge (sdpa); 0.67")
    assert second == "2.00 times the matrix products alone (2 GFLOP/s there)"


def test_half_of_the_rows_is_put_beside_all_of_them() -> None:
    result = made_up_result("half")
    assert result.objections == []  # the fully supervised step has other rows: its losses are not compared
    assert result.headline()[-1] == "0.62 of the time of its step with all rows supervised"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (made_up("specforge", 2.0, losses=(5.0, 6.01)), "specforge and specdec differ by 1.7e-03, more than 1e-03"),
        (made_up("specforge", 2.0, losses=(5.0, math.nan)), "specforge and specdec differ by nan"),
        (
            dataclasses.replace(made_up("specforge", 2.0), about={**made_up("specforge", 1).about, "trainable": 9}),
            "different numbers of parameters: specdec 10, specdec-every 10, speculators 10, specforge 9",
        ),
        (
            dataclasses.replace(made_up("specforge", 2.0), about={**made_up("specforge", 1).about, "digest": [2.0]}),
            "drew different weights or data",
        ),
    ],
)
def test_no_ratio_between_systems_that_differ(changed: Measured, why: str) -> None:
    result = made_up_result(specforge=changed)
    assert len(result.objections) == 1 and why in result.objections[0]
    assert result.lines()[0][7:9] == ["refused", "refused"]
    assert result.headline()[0].startswith("no ratio to a peer") and why in result.headline()[0]
    assert "of the faster peer" not in markdown(about(), {}, [result])
    assert "NaN" not in json.dumps(to_json(about(), [result]))


def test_a_definition_nobody_else_has_is_compared_with_nothing() -> None:
    alone = [made_up("specdec", 1.0), made_up("speculators", 2.0)]
    assert "speculators trains every row and was compared with nothing" in objections(alone, "float32")[0]


def test_bfloat16_may_round() -> None:
    pair = [made_up("specdec", 1.0), made_up("specforge", 2.0, losses=(5.0, 6.03))]
    assert objections(pair, "bfloat16") == [] != objections(pair, "float32")


def test_disturbed_steps_are_named() -> None:
    result = made_up_result()
    result.measured[0].steps[1]["others"] = 0.06
    result.measured[3].steps[0]["others"] = 0.05
    assert result.warnings(7) == ["other processes used more than 5% of the CPU during measured steps of specdec (1)"]
    assert "**Warning**: other processes" in markdown(about(), {"torch": "2"}, [result])


def about() -> dict[str, object]:
    """A run's description."""
    texts = dict.fromkeys(("date", "command", "git_commit", "cpu", "platform", "python"), "x")
    numbers = dict.fromkeys(("cores", "threads", "memory_gb", "warm_up", "steps"), 7)
    return {**texts, **numbers, "git_dirty": True, "load_at_start": [0.0], "load_at_end": [0.0]}


def test_the_plan_leaves_out_what_says_nothing() -> None:
    def keys(group: Group) -> set[str]:
        return {entry.key for entry in group.entries}

    plan = groups(["S"], ["float32", "bfloat16"], ["all", "half"], list(KEYS), peers=True)
    assert [group.mask for group in plan] == ["all", "half", "all", "half"]
    assert keys(plan[0]) == set(KEYS) - {"specdec-full"}
    assert keys(plan[2]) == keys(plan[0]) - {"specdec-plain"}
    assert keys(plan[1]) == {
        "specdec", "specdec-every", "specdec-full", "speculators", "specforge", "specforge-compact", "floor"
    }  # fmt: skip
    assert [plan[1].mask_of(BY_KEY[key]) for key in ("specdec", "specdec-full")] == ["half", "all"]
    (without,) = groups(["S"], ["float32"], ["all"], list(KEYS), peers=False)
    assert not any(entry.peer for entry in without.entries)
    assert groups(["S"], ["float32"], ["all"], ["speculators"], peers=False) == []


def test_entries_have_names_of_their_own() -> None:
    assert len(set(KEYS)) == len(ENTRIES)
    assert all(isinstance(entry, Entry) for entry in ENTRIES)
