"""A sound target proves itself; a broken one does not, and says where."""

from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from specdec.nn.view import View
from specdec.target import Target, TargetCache
from tests.target.zoo import FAMILIES, make


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_proves_itself(family: str) -> None:
    Target(make(family)).prove()


def test_a_wrong_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(make("llama"))
    running = target._tape.running
    monkeypatch.setattr(target._tape, "running", lambda masks, asked: Shifted(running(masks, asked)))
    with pytest.raises(
        ValueError, match=r"in memory: the state at boundary 1 is not the model's own: relative difference"
    ):
        target.prove()


class Shifted:
    def __init__(self, inner: AbstractContextManager[dict[int, Tensor]]) -> None:
        self.inner = inner

    def __enter__(self) -> "Shifted":
        self.states = self.inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def __getitem__(self, boundary: int) -> Tensor:
        return self.states[max(boundary - 1, 0)]


def test_a_wrong_head(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(make("granite"))
    weight = target.head_weight()
    monkeypatch.setattr(target, "logits", lambda final, rows=None: final @ (weight if rows is None else weight[rows]).T)
    with pytest.raises(ValueError, match="the logits is not the model's own"):
        target.prove()


def test_a_wrong_final_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(make("llama"))
    monkeypatch.setattr(target, "final_norm", lambda state: state)
    with pytest.raises(ValueError, match="the final norm of the state at boundary 4"):
        target.prove()


def test_a_forgotten_window() -> None:
    target = Target(make("mistral"))
    target._parts = target._parts._replace(sliding=(False,) * 4)
    with pytest.raises(ValueError, match="the state at boundary 1"):
        target.prove()


def test_packing_that_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = View.packed
    monkeypatch.setattr(View, "packed", lambda documents: packed(torch.zeros_like(documents)))
    with pytest.raises(ValueError, match="packing: the second document"):
        Target(make("llama")).prove()


def test_a_commit_that_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetCache, "commit", lambda self, prefix, path: None)
    with pytest.raises(ValueError, match="going on after a commit"):
        Target(make("llama")).prove()


def test_a_model_that_fails_is_reported_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^in memory: Qwen3MoeForCausalLM fails on a short text: [^\n]+$"):
        Target(make("qwen3_moe").double()).prove()


def test_wide_windows_are_proved_too_and_put_back() -> None:
    model = make("mistral")
    model.config.sliding_window = 4096
    target = Target(model)
    target.prove()
    assert model.config.sliding_window == 4096
    target._parts = target._parts._replace(sliding=(False,) * 4)
    with pytest.raises(ValueError, match="the state at boundary 1"):
        target.prove()
    assert model.config.sliding_window == 4096


@pytest.mark.parametrize(
    ("weight", "dtype", "told"),
    [
        ("lm_head.weight", torch.float32, r"logits, .*lm_head\.weight is not finite in float32; check the checkpoint"),
        ("model.layers.1.mlp.down_proj.weight", torch.float32, r"state at boundary 2, .*layers\.1\.mlp\.down_proj"),
        ("model.layers.3.mlp.up_proj.weight", torch.float32, "state at boundary 4, normed, on a short text"),
        ("model.embed_tokens.weight", torch.bfloat16, r"boundary 0, .*embed_tok.* in bfloat16; load it in float32 \("),
        ("model.norm.weight", torch.float16, r"model\.norm\.weight .* in float16; load it in bfloat16 or float32"),
    ],
)
def test_weights_that_are_no_numbers_are_to_blame(weight: str, dtype: torch.dtype, told: str) -> None:
    model = make("llama").to(dtype)
    with torch.no_grad():
        model.get_parameter(weight)[3] = float("nan")
    with pytest.raises(ValueError, match=rf"^in memory: nan in its [^\n]*{told}[^\n]*$"):
        Target(model).prove()


@pytest.mark.parametrize(
    ("dtype", "size", "told"),
    [
        (torch.float16, 6e4, r": -?inf in its logits, .*: float16 overflows in it; load it in bfloat16 or float32"),
        (torch.float32, 1e38, "float32 overflows in it; check the checkpoint"),
    ],
)
def test_a_dtype_that_overflows_is_to_blame(dtype: torch.dtype, size: float, told: str) -> None:
    model = make("llama").to(dtype)
    with torch.no_grad():
        model.lm_head.weight.fill_(size)
    with pytest.raises(ValueError, match=told):
        Target(model).prove()
