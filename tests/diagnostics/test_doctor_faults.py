"""Planted faults: each is found by the check that should find it, and told by its cause."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.data import Batch, ChatData
from specdec.data.loader import ResumableLoader
from specdec.diagnostics import doctor_setup as set_up_module
from specdec.diagnostics.doctor import run_check
from specdec.diagnostics.doctor_setup import CheckResult
from specdec.drafter import Drafter, save_drafter
from specdec.drafting.chained import FeedNormed
from specdec.features import OnTheFly
from specdec.nn import layers as nn_layers
from specdec.nn.view import View
from specdec.target import TargetOutput
from specdec.training import step as step_module
from specdec.training.building import FromDrafter
from tests.diagnostics.doctor_made import (
    chats,
    design,
    faults,
    learner,
    subject,
    target,
    text,
    told,
)

Patch = pytest.MonkeyPatch


def with_masks(change: Callable[[Batch], Tensor], monkeypatch: Patch) -> None:
    fetch = ResumableLoader.fetch

    def changed(loader: ResumableLoader, numbers_B: Tensor) -> Batch:
        batch = fetch(loader, numbers_B)
        return batch._replace(loss_mask_BT=change(batch))

    monkeypatch.setattr(ResumableLoader, "fetch", changed)


def users_words(batch: Batch) -> Tensor:
    return ~batch.loss_mask_BT & (batch.documents_BT >= 0)


def without_ends(batch: Batch) -> Tensor:
    return batch.loss_mask_BT & (
        batch.ids_BT != target().tokenizer.convert_tokens_to_ids("<|im_end|>")
    )


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda batch: batch.loss_mask_BT.roll(-1, 1), "shifted by -1 token"),
        (lambda batch: batch.loss_mask_BT.roll(1, 1), "shifted by +1 token"),
        (lambda batch: batch.documents_BT >= 0, "every token is supervised"),
        (lambda batch: torch.zeros_like(batch.loss_mask_BT), "nothing is supervised"),
        (lambda batch: batch.loss_mask_BT | (batch.documents_BT < 0), "padding is trained on"),
        (users_words, "other tokens are supervised"),
        (without_ends, "end-of-turn"),
    ],
)
def test_masks_of_chats(
    change: Callable[[Batch], Tensor], cause: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Changed where the loader fetches rows."""
    with_masks(change, monkeypatch)
    assert cause in told(faults(subject(chats(tmp_path)), "masks"), "masks")


def test_a_shifted_mask_of_text(tmp_path: Path, monkeypatch: Patch) -> None:
    with_masks(
        lambda batch: batch.loss_mask_BT & (torch.arange(batch.ids_BT.shape[1]) > 0), monkeypatch
    )
    assert "text is supervised whole" in told(faults(subject(text(tmp_path)), "masks"), "masks")


