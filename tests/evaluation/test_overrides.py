"""Another attention window for a measurement: it is that of a drafter saved with it, and all results say so."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main
from specdec.decoding import Chain, DraftShape, DynamicTree, Proposer, SpeculativeDecoder
from specdec.diagnostics.loud import loud_drafter
from specdec.drafter import Drafter, DrafterSpec, load_drafter, save_drafter
from specdec.evaluation.config import load_pair
from specdec.evaluation.overrides import Override, override_notes
from specdec.target import Target, TargetSource
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets, tiny_drafter, variants

WINDOW, SINKS = 16, 2
NEW = 12  # tokens, of a text that is longer than the window from its start
SHAPES: dict[str, DraftShape] = {"chain": Chain(4), "tree": DynamicTree(depth=4, top_k=3, nodes=9)}
DESIGNS = presets() | {name: variants()[name] for name in ("two_layer", "mla", "peagle_3_1", "mtp")}
Decoded = tuple[list[int], tuple[int, ...], list[list[int]]]


@pytest.fixture(scope="module")
def target() -> Target:
    """One that its context leads astray often."""
    return markov_target("llama", 0.45)


def drafter_of(name: str, target: Target) -> Drafter:
    """One whose proposals depend on the whole text before them."""
    spec = DESIGNS[name]
    if name == "mtp":  # the target's own layer
        return tiny_drafter(spec)
    return loud_drafter(target, spec)


def replaced(drafter: Drafter, directory: Path, **changes: Any) -> Drafter:
    """The drafter with the same weights, saved with another config, and read again."""
    config = dataclasses.replace(drafter.config, **changes)
    other = Drafter(config, drafter.vocab.target_ids_D).to(drafter.lm_head.weight.dtype)
    other.load_state_dict(drafter.state_dict())
    return load_drafter(save_drafter(other, directory), dtype=None)


def decoded(target: Target, drafter: Drafter, shape: DraftShape, new: int = NEW) -> Decoded:
    """Tokens, accepted counts and the tokens of all proposals, operator by operator, in a cache."""
    proposals: list[list[int]] = []

    def propose(self: Proposer, *given: Any) -> Any:
        tree = original(self, *given)
        proposals.append(tree.tokens_BN[0].tolist())
        return tree

    original = Proposer.propose
    prompt = [(7 * place) % 61 for place in range(2 * WINDOW)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Proposer, "propose", propose)
        made = SpeculativeDecoder(target, drafter, shape).generate(prompt, new)
    return made.ids, made.accepted, proposals


@pytest.mark.parametrize(("shape", "sinks"), [("chain", 0), ("tree", SINKS)])
@pytest.mark.parametrize("name", DESIGNS)
def test_decoding_is_that_of_a_drafter_saved_with_the_window(
    name: str, shape: str, sinks: int, target: Target, tmp_path: Path
) -> None:
    full = drafter_of(name, target)
    saved = replaced(full, tmp_path / "windowed", attention_window=WINDOW, attention_sinks=sinks)
    wanted = decoded(target, saved, SHAPES[shape])
    overridden = load_drafter(save_drafter(full, tmp_path / "full"), dtype=None)
    overridden.set_window(WINDOW, sinks)
    assert decoded(target, overridden, SHAPES[shape]) == wanted
    assert decoded(target, full, SHAPES[shape])[2] != wanted[2], "the window changes no proposal"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_accepted_counts_are_those_of_the_window(
    shape: DraftShape, target: Target, tmp_path: Path
) -> None:
    """A drafter that is right often, whose attention reaches back over the whole text."""
    spec = dataclasses.replace(presets()["eagle3_1"], draft_vocab_size="all")
    full = disturb(perfect_drafter(target, spec, sharpness=1.0), 0.3)
    ids, accepted, _ = wanted = decoded(
        target, replaced(full, tmp_path / "windowed", attention_window=WINDOW), shape, 2 * NEW
    )
    overridden = load_drafter(save_drafter(full, tmp_path / "full"), dtype=None)
    overridden.set_window(WINDOW, None)
    assert decoded(target, overridden, shape, 2 * NEW) == wanted
    plain = decoded(target, full, shape, 2 * NEW)
    overridden.set_window("full", None)
    assert decoded(target, overridden, shape, 2 * NEW) == plain
    assert plain[0] == ids and plain[1] != accepted and sum(accepted) > 0


def test_what_is_not_given_stays_as_saved(tmp_path: Path) -> None:
    config = tiny_drafter(
        dataclasses.replace(variants()["sliding_window"], attention_sinks=SINKS)
    ).config
    cases: dict[tuple[Any, Any], tuple[Any, int]] = {
        (None, None): (WINDOW, SINKS),
        (32, None): (32, SINKS),
        (None, 5): (WINDOW, 5),
        (32, 0): (32, 0),
        ("full", None): ("full", 0),
        ("full", 0): ("full", 0),
    }
    for given, wanted in cases.items():
        changed = config.with_window(*given)
        assert (changed.attention_window, changed.attention_sinks) == wanted, given
        assert (
            dataclasses.replace(changed, attention_window=WINDOW, attention_sinks=SINKS) == config
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((8, None), "attention_window must be full or at least 16, not 8"),
        ((None, 4), "attention_sinks 4 keep tokens beyond a window, .* is full: set both"),
        (("full", 4), "attention_sinks 4 keep tokens beyond a window, .* is full: set both"),
        ((32, -1), "attention_sinks must be at least 0, not -1"),
    ],
)
def test_wrong_numbers_are_refused_with_what_to_do(given: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        tiny_drafter(presets()["eagle3_1"]).set_window(*given)


@pytest.mark.parametrize("given", [(32, None), ("full", None), (None, 4)])
def test_a_block_drafter_has_no_window(given: tuple[Any, Any]) -> None:
    drafter = tiny_drafter(variants()["dflash"])
    with pytest.raises(
        ValueError, match=r"entry KVInjection\) that see .*: leave both options out"
    ):
        drafter.set_window(*given)


@pytest.fixture
def loud_directory(target_directory: Path, tmp_path: Path) -> Path:
    target = Target.load(target_directory)
    return save_drafter(
        loud_drafter(target, DrafterSpec(draft_vocab_size=200)), tmp_path / "drafter"
    )


def test_a_pair_says_what_was_replaced(target_directory: Path, loud_directory: Path) -> None:
    source = TargetSource(str(target_directory))
    assert load_pair(source, loud_directory).overridden is None
    pair = load_pair(source, loud_directory, override=Override(WINDOW, SINKS))
    assert pair.overridden == {"attention_window": "full", "attention_sinks": 0}
    assert pair.drafter.config.attention_window == WINDOW
    with pytest.raises(ValueError, match=f"^{loud_directory}: attention_window must be full or"):
        load_pair(source, loud_directory, override=Override(3))


def test_each_overridden_drafter_has_a_note() -> None:
    own = {"attention_window": 512, "attention_sinks": 4}
    facts = {"label": "a", "attention_window": 64, "attention_sinks": 4, "overridden": own}
    assert override_notes([facts, facts | {"overridden": None}, {}]) == [
        "a: measured with attention_window 64 and attention_sinks 4, in place of its own "
        "(attention_window 512 and attention_sinks 4)."
    ]


COMMANDS = {
    "evaluate": ("metrics.json", ["--shape", "chain:depth=2", "--compile", "off"]),
    "robustness": ("robustness.json", ["--shape", "chain:depth=2", "--conditions", "context:tokens=40"]),
    "drift": ("drift.json", ["--depths", "2"]),
}  # fmt: skip


@pytest.fixture
def arguments(target_directory: Path, loud_directory: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "p.txt").write_text("def add_1(a, b):\n    return a + b + 1\ndef add_3(a, b): #\n")
    return [
        "--target", str(target_directory), "--drafter", str(loud_directory), "--prompts", str(tmp_path / "p.txt"),
        "--max_new_tokens", "12",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_all_results_say_it(
    command: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, more = COMMANDS[command]
    out = tmp_path / "out"
    override = ["--attention_window", "16", "--attention_sinks", "2"]
    main([command, *arguments, *more, *override, "--out", str(out)])
    result = json.loads((out / file).read_text())
    settings = {name: result["settings"][name] for name in ("attention_window", "attention_sinks")}
    assert settings == {"attention_window": 16, "attention_sinks": 2}
    facts = result["drafter"]
    assert facts["attention_window"] == 16 and facts["attention_sinks"] == 2
    assert facts["overridden"] == {"attention_window": "full", "attention_sinks": 0}
    note = "drafter: measured with attention_window 16 and attention_sinks 2"
    assert note in (out / "report.md").read_text()
    assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", [*COMMANDS, "tune"])
def test_a_wrong_override_leaves_nothing(
    command: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for words, message in (
        (["--attention_window", "3"], "must be full or at least 16"),
        (["--attention_window", "some"], "attention_window"),
        (["--attention_sinks", "4"], "set both"),
        (["--attention_sinks", "-4"], "attention_sinks"),
    ):
        assert main([command, *arguments, *words, "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1
        assert not out.exists()


@pytest.mark.slow
def test_an_overridden_evaluation_is_not_a_plain_one(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, more = COMMANDS["evaluate"]
    runs = {
        "plain": [],
        "narrow": ["--attention_window", "16"],
        "again": ["--attention_window", "16"],
    }
    for name, words in runs.items():
        assert main(["evaluate", *arguments, *more, *words, "--out", str(tmp_path / name)]) == 0
    assert main(["compare", *(str(tmp_path / name) for name in ("narrow", "again"))]) == 0
    capsys.readouterr()
    assert main(["compare", *(str(tmp_path / name) for name in ("plain", "narrow"))]) == 2
    assert "differ in attention_window: None and 16" in capsys.readouterr().err
    places = [str(tmp_path / name) for name in ("plain", "narrow")]
    assert main(["table", "--runs", *places]) == 2
    assert "differ in attention_window" in capsys.readouterr().err
    assert main(["table", "--runs", str(tmp_path / "narrow")]) == 0
    assert "measured with attention_window 16" in " ".join(capsys.readouterr().out.split())


def test_a_suite_that_lies_there_without_the_override_is_not_kept(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, more = COMMANDS["evaluate"]
    base = ["evaluate", *arguments, *more, "--temperatures", "0", "--out", str(tmp_path / "suite")]
    assert main(base) == 0
    assert main(base) == 0
    assert main([*base, "--attention_window", "16"]) == 2
    assert "of another" in capsys.readouterr().err


def test_evaluate_counts_what_a_drafter_saved_with_the_window_does(
    arguments: list[str], target_directory: Path, loud_directory: Path, tmp_path: Path
) -> None:
    _, more = COMMANDS["evaluate"]
    replaced(load_drafter(loud_directory), tmp_path / "saved", attention_window=WINDOW)
    overridden = [*arguments, *more, "--attention_window", "16", "--out", str(tmp_path / "a")]
    assert main(["evaluate", *overridden]) == 0
    saved = [*arguments, *more, "--drafter", str(tmp_path / "saved"), "--out", str(tmp_path / "b")]
    assert main(["evaluate", *saved]) == 0
    rows = [
        [json.loads(line) for line in (tmp_path / name / "answers.jsonl").read_text().splitlines()]
        for name in ("a", "b")
    ]
    keys = ("prompt_id", "accepted", "drafted", "tokens")
    first, second = ([[row.get(key) for key in keys] for row in side] for side in rows)
    assert first == second and len(first) == 3
