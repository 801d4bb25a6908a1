"""From a design, a target and its data to a drafter; and each way in which they do not go together."""

import copy
import dataclasses
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from specdec.cli import main
from specdec.data import Batch, TokenData
from specdec.data.datamodule import Splits
from specdec.drafter import Drafter, DrafterSpec
from specdec.target import Target
from specdec.training.building import build, check_checkpoint
from specdec.training.start import FromTarget, Start
from tests.tiny import HIDDEN, VOCAB, presets, tiny_target, variants

EAGLE1, EAGLE3 = presets()["eagle1"], presets()["eagle3_1"]


class InMemory(TokenData):
    """Rows as they are."""

    def __init__(self, ids: list[list[int]], answers: list[list[int]] | None = None) -> None:
        super().__init__(len(ids[0]), 1)
        batch = torch.tensor(ids)
        mask = torch.ones_like(batch) if answers is None else torch.tensor(answers)
        rows = Batch(batch, mask.bool(), torch.zeros_like(batch))
        self._splits = Splits(rows, rows, rows)


DATA = InMemory([[7, 7, 7, 60, 60, 3, 3, 9]])


def make(
    spec: DrafterSpec = EAGLE3,
    target: Target | None = None,
    data: TokenData = DATA,
    train_embed: bool = False,
    train_head: bool = True,
    steps: int = 3,
    start: Start = FromTarget(),  # noqa: B008  frozen
) -> Drafter:
    torch.manual_seed(5)
    return build(spec, target or tiny_target(dtype=torch.float32), data, start, train_embed, train_head, steps)


def test_it_starts_from_the_target() -> None:
    target = tiny_target(dtype=torch.float32)
    with torch.no_grad():
        target.final_norm.weight.uniform_(0.5, 2)
    drafter = make(target=target)
    assert torch.equal(drafter.embed_tokens.weight, target.embedding_weight())
    assert torch.equal(drafter.lm_head.weight, target.head_weight()[drafter.vocab.target_ids_D])
    torch.testing.assert_close(drafter.norms.output.weight, target.final_norm.weight, rtol=1e-4, atol=0)
    assert drafter.config.target["fingerprint"] == target.identity["fingerprint"]
    whole = make(EAGLE1, target, train_head=False)
    assert torch.equal(whole.lm_head.weight, target.head_weight()) and whole.vocab.complete


def test_the_seed_decides_the_first_weights_whatever_was_drawn_since() -> None:
    def built(seed: int, draws: int) -> Drafter:
        torch.manual_seed(seed)
        torch.randn(draws)
        target = tiny_target(dtype=torch.float32, seed=seed)
        return build(EAGLE3, target, DATA, FromTarget(), False, True, 3)

    one, other, reseeded = (built(*given).state_dict() for given in ((5, 0), (5, 17), (6, 0)))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(one["fusion.fc.weight"], reseeded["fusion.fc.weight"])


def test_the_draft_vocabulary_is_what_answers_say_most() -> None:
    """Counted where the loss mask is set; the end of text is in it, said or not."""
    data = InMemory([[7, 7, 7, 60, 60, 3, 3, 9, 9, 9]], [[0, 0, 0, 1, 1, 1, 1, 1, 0, 0]])
    target = tiny_target(dtype=torch.float32)
    three = make(dataclasses.replace(EAGLE3, draft_vocab_size=3), target, data)
    assert three.vocab.target_ids_D.tolist() == [3, 9, 60]
    target.config.eos_token_id = 44
    assert make(dataclasses.replace(EAGLE3, draft_vocab_size=3), target, data).vocab.target_ids_D.tolist() == [
        3,
        44,
        60,
    ]


