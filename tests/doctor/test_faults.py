"""Planted faults: each is found by the check that should find it, and told by its cause."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.data import Batch, ChatData, collate
from specdec.data.loader import ResumableLoader
from specdec.doctor import sample as sample_module
from specdec.doctor.examine import made
from specdec.doctor.finding import Finding, Verdict
from specdec.doctor.subject import Subject
from specdec.drafter import Drafter, save
from specdec.drafter.recurrence import FeedNormed
from specdec.export.format import Format
from specdec.features import OnTheFly
from specdec.nn import norm as norm_module
from specdec.nn.rope import rope_parameters
from specdec.nn.view import View
from specdec.target import TargetOutput
from specdec.training import objective as objective_module
from specdec.training.start import FromDrafter
from specdec.training.ttt import ttt_unroll
from tests.doctor.made import chats, design, faults, learner, subject, target, text

Patch = pytest.MonkeyPatch


def of(found: list[Finding], check: str) -> str:
    """What one check says of the faults that it found; there are some."""
    said = [f"{one.what}: {one.said}" for one in found if one.check == check]
    assert said, found
    return "\n".join(said)


def collated(change: Callable[[Batch], Tensor], patch: Patch) -> None:
    """Batches whose masks are changed where the loader stacks rows."""

    def stack(rows: Any) -> Batch:
        batch = collate(rows)
        return batch._replace(loss_mask_BT=change(batch))

    patch.setattr(ResumableLoader, "stack", staticmethod(stack))


@pytest.mark.parametrize("by", [-1, 1])
def test_a_shifted_mask(by: int, tmp_path: Path, monkeypatch: Patch) -> None:
    collated(lambda batch: batch.loss_mask_BT.roll(by, 1), monkeypatch)
    said = of(faults(subject(chats(tmp_path)), ["masks"]), "masks")
    assert f"it is shifted by {by:+d}" in said


def test_a_mask_of_ones(tmp_path: Path, monkeypatch: Patch) -> None:
    collated(lambda batch: batch.documents_BT >= 0, monkeypatch)
    assert "every token is supervised" in of(faults(subject(chats(tmp_path)), ["masks"]), "masks")


def test_a_mask_of_zeros(tmp_path: Path, monkeypatch: Patch) -> None:
    collated(lambda batch: torch.zeros_like(batch.loss_mask_BT), monkeypatch)
    assert "nothing is supervised" in of(faults(subject(chats(tmp_path)), ["masks"]), "masks")


def test_end_of_turn_left_out(tmp_path: Path, monkeypatch: Patch) -> None:
    end = target("float32").tokenizer.convert_tokens_to_ids("<|im_end|>")
    collated(lambda batch: batch.loss_mask_BT & (batch.ids_BT != end), monkeypatch)
    assert "end-of-turn" in of(faults(subject(chats(tmp_path)), ["masks"]), "masks")


def test_the_mask_of_other_turns(tmp_path: Path, monkeypatch: Patch) -> None:
    """The users' words in place of the assistant's."""
    collated(lambda batch: ~batch.loss_mask_BT & (batch.documents_BT >= 0), monkeypatch)
    assert "other tokens are supervised" in of(faults(subject(chats(tmp_path)), ["masks"]), "masks")


def test_a_shifted_mask_of_text(tmp_path: Path, monkeypatch: Patch) -> None:
    collated(lambda batch: batch.loss_mask_BT & (torch.arange(batch.ids_BT.shape[1]) > 0), monkeypatch)
    assert "text is supervised whole" in of(faults(subject(text(tmp_path)), ["masks"]), "masks")


def features(change: Callable[[TargetOutput], TargetOutput], patch: Patch, by: int = 0) -> None:
    """Features that come wrongly from their source; the target itself is right."""
    own = OnTheFly.__call__

    def wrong(self: OnTheFly, of: Any, batch: Batch, layers: Any, final_norm: bool) -> TargetOutput:
        return change(own(self, of, batch, tuple(b + by for b in layers), final_norm))

    patch.setattr(OnTheFly, "__call__", wrong)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_tap_off_by_one(by: int, tmp_path: Path, monkeypatch: Patch) -> None:
    features(lambda out: out, monkeypatch, by)
    said = of(faults(subject(text(tmp_path)), ["taps"]), "taps")
    assert said.count(f"layer number is off by {by:+d}") == 3


def test_a_final_norm_that_is_missing(tmp_path: Path, monkeypatch: Patch) -> None:
    own = OnTheFly.__call__

    def unnormed(self: OnTheFly, of: Any, batch: Batch, layers: Any, final_norm: bool) -> TargetOutput:
        out = own(self, of, batch, (*layers, of.num_layers), False)
        return TargetOutput(out.aux_BTNH[:, :, :-1], out.aux_BTNH[:, :, -1])

    monkeypatch.setattr(OnTheFly, "__call__", unnormed)
    with torch.no_grad():
        target("float32").final_norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    try:
        found = faults(subject(text(tmp_path)), ["taps"])
    finally:
        torch.nn.init.ones_(target("float32").final_norm.weight)
    assert "the final norm is missing" in of(found, "taps")
    assert all("boundary" not in one.what for one in found), "the taps are right"


def test_features_of_another_row(tmp_path: Path, monkeypatch: Patch) -> None:
    features(lambda out: TargetOutput(*(x.roll(1, 0) for x in out)), monkeypatch)
    assert "are those of document" in of(faults(subject(text(tmp_path)), ["taps"]), "taps")


def test_features_of_the_token_before(tmp_path: Path, monkeypatch: Patch) -> None:
    features(lambda out: TargetOutput(*(x.roll(1, 1) for x in out)), monkeypatch)
    assert "rows are shifted by -1" in of(faults(subject(text(tmp_path)), ["taps"]), "taps")


def test_features_that_are_no_numbers(tmp_path: Path, monkeypatch: Patch) -> None:
    features(lambda out: TargetOutput(out.aux_BTNH * float("nan"), out.final_BTH), monkeypatch)
    found = faults(subject(text(tmp_path)), ["taps", "labels"])
    assert "not finite" in of(found, "taps") and "not finite" in of(found, "labels")


def test_labels_shifted_by_one(tmp_path: Path, monkeypatch: Patch) -> None:
    """In the objective: a place is graded by the next one's law."""
    own = objective_module.pieces

    def shifted(trained_KBT: Tensor, *rest: Any) -> Any:
        for piece in own(trained_KBT, *rest):
            yield piece._replace(positions_C=(piece.positions_C + 1).clamp(max=trained_KBT[0].numel() - 1))

    monkeypatch.setattr(objective_module, "pieces", shifted)
    checked = subject(chats(tmp_path), learner(design("eagle3"), ttt_steps=1))
    assert "labels are shifted" in of(faults(checked, ["labels"]), "labels")
    assert "labels are shifted by +1 in training" in of(faults(checked, ["overfit"]), "overfit")


