"""``specdec drift`` from its arguments to its files."""

import json
from pathlib import Path

import pytest
import torch

from specdec.cli import main
from specdec.drafter import Drafter, DrafterConfig, DrafterSpec, save
from specdec.drift.command import parser
from specdec.drift.measure import measure
from specdec.drift.settings import Settings
from specdec.drift.texts import own_texts
from specdec.embedded.source import TargetSource
from specdec.evaluation.pair import load_pair
from specdec.target import Target

LINES = ["def add_3(a, b):", "    return a + b", "def add_4("]
SMALL = ["--max_new_tokens", "16", "--depths", "3", "--anchors", "4"]


@pytest.fixture
def base(target_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.txt").write_text("\n".join(LINES))
    return ["drift", "--target", str(target_directory), "--prompts", str(tmp_path / "prompts.txt"), *SMALL]


def run_of(drafter_directory: Path, steps: int) -> None:
    """Makes the folder around a drafter look like a run's."""
    (drafter_directory.parent / "config.yaml").write_text(f"model: {{ttt_steps: {steps}}}\n")
    (drafter_directory.parent / "provenance.json").write_text("{}")


def test_one_drafter(
    base: list[str], target_directory: Path, drafter_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(drafter_directory, 2)
    out = tmp_path / "out"
    out.mkdir()
    assert main([*base, "--drafter", str(drafter_directory), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "RMS of the state, step 3 over step 1" in said and "takes the most attention" in " ".join(said.split())
    assert {path.name for path in out.iterdir()} == {"drift.json", "report.md", "drift.png", "drift.pdf"}
    found = json.loads((out / "drift.json").read_text())
    assert found["trained_depth"] == 2 and found["depths"] == 3 and found["version"] == 1
    assert found["prompts"] == ["line-1", "line-2", "line-3"] and found["skipped"] == []
    assert found["drafter"]["label"] == "drafter" and found["drafter"]["made_for_this_target"]
    assert len(found["drafter"]["weights_sha256"]) == 64 and found["settings"]["anchors"] == 4
    assert "specdec drift" in found["provenance"]["command"]
    target, drafter, _ = load_pair(TargetSource(str(target_directory)), drafter_directory)
    asked = [(name, target.tokenizer.encode(line)) for name, line in zip(found["prompts"], LINES, strict=True)]
    for number, text in enumerate(own_texts(target, asked, 16)):
        sums = measure(target, drafter, text, Settings(3, 4))
        for row, one in zip(sums.series_FK2, found["series"].values(), strict=True):
            assert [values[number] for values in one["values"]] == [
                float(total / weight) if weight else None for total, weight in row
            ]
    for again, message in ((["--out", str(out)], "exists already"), (["--trained_depth", "9"], "says 2")):
        assert main([*base, "--drafter", str(drafter_directory), *again]) == 2
        assert message in capsys.readouterr().err


def test_several_drafters(base: list[str], target_directory: Path, drafter_directory: Path, tmp_path: Path) -> None:
    target = Target.load(target_directory)
    config = DrafterConfig.for_target(
        DrafterSpec(draft_vocab_size=100, num_layers=2), target.config, vocab_size=target.vocab_size,
        num_target_layers=target.num_layers, identity=target.identity,
    )  # fmt: skip
    torch.manual_seed(1)
    other = save(Drafter(config, torch.arange(100)), tmp_path / "other")
    out = tmp_path / "out"
    more = ["--drafter", str(drafter_directory), str(other), "--labels", "one", "two", "--trained_depth", "4"]
    assert main([*base, *more, "--out", str(out)]) == 0
    names = {"one", "two", "comparison.json", "report.md", "drift.png", "drift.pdf"}
    assert {path.name for path in out.iterdir()} == names
    one, two = (json.loads((out / name / "drift.json").read_text()) for name in ("one", "two"))
    assert one["prompts"] == two["prompts"] and one["trained_depth"] == 4 and len(two["layers"]) == 2
    compared = json.loads((out / "comparison.json").read_text())
    assert compared["base"] == "one" and list(compared["differences"]) == ["two"]
    growth = compared["differences"]["two"]["state_rms_growth"]["mean"]
    wanted = [document["summary"]["state_rms_growth"]["mean"] for document in (one, two)]
    assert growth == pytest.approx(wanted[1] - wanted[0])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--depths", "16"], "max_new_tokens is 16: chains of 16 tokens need answers of at least 17"),
        (["--anchors", "0"], "must be at least 1"),
        (["--labels", "a", "b"], "2 names for 1 drafters"),
        (["--limit", "0"], "limit is 0"),
        (["--colour", "red"], "colour"),
    ],
)
def test_wrong_input_leaves_nothing(
    base: list[str], drafter_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str],
    message: str,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    assert main([*base, "--drafter", str(drafter_directory), "--out", str(out), *extra]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not out.exists() and not list(tmp_path.glob(".tmp-*"))


def test_the_parser_takes_a_config(tmp_path: Path) -> None:
    """As the planner of a study checks its arguments."""
    (tmp_path / "some.yaml").write_text("{drafter: [a], prompts: [b], depths: 4}")
    found = parser().parse_args([f"--config={tmp_path / 'some.yaml'}", "--anchors=3"])
    assert (found.drafter, found.depths, found.anchors, found.recent) == (["a"], 4, 3, 16)