@pytest.mark.parametrize(
    ("change", "by", "cause"),
    [
        (lambda out: out, -1, "layer number is off by -1"),
        (lambda out: out, 1, "layer number is off by +1"),
        (lambda out: TargetOutput(*(x.roll(1, 0) for x in out)), 0, "another document's"),
        (lambda out: TargetOutput(*(x.roll(1, 1) for x in out)), 0, "rows shifted"),
        (lambda out: TargetOutput(out.aux_BTNH * float("nan"), out.final_BTH), 0, "not finite"),
    ],
)
def test_faulty_features_are_found(
    change: Callable[[TargetOutput], TargetOutput],
    by: int,
    cause: str,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    """They come wrongly from their source; the target itself is right."""
    own = OnTheFly.__call__

    def wrong(self: OnTheFly, of: Any, batch: Batch, layers: Any, final_norm: bool) -> TargetOutput:
        return change(own(self, of, batch, tuple(b + by for b in layers), final_norm))

    monkeypatch.setattr(OnTheFly, "__call__", wrong)
    assert cause in told(faults(subject(text(tmp_path)), "taps"), "taps")


def test_a_final_norm_that_is_missing(tmp_path: Path, monkeypatch: Patch) -> None:
    own = OnTheFly.__call__

    def unnormed(
        self: OnTheFly, of: Any, batch: Batch, layers: Any, final_norm: bool
    ) -> TargetOutput:
        out = own(self, of, batch, (*layers, of.num_layers), False)
        return TargetOutput(out.aux_BTNH[:, :, :-1], out.aux_BTNH[:, :, -1])

    monkeypatch.setattr(OnTheFly, "__call__", unnormed)
    with torch.no_grad():
        target().final_norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    try:
        found = faults(subject(text(tmp_path)), "taps")
    finally:
        torch.nn.init.ones_(target().final_norm.weight)
    assert "the final norm is missing" in told(found, "taps")
    assert all("boundary" not in one.what for one in found), "the taps are right"


@pytest.mark.parametrize("by", [-1, 0, 1])
def test_a_saved_drafter_that_was_trained_on_other_boundaries(by: int, tmp_path: Path) -> None:
    checked = subject(text(tmp_path))
    drafter, batch = checked.drafter.requires_grad_(True), checked.batch
    torch.nn.init.ones_(drafter.norms.output.weight)  # so that few steps bring it far
    layers = tuple(b + by for b in drafter.config.aux_layers)
    out = checked.target.forward(batch.ids_BT, View.packed(batch.documents_BT), layers, False)
    due_BT = drafter.vocab.to_draft(checked.target.logits(out.final_BTH[:, 1:]).argmax(-1))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(40):
        (step,) = drafter.unroll(batch.ids_BT, out.aux_BTNH, batch.documents_BT, 1)
        logits = drafter.logits(step.normed_BTH[:, :-1][due_BT >= 0])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, due_BT[due_BT >= 0]).backward()
        optimizer.step()
    checked.saved = True
    last = run_check("taps", checked)[-1]
    assert "drafts best from its stated boundaries" in last.what
    assert last.result is (CheckResult.FAULTY if by else CheckResult.SOUND), last
    assert not by or f"trained on boundaries {by:+d}" in last.note


def test_labels_shifted_by_one(tmp_path: Path, monkeypatch: Patch) -> None:
    """In the objective: a place is graded by the next one's distribution."""
    own = step_module.pieces

    def shifted(trained_KBT: Tensor, *rest: Any) -> Any:
        for piece in own(trained_KBT, *rest):
            yield piece._replace(
                positions_C=(piece.positions_C + 1).clamp(max=trained_KBT[0].numel() - 1)
            )

    monkeypatch.setattr(step_module, "pieces", shifted)
    found = faults(subject(chats(tmp_path), learner(design("eagle3"), ttt_steps=1)), "overfit")
    assert "decoding has not" in told(found, "overfit")


def test_a_vocabulary_of_other_text(tmp_path: Path) -> None:
    """A saved drafter whose head knows what these data never say."""
    data = text(tmp_path)
    config = dataclasses.replace(subject(data).drafter.config, draft_vocab_size=200)
    save_drafter(
        Drafter(config, torch.cat([torch.tensor([1]), torch.arange(60, 259)])), tmp_path / "drafter"
    )
    checked = subject(data, learner(start=FromDrafter(str(tmp_path / "drafter"))))
    assert "counted on other text" in told(faults(checked, "vocabulary"), "vocabulary")


def head_rolled(drafter: Any) -> None:
    drafter.lm_head.weight.copy_(drafter.lm_head.weight.roll(1, 0))


def fusion_frozen(drafter: Any) -> None:
    drafter.fusion.requires_grad_(False)


def embedding_trained(drafter: Any) -> None:
    drafter.embed_tokens.requires_grad_(True)


def boundary_left_out(drafter: Any) -> None:
    drafter.fusion.fc.weight[:, :32] = 0