@pytest.mark.parametrize(("train_embed", "train_head"), [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize("name", [*presets(), *variants()])
def test_what_is_trained_is_what_was_asked_for(name: str, train_embed: bool, train_head: bool) -> None:
    spec = (presets() | variants())[name]
    drafter = make(spec, train_embed=train_embed, train_head=train_head and spec.head == "own")
    wanted = {"embed_tokens.weight": train_embed, "lm_head.weight": train_head and spec.head == "own"}
    assert {key: p.requires_grad for key, p in drafter.named_parameters()} == {
        key: wanted.get(key, True) for key, _ in drafter.named_parameters()
    }


def test_another_width_is_trained_whole() -> None:
    spec = dataclasses.replace(EAGLE3, hidden_size=16)
    drafter = make(spec, train_embed=True, train_head=True)
    assert drafter.embed_tokens.weight.shape == (VOCAB, 16) and all(p.requires_grad for p in drafter.parameters())


def test_the_log_says_what_was_built(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specdec"):
        drafter = make(dataclasses.replace(EAGLE3, draft_vocab_size=2))
    trained = sum(p.numel() for p in drafter.parameters()) - VOCAB * HIDDEN
    assert f"{trained:,} trainable parameters, boundaries [2, 3, 4] of 7" in caplog.text
    assert "draft vocabulary 2 covering 62.50 % of the text" in caplog.text  # 7 thrice and one of the pairs, of eight


@pytest.mark.parametrize(("spec", "steps", "warned"), [(EAGLE1, 3, True), (EAGLE1, 1, False), (EAGLE3, 3, False)])
def test_growing_states_are_warned_of(
    caplog: pytest.LogCaptureFixture, spec: DrafterSpec, steps: int, warned: bool
) -> None:
    make(spec, steps=steps, train_head=False)
    assert ("magnitude may grow" in caplog.text) is warned


def capped() -> Target:
    """A target that does more to its logits than multiply."""
    target = tiny_target(dtype=torch.float32)
    plain = target.logits
    target.logits = lambda *args: 30 * torch.tanh(plain(*args) / 30)  # type: ignore[method-assign]
    return target


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": InMemory([[1] * 600])}, r"data\.seq_len 600 exceeds the target's 512 positions"),
        ({"spec": dataclasses.replace(EAGLE3, hidden_size=16)}, r"hidden_size 16.*target's 32.*train_embed=true"),
        (
            {"spec": dataclasses.replace(EAGLE3, hidden_size=16), "train_embed": True, "train_head": False},
            "train_head=true",
        ),
        (
            {"spec": variants()["sliding_window"], "steps": 17},
            r"attention_window 16 is less than ttt_steps 17.*widen the window or unroll less",
        ),
        ({"spec": EAGLE1, "target": capped(), "train_head": False}, "head=target.*bias, scale or cap.*use head=own"),
        ({"data": InMemory([[1, 2, VOCAB]])}, f"{VOCAB}"),
        ({"data": InMemory([[1, 2, -1]])}, "-1"),
        ({"spec": dataclasses.replace(EAGLE3, aux_layers=[1, 8])}, "boundaries 0 to 7"),
        ({"target": tiny_target(dtype=torch.float32, num_hidden_layers=4)}, "4 layers is too shallow.*set aux_layers"),
        ({"spec": dataclasses.replace(EAGLE1, draft_vocab_size=40)}, "draft_vocab_size=all"),
        ({"target": tiny_target(dtype=torch.float32, eos_token_id=[1, 2]),
          "spec": dataclasses.replace(EAGLE3, draft_vocab_size=1)}, "2 control tokens"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make(**given)
    assert "\n" not in str(error.value)


def test_the_limits_themselves_are_allowed() -> None:
    make(data=InMemory([[1] * 512]))
    make(variants()["sliding_window"], steps=16)
    assert make(dataclasses.replace(EAGLE3, draft_vocab_size=32000)).vocab.complete  # more than there are


def stored(drafter: Drafter) -> dict[str, Any]:
    return {
        "drafter_config": drafter.config.to_json(),
        "state_dict": {f"drafter.{name}": value for name, value in drafter.state_dict().items()},
    }


def test_a_checkpoint_of_this_drafter_is_taken_and_any_other_refused() -> None:
    drafter = make()
    checkpoint = stored(drafter)
    check_checkpoint(checkpoint, drafter)
    with pytest.raises(ValueError, match="not written by specdec fit"):
        check_checkpoint({"state_dict": checkpoint["state_dict"]}, drafter)
    other = copy.deepcopy(checkpoint)
    other["drafter_config"]["num_layers"] = 2
    other["drafter_config"]["target"]["fingerprint"] = "other"
    with pytest.raises(ValueError, match="num_layers was 2, is 1; target was") as error:
        check_checkpoint(other, drafter)
    assert "norms" not in str(error.value)
    moved = copy.deepcopy(checkpoint)
    moved["state_dict"]["drafter.vocab.target_ids_D"][0] += 1
    with pytest.raises(ValueError, match="draft vocabulary is not the one"):
        check_checkpoint(moved, drafter)


@pytest.fixture
def command(target_directory: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A short run on the CPU."""
    monkeypatch.setattr("sys.argv", ["specdec"])
    text = str(text_file)
    return [
        "fit", "--data", "TextData", "--data.train", text, "--data.val", text, "--data.seq_len", "32",
        "--model.target.source", str(target_directory), "--trainer.max_steps", "1", "--trainer.accelerator", "cpu",
        "--trainer.limit_val_batches", "0", "--trainer.log_every_n_steps", "1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--model.ttt_steps", "0"], "model.ttt_steps must be at least 1, not 0"),
        (["--model.step_decay", "0"], "model.step_decay must lie in (0, 1]"),
        (["--model.drafter.aux_layers", "[]"], "aux_layers [] taps nothing"),
        (
            ["--model.loss", "WeightedSum", "--model.loss.terms", "[{loss: SoftCrossEntropy, weight: 0}]"],
            "every weight is 0",
        ),
        (["--model.loss", "WeightedSum", "--model.loss.terms", "[]"], "WeightedSum has no terms"),
        (["--model.loss", "SmoothL1"], "SmoothL1 compares the drafter's state with the target's"),
        (["--model.noise", "GaussianNoise", "--model.noise.std", "0"], "GaussianNoise.std must be positive"),
        (["--model.start", "Start"], "model.start=Start is a base, no part"),
        (["--model.start", "FromDrafter"], "directory"),
        (["--model.start", "FromDrafter", "--model.start.directory", "nowhere"], "nowhere: no such drafter directory"),
        (["--model.attention", "flex"], "model.attention=flex needs CUDA"),
        (["--model.attention", "flash"], "model.attention"),
    ],
)
def test_the_command_says_it_in_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], override: list[str], message: str
) -> None:
    out = tmp_path / "run"
    assert main([*command, *override, "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("specdec fit: error: ") and message in error
    assert not out.exists()


def test_a_feature_that_is_no_number_stops_the_run_and_tells_its_place(
    command: list[str], target_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that the target's own proof does not meet: a single token's embedding."""
    broken = tmp_path / "broken"
    shutil.copytree(target_directory, broken)
    weights = load_file(broken / "model.safetensors")
    token = AutoTokenizer.from_pretrained(broken)(text_file.read_text()[:20]).input_ids[0]
    weights["model.embed_tokens.weight"][token, 3] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert main([*command, "--model.target.source", str(broken), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"features are not finite: sample \d, token \d+, boundary 2 holds (nan|inf);", error)