def taught(checked: Subject, layers: tuple[int, ...]) -> None:
    """Train the drafter on the batch's own tokens, on the target's states at these boundaries."""
    drafter, batch = checked.drafter.requires_grad_(True), checked.batch
    out = checked.target.forward(batch.ids_BT, View.packed(batch.documents_BT), layers, False)
    wanted_BT = drafter.vocab.to_draft(checked.target.logits(out.final_BTH[:, 1:]).argmax(-1))
    known_BT = wanted_BT >= 0
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(40):
        (step,) = ttt_unroll(drafter, batch.ids_BT, out.aux_BTNH, batch.documents_BT, 1)
        logits = drafter.logits(step.normed_BTH[:, :-1][known_BT])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, wanted_BT[known_BT]).backward()
        optimizer.step()
    checked.begun = True


@pytest.mark.parametrize("by", [-1, 0, 1])
def test_a_saved_drafter_that_was_trained_on_other_boundaries(by: int, tmp_path: Path) -> None:
    checked = subject(text(tmp_path))
    taught(checked, tuple(b + by for b in checked.drafter.config.aux_layers))
    found = made("taps", checked)
    assert ("drafts best from its stated boundaries" in found[-1].what) and found[-1].figure is not None
    if by:
        said = of([one for one in found if one.verdict is Verdict.FAULTY], "taps")
        assert f"from boundaries {by:+d}" in said and str([b + by for b in (2, 3, 4)]) in said
    else:
        assert [one.verdict for one in found] == [Verdict.SOUND] * len(found)


def exported(patch: Patch, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    own = Format.tensors
    patch.setattr(Format, "tensors", lambda self, drafter, of: change(own(self, drafter, of)))


def test_an_export_of_absolute_ids(tmp_path: Path, monkeypatch: Patch) -> None:
    exported(monkeypatch, lambda made: made | {"d2t": made["d2t"] + torch.arange(len(made["d2t"]))})
    assert "d2t holds target ids" in of(faults(subject(text(tmp_path)), ["vocabulary"]), "vocabulary")


def test_an_export_of_other_members(tmp_path: Path, monkeypatch: Patch) -> None:
    exported(monkeypatch, lambda made: made | {"t2d": made["t2d"].roll(1)})
    assert "d2t or t2d name other tokens" in of(faults(subject(text(tmp_path)), ["vocabulary"]), "vocabulary")


def test_a_head_whose_rows_are_others(tmp_path: Path) -> None:
    checked = subject(text(tmp_path))
    with torch.no_grad():
        checked.drafter.lm_head.weight.copy_(checked.drafter.lm_head.weight.roll(1, 0))
    assert "rows are another token's" in of(faults(checked, ["vocabulary"]), "vocabulary")


def test_a_vocabulary_of_other_text(tmp_path: Path) -> None:
    """A saved drafter whose head knows what these data never say."""
    data = text(tmp_path)
    drafter = subject(data).drafter
    unused = torch.cat([torch.tensor([1]), torch.arange(60, 259)])
    config = dataclasses.replace(drafter.config, draft_vocab_size=200)
    save(Drafter(config, unused), tmp_path / "drafter")
    checked = subject(data, learner(start=FromDrafter(str(tmp_path / "drafter"))))
    assert "counted on other text" in of(faults(checked, ["vocabulary"]), "vocabulary")


def test_a_frozen_part(tmp_path: Path) -> None:
    checked = subject(text(tmp_path))
    checked.drafter.fusion.requires_grad_(False)
    assert "fusion.fc.weight is frozen" in of(faults(checked, ["gradient"]), "gradient")


def test_an_embedding_that_is_trained_unasked(tmp_path: Path) -> None:
    checked = subject(text(tmp_path))
    checked.drafter.embed_tokens.requires_grad_(True)
    said = of(faults(checked, ["gradient"]), "gradient")
    assert "embed_tokens.weight would be trained" in said and "moves wrongly" in said


def test_a_rate_of_zero(tmp_path: Path) -> None:
    module = learner(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0))
    assert "stay in spite of a gradient" in of(faults(subject(text(tmp_path), module), ["gradient"]), "gradient")