@pytest.mark.parametrize(
    ("change", "check", "causes"),
    [
        (head_rolled, "vocabulary", ["rows are another token's"]),
        (fusion_frozen, "gradient", ["fusion.fc.weight: frozen"]),
        (embedding_trained, "gradient", ["embed_tokens.weight: trained unasked"]),
        (
            boundary_left_out,
            "inputs",
            ["the target's state at boundary 2", "the fusion leaves it out"],
        ),
    ],
)
def test_faulty_drafters_are_found(
    change: Callable[[Any], None], check: str, causes: list[str], tmp_path: Path
) -> None:
    checked = subject(text(tmp_path))
    with torch.no_grad():
        change(checked.drafter)
    assert all(cause in told(faults(checked, check), check) for cause in causes)


def test_a_rate_of_zero(tmp_path: Path) -> None:
    module = learner(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0))
    assert "the rate is zero" in told(
        faults(subject(text(tmp_path), module), "gradient"), "gradient"
    )


BACKWARD = nn_layers._norm_backward


@pytest.mark.parametrize(
    ("where", "name", "wrong", "causes"),
    [
        (nn_layers, "_norm_backward", lambda *x: (1.1 * BACKWARD(*x)[0], BACKWARD(*x)[1]), {"gradient": "is wrong"}),
        (  # the norm on the embedding is built, and never applied
            Drafter, "read", lambda self, ids, dtype: self.entry.read(self.embed_tokens(ids).to(dtype)),
            {"gradient": "norms.embed.weight: built and not used"},
        ),
        (FeedNormed, "forward", lambda self, out, normed: torch.zeros_like(out), {"inputs": "hands on zeros"}),
    ],
)  # fmt: skip
def test_faulty_code_is_found(
    where: Any,
    name: str,
    wrong: Callable[..., Any],
    causes: dict[str, str],
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(where, name, wrong)
    found = faults(subject(text(tmp_path)), *causes)
    assert all(cause in told(found, check) for check, cause in causes.items())


def test_decoding_at_other_positions(tmp_path: Path, monkeypatch: Patch) -> None:
    """A chain whose positions run ahead by one."""
    own, checked = View.append.__func__, subject(text(tmp_path))  # type: ignore[attr-defined]
    ahead = classmethod(
        lambda cls, prefix, seen, depth, *rest: own(cls, prefix, seen, depth + 1, *rest)
    )
    monkeypatch.setattr(View, "append", ahead)
    found = faults(checked, "parity")
    assert "what is trained is not what is decoded" in told(found, "parity")


@pytest.mark.slow
def test_training_and_decoding_that_differ(tmp_path: Path, monkeypatch: Patch) -> None:
    """What is decoded has another norm than what was trained."""
    own, checked = set_up_module.decoding_copy, subject(chats(tmp_path), learner(ttt_steps=1))

    def lost(drafter: Drafter, of: Any) -> Drafter:
        out = own(drafter, of)
        torch.nn.init.uniform_(out.norms.output.weight, -1, 1)  # type: ignore[arg-type]
        return out

    monkeypatch.setattr(set_up_module, "decoding_copy", lost)
    assert "decoding has not" in told(faults(checked, "overfit"), "overfit")


def test_what_cannot_be_learnt(tmp_path: Path) -> None:
    """Of all parts one norm's scale is trained."""
    checked = subject(chats(tmp_path), learner(train_head=False, ttt_steps=1))
    checked.drafter.requires_grad_(False).norms.embed.requires_grad_(True)
    assert "learning stopped by itself" in told(faults(checked, "overfit"), "overfit")


def test_a_check_that_cannot_be_made(tmp_path: Path, monkeypatch: Patch) -> None:
    checked = subject(chats(tmp_path))
    assert isinstance(checked.data, ChatData)
    monkeypatch.setattr(checked.data, "train", "nowhere.jsonl")
    assert "nowhere.jsonl: no such file" in told(faults(checked, "masks"), "masks")
