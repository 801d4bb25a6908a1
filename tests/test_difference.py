"""What differs, in the parts' own terms."""

import dataclasses
import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli import main
from specdec.compose import compose
from specdec.drafter import DrafterSpec, Norms, save
from tests.tiny import presets, tiny_drafter

CONF = Path(__file__).parents[1] / "conf"
GENERATIONS = ("eagle1", "eagle2", "eagle3", "eagle3_1")


@pytest.fixture(autouse=True)
def bare_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.chdir(tmp_path)


def diff(capsys: pytest.CaptureFixture[str], one: Path | str, two: Path | str) -> list[list[str]]:
    """The columns of every line."""
    status = main(["diff", str(one), str(two)])
    out = capsys.readouterr().out
    assert status == int(out != "no difference\n")
    return [line.split("  ") for line in out.splitlines()] if status else []


def columns(rows: list[list[str]]) -> list[tuple[str, ...]]:
    return [tuple(cell.strip() for cell in row if cell.strip()) for row in rows]


def write(name: str, value: Any) -> Path:
    path = Path(name)
    path.write_text(yaml.safe_dump(value))
    return path


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """The generations as tiny saved drafters."""
    return {name: save(tiny_drafter(spec), tmp_path / name) for name, spec in presets().items()}


@pytest.mark.parametrize(("one", "two"), list(combinations(GENERATIONS, 2)))
def test_the_generations_are_a_handful_of_lines_apart(one: str, two: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = diff(capsys, f"conf/drafter/{one}.yaml", f"conf/drafter/{two}.yaml")
    assert len(rows) <= 5  # and one more for how they are trained
    assert {row[0] for row in rows} <= {"fusion", "entry", "norms", "norms.aux", "recurrence", "head"}
    if (one, two) != ("eagle1", "eagle2"):
        assert rows


def test_two_generations_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert columns(diff(capsys, "conf/drafter/eagle3.yaml", "conf/drafter/eagle3_1.yaml")) == [
        ("norms.aux", "none", "each"),
        ("recurrence", "PreNorm", "PostNorm"),
    ]
    assert main(["diff", "conf/drafter/eagle1.yaml", "conf/drafter/eagle3.yaml"]) == 1
    assert capsys.readouterr().out == (
        "fusion  LastLayer                       Concat\n"
        "entry   Narrow(bias=no)                 Wide\n"
        "norms   embed no, hidden no, output no  embed yes, hidden yes, output yes\n"
        "head    target, draft_vocab_size all    own, draft_vocab_size 32000\n"
    )


def test_spellings_and_defaults_make_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    long = {"fusion": {"class_path": "specdec.drafter.fusion.Concat", "init_args": {}}}
    assert diff(capsys, write("long.yaml", long), CONF / "drafter" / "eagle3_1.yaml") == []
    assert diff(capsys, write("alias.yaml", {"fusion": "specdec.drafter.Concat"}), "long.yaml") == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"entry": {"class_path": "Narrow", "init_args": {"bias": False}}}, ("entry", "Wide", "Narrow(bias=no)")),
        ({"aux_layers": [1, 2]}, ("aux_layers", "default", "[1, 2]")),
        ({"draft_vocab_size": 100}, ("head.draft_vocab_size", "32000", "100")),
        ({"num_layers": 2}, ("dimensions.num_layers", "1", "2")),
        (
            {"num_layers": 2, "hidden_size": 8},
            ("dimensions", "num_layers 1, hidden_size target", "num_layers 2, hidden_size 8"),
        ),
    ],
)
def test_what_a_design_can_differ_in(
    change: dict[str, Any], line: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert columns(diff(capsys, write("a.yaml", {"head": "own"}), write("b.yaml", change))) == [line]


def test_saved_drafters_differ_in_weights_and_target(
    saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(capsys, saved["eagle3"], saved["eagle3"]) == []
    again = save(tiny_drafter(presets()["eagle3"], seed=1), Path("again"))
    assert columns(diff(capsys, saved["eagle3"], again)) == [("the weights differ; no other difference",)]
    stored = json.loads((again / "config.json").read_text())
    stored["drafter"]["target"] = {"source": "other"}
    (again / "config.json").write_text(json.dumps(stored))
    assert columns(diff(capsys, saved["eagle3"], again)) == [
        ("the weights differ",),
        ("target.source", "tiny", "other"),
    ]
    head, *rows = columns(diff(capsys, saved["eagle1"], saved["eagle3_1"]))
    assert head == ("the weights differ",)
    assert [row[0] for row in rows] == ["fusion", "entry", "norms", "recurrence", "head", "aux_layers"]
    assert rows[4:6] == [
        ("head", "target, draft_vocab_size 61", "own, draft_vocab_size 40"),
        ("aux_layers", "[7]", "[2, 3, 4]"),
    ]


def test_a_preset_and_a_saved_drafter_are_compared_by_design(
    saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("eagle1", "eagle3", "eagle3_1"):
        size = {} if name == "eagle1" else {"draft_vocab_size": 40}
        preset = write("p.yaml", {**yaml.safe_load((CONF / "drafter" / f"{name}.yaml").read_text()), **size})
        assert diff(capsys, preset, saved[name]) == []
        assert diff(capsys, saved[name], preset) == []
    # a target with fewer tokens than the design asks for is taken whole
    assert columns(diff(capsys, CONF / "drafter" / "eagle3.yaml", saved["eagle3"])) == [
        ("head.draft_vocab_size", "61", "40")
    ]
    assert columns(
        diff(
            capsys,
            saved["eagle3"],
            write(
                "p.yaml",
                {
                    "hidden_size": 8,
                    "draft_vocab_size": 40,
                    "norms": dataclasses.asdict(Norms()),
                    "recurrence": "PreNorm",
                    "aux_layers": [1],
                },
            ),
        )
    ) == [
        ("aux_layers", "[2, 3, 4]", "[1]"),
        ("dimensions.hidden_size", "32", "8"),
    ]


def test_a_saved_drafter_of_a_stranger_can_be_looked_at(
    saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads((saved["eagle3"] / "config.json").read_text())
    stored["drafter"]["fusion"] = {"class_path": "stranger.Blend", "init_args": {"n": 2}}
    (saved["eagle3"] / "config.json").write_text(json.dumps(stored))
    rows = columns(diff(capsys, saved["eagle3_1"], saved["eagle3"]))
    assert rows[1] == ("fusion", "Concat", "Blend(n=2)")
    assert "stranger" not in sys.modules


def test_runs_differ_in_their_training_too(capsys: pytest.CaptureFixture[str]) -> None:
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    model = {"drafter": "conf/drafter/eagle3.yaml", "ttt_steps": 1, "step_decay": 0.8, "optimizer": sgd}
    one = write("one.yaml", {"model": model, "seed_everything": 0, "out": "x"})
    two = {
        "model": {
            "drafter": dict(yaml.safe_load((CONF / "drafter" / "eagle3_1.yaml").read_text())),
            "ttt_steps": 7,
            "step_decay": 0.5,
            "optimizer": {**sgd, "init_args": {"lr": 0.5}},
            "target": {"source": "elsewhere"},
            "schedule": {"warmup": 0.5},
        },
        "data": {"class_path": "specdec.embedded.datamodule.EmbeddedData", "init_args": {"seq_len": 64}},
        "trainer": {"max_steps": 3},
        "seed_everything": 1,
        "out": "y",
    }
    rows = columns(diff(capsys, one, write("two.yaml", two)))
    assert [row[0] for row in rows] == [
        "norms.aux",
        "recurrence",
        "target.source",
        "optimizer.lr",
        "schedule.warmup",
        "training",
        "data.seq_len",
        "trainer",
    ]
    lines = {row[0]: row[1:] for row in rows}
    assert lines["training"] == ("ttt_steps 1, step_decay 0.8", "ttt_steps 7, step_decay 0.5")
    assert lines["trainer"] == ("max_steps -1, seed_everything 0", "max_steps 3, seed_everything 1")
    assert diff(capsys, "two.yaml", "two.yaml") == []


def test_a_run_directory_is_its_config_and_its_weights(
    saved: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, drafter, steps in (("one", "eagle3", 3), ("two", "eagle3_1", 3)):
        Path(name).mkdir()
        write(f"{name}/config.yaml", {"trainer": {"max_steps": steps}, "out": name})
        saved[drafter].rename(Path(name, "drafter"))
    assert columns(diff(capsys, "one", "two")) == [("the weights differ; no other difference",)]
    assert main(["diff", "--json", "one", "two"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["same_weights"] is False and told["differences"] == []
    config = write("plain.yaml", {"trainer": {"max_steps": 4}})
    assert columns(diff(capsys, "one", config)) == [("trainer.max_steps", "3", "4")]


@pytest.mark.parametrize(("one", "two"), list(combinations(GENERATIONS, 2)))
def test_runs_of_two_generations_are_at_most_six_lines_apart(
    one: str, two: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, name in enumerate((one, two)):
        Path(name).mkdir()
        merged = compose(["--config", "conf/quickstart.yaml", "--config", f"conf/train/{name}.yaml"])[0]
        write(f"{name}/config.yaml", {**merged, "out": name})
        save(tiny_drafter(presets()["eagle3"], seed=index), Path(name, "drafter"))
    head, *rows = columns(diff(capsys, one, two))
    if (one, two) == ("eagle1", "eagle2"):
        assert head == ("the weights differ; no other difference",) and not rows
    else:
        assert head == ("the weights differ",) and 0 < len(rows) <= 6


def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--json", "conf/drafter/eagle1.yaml", "conf/drafter/eagle3_1.yaml"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {each["what"]: each["a"] for each in told["differences"]}["head"] == {
        "head": "target",
        "draft_vocab_size": "all",
    }
    assert main(["diff", "conf/drafter/eagle1.yaml", "conf/drafter/eagle2.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["conf/quickstart.yaml", "conf/drafter/eagle1.yaml"], "is a run, conf/drafter/eagle1.yaml is a drafter"),
        (["conf/drafter/eagle1.yaml", "conf/quickstart.yaml"], "is a run, conf/drafter/eagle1.yaml is a drafter"),
        (["nowhere.yaml", "conf/quickstart.yaml"], "nowhere.yaml: no such file"),
        ([".", "conf/quickstart.yaml"], "neither a saved drafter"),
        (["odd.yaml", "conf/quickstart.yaml"], "odd.yaml: neither a drafter's design"),
        (["empty.yaml", "conf/quickstart.yaml"], "empty.yaml: neither a drafter's design"),
        (["illegal.yaml", "conf/drafter/eagle1.yaml"], "illegal.yaml: "),
        (["misspelt.yaml", "conf/quickstart.yaml"], "ttt_step"),
        (["foreign", "conf/drafter/eagle1.yaml"], "not a specdec drafter"),
        (["old", "conf/drafter/eagle1.yaml"], "lacks attention_window, aux_layers"),
        (["conf/drafter/eagle1.yaml"], "required"),
    ],
)
def test_wrong_input_is_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("odd.yaml", {"colour": "red"})
    write("empty.yaml", {})
    write("illegal.yaml", {"num_layers": 0})
    write("misspelt.yaml", {"model": {"ttt_step": 1}})
    for name, content in (("foreign", {"model_type": "llama"}), ("old", {"format": "specdec-drafter", "drafter": {}})):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(content))
    assert main(["diff", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_every_field_of_a_design_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    changed = {
        "fusion": "WeightedSum", "entry": "Narrow", "norms": {"aux": "none"}, "recurrence": "PreNorm",
        "draft_vocab_size": 5, "aux_layers": [1], "num_layers": 2, "hidden_size": 8, "intermediate_size": 8,
        "attention_window": 99, "head": "target",
    }  # fmt: skip
    assert set(changed) == {field.name for field in dataclasses.fields(DrafterSpec)}, "say here how a new field differs"
    base = {"norms": {"aux": "each"}}
    for name, value in changed.items():
        rows = diff(capsys, write("a.yaml", base), write("b.yaml", base | {name: value}))
        assert len(rows) == 1 and name in (rows[0][0].split(".")[0], rows[0][0].split(".")[-1])