def test_a_backward_pass_that_is_wrong(tmp_path: Path, monkeypatch: Patch) -> None:
    own = norm_module._backward
    monkeypatch.setattr(norm_module, "_backward", lambda *given: (1.1 * own(*given)[0], own(*given)[1]))
    assert "a backward pass is wrong" in of(faults(subject(text(tmp_path)), ["gradient"]), "gradient")


def test_a_dead_switch(tmp_path: Path, monkeypatch: Patch) -> None:
    """The norm on the embedding is built, and never applied."""
    monkeypatch.setattr(Drafter, "read", lambda self, ids, dtype: self.entry.read(self.embed_tokens(ids).to(dtype)))
    found = faults(subject(text(tmp_path)), ["switches", "gradient"])
    said = of(found, "switches")
    assert "norms.embed is DEAD" in said and said.count("DEAD") == 1
    assert "norms.embed.weight is without a gradient" in of(found, "gradient")


def test_a_recurrence_that_hands_on_zeros(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(FeedNormed, "forward", lambda self, out, normed: torch.zeros_like(out))
    assert "hands on zeros" in of(faults(subject(text(tmp_path)), ["switches"]), "switches")


def test_a_recurrence_that_is_dead(tmp_path: Path, monkeypatch: Patch) -> None:
    """What should be the normed state is the raw one."""
    monkeypatch.setattr(FeedNormed, "forward", lambda self, out, normed: out)
    assert "recurrence is DEAD" in of(faults(subject(text(tmp_path)), ["switches"]), "switches")


def test_a_boundary_that_is_left_out(tmp_path: Path) -> None:
    checked = subject(text(tmp_path))
    with torch.no_grad():
        checked.drafter.fusion.fc.weight[:, :32] = 0  # type: ignore[union-attr,index,operator]
    said = of(faults(checked, ["switches"]), "switches")
    assert "the target's state at boundary 2" in said and "the fusion leaves it out" in said


@pytest.mark.parametrize("change", [{"rope_theta": 50000.0}, {"partial_rotary_factor": 0.5}])
def test_a_wrong_rope(change: dict[str, float], tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("specdec.drafter.config.rope_parameters", lambda config: rope_parameters(config) | change)
    found = faults(subject(text(tmp_path)), ["rope"])
    said = of(found, "rope")
    assert next(iter(change)) in said and "rotary frequencies" in said and len(found) == 2


def test_no_rotation_at_all(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("specdec.nn.attention.turn", lambda x, cos, sin: x)
    assert "are not rotated" in of(faults(subject(text(tmp_path)), ["rope"]), "rope")


def test_decoding_at_other_positions(tmp_path: Path, monkeypatch: Patch) -> None:
    """A chain whose positions run ahead by one."""
    own = View.append.__func__  # type: ignore[attr-defined]

    def ahead(cls: type, prefix: Any, seen: Tensor, depth: Tensor, *rest: Any) -> View:
        return own(cls, prefix, seen, depth + 1, *rest)

    checked = subject(text(tmp_path))
    monkeypatch.setattr(View, "append", classmethod(ahead))
    found = faults(checked, ["rope", "parity"])
    assert "positions are advanced twice, or not at all" in of(found, "rope")
    assert "what is trained is not what is decoded" in of(found, "parity")


def test_training_and_decoding_that_differ(tmp_path: Path, monkeypatch: Patch) -> None:
    """What is decoded has another norm than what was trained."""
    own, checked = sample_module.decoding_copy, subject(chats(tmp_path), learner(ttt_steps=1))

    def lost(drafter: Drafter, of: Any) -> Drafter:
        out = own(drafter, of)
        torch.nn.init.uniform_(out.norms.output.weight, -1, 1)  # type: ignore[arg-type]
        return out

    monkeypatch.setattr(sample_module, "decoding_copy", lost)
    assert "decoding has not" in of(faults(checked, ["overfit"]), "overfit")


def test_a_check_that_cannot_be_made_is_a_fault(tmp_path: Path, monkeypatch: Patch) -> None:
    checked = subject(chats(tmp_path))
    assert isinstance(checked.data, ChatData)
    monkeypatch.setattr(checked.data, "train", "nowhere.jsonl")
    assert "nowhere.jsonl: no such file" in of(faults(checked, ["masks"]), "masks")
