"""A sound target proves itself in every dtype; a broken one does not, and says where."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.nn.view import View
from specdec.target import Target, TargetCache, TargetOutput
from specdec.target.rounding import own_states
from tests.target.zoo import FAMILIES, make

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
REAL = os.environ.get("SPECDEC_REAL_TARGET")  # a directory with a real model, for the slow tests
Patch = pytest.MonkeyPatch


@functools.lru_cache(maxsize=2)
def sound(name: str, dtype: torch.dtype) -> Target:
    return Target(make(name).to(dtype))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(
            (family, (torch.float32, torch.bfloat16)[n % 2])
            for n, family in enumerate([*FAMILIES, "massive"])
        ),
        *(
            (family, dtype)
            for family in ("llama", "gemma2", "massive")
            for dtype in (torch.float64, torch.float16)
        ),
    ],
    ids=str,
)
def test_every_family_proves_itself(family: str, dtype: torch.dtype) -> None:
    Target(make(family).to(dtype)).prove()


def tapped(by: int) -> Callable[[Patch, Target], None]:
    """The hooks keep a state as that of another boundary."""

    def plant(patch: Patch, target: Target) -> None:
        running = target._tape.running

        @contextmanager
        def off(masks: Any, asked: Any) -> Iterator[Any]:
            with running(masks, asked) as states:
                yield Off(states, by, target.num_layers)

        patch.setattr(target._tape, "running", off)

    return plant


class Off:
    def __init__(self, states: dict[int, Tensor], by: int, last: int) -> None:
        self.states, self.by, self.last = states, by, last

    def __getitem__(self, boundary: int) -> Tensor:
        return self.states[
            min(max(boundary + self.by, 0), self.last) if boundary < self.last else boundary
        ]


def forwarded(
    change: Callable[[Target, TargetOutput], TargetOutput],
) -> Callable[[Patch, Target], None]:
    """``Target.forward`` hands out something else."""

    def plant(patch: Patch, target: Target) -> None:
        own = Target.forward

        def forward(self: Target, *args: Any, **kwargs: Any) -> TargetOutput:
            return change(self, own(self, *args, **kwargs))

        patch.setattr(Target, "__call__", forward)

    return plant


def shifted(by: int) -> Callable[[Target, TargetOutput], TargetOutput]:
    def change(target: Target, out: TargetOutput) -> TargetOutput:
        inner = out.aux_BTNH[:, :, 1:-1]  # the rest as it is, so that no norm tells
        return out._replace(
            aux_BTNH=torch.cat(
                [out.aux_BTNH[:, :, :1], inner.roll(by, 2), out.aux_BTNH[:, :, -1:]], 2
            )
        )

    return change


def not_normed(target: Target, out: TargetOutput) -> TargetOutput:
    return out._replace(final_BTH=out.aux_BTNH[:, :, -1])


def normed_twice(target: Target, out: TargetOutput) -> TargetOutput:
    return out._replace(final_BTH=target.final_norm(out.final_BTH))


def norm_left_out(patch: Patch, target: Target) -> None:
    patch.setattr(target, "final_norm", lambda state: state)


def leaking(patch: Patch, target: Target) -> None:
    """Packed documents see each other."""
    packed = View.packed
    patch.setattr(View, "packed", lambda documents: packed(torch.zeros_like(documents)))


def appended(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Callable[[Patch, Target], None]:
    """The tree is placed otherwise."""

    def plant(patch: Patch, target: Target) -> None:
        own = View.append
        patch.setattr(
            View,
            "append",
            lambda prefix, seen, depth, *rest: own(prefix, *change(seen, depth), *rest),
        )

    return plant


def sibling_seen(seen_QQ: Tensor, depth_Q: Tensor) -> tuple[Tensor, Tensor]:
    return seen_QQ | (depth_Q[:, None] == depth_Q) & torch.ones_like(seen_QQ).tril(), depth_Q


def in_order(seen_QQ: Tensor, depth_Q: Tensor) -> tuple[Tensor, Tensor]:
    return seen_QQ, torch.arange(len(depth_Q))


def late_chains(patch: Patch, target: Target) -> None:
    """Tokens after a commit stand one position too far."""
    own = View.chain

    def chain(prefix: Tensor, *rest: Any) -> View:
        view = own(prefix, *rest)
        return view._replace(positions_BT=view.positions_BT + (view.positions_BT > 17))

    patch.setattr(View, "chain", chain)


def no_positions(patch: Patch, target: Target) -> None:
    own = View.packed

    def packed(documents: Tensor) -> View:
        return own(documents)._replace(positions_BT=torch.zeros_like(documents))

    patch.setattr(View, "packed", packed)


def window(by: int) -> Callable[[Patch, Target], None]:
    def plant(patch: Patch, target: Target) -> None:
        own = View.within
        patch.setattr(View, "within", lambda view, window: own(view, window + by))

    return plant


def other_rows(patch: Patch, target: Target) -> None:
    own = target.logits
    patch.setattr(
        target, "logits", lambda final, rows=None: own(final, None if rows is None else rows + 1)
    )


def other_head(patch: Patch, target: Target) -> None:
    own = target.logits
    patch.setattr(target, "logits", lambda final, rows=None: own(final, rows).roll(1, -1))


def nothing_committed(patch: Patch, target: Target) -> None:
    patch.setattr(TargetCache, "commit", lambda self, prefix, path: None)


FAULTS: dict[str, tuple[Callable[[Patch, Target], None], str]] = {
    "hooks one below": (
        tapped(-1),
        "state at boundary 1 is not the model's own: relative difference",
    ),
    "hooks one above": (
        tapped(1),
        "state at boundary 0 is not the model's own: relative difference",
    ),
    "taps one below": (
        forwarded(shifted(1)),
        "a plain text: its state at boundary 1 is not the model's own",
    ),
    "taps one above": (
        forwarded(shifted(-1)),
        "a plain text: its state at boundary 1 is not the model's own",
    ),
    "not normed": (forwarded(not_normed), "the final state is not the model's own"),
    "normed twice": (forwarded(normed_twice), "the final state is not the model's own"),
    "norm left out": (norm_left_out, "the final norm of the state at boundary"),
    "packing leaks": (leaking, "packing, the second document: its state at boundary"),
    "sibling seen": (appended(sibling_seen), "verifying a tree: its state"),
    "tree in order": (appended(in_order), "verifying a tree: its state"),
    "late positions": (late_chains, "continuing after a commit: its state"),
    "no positions": (no_positions, "a plain text: its state"),
    "other rows": (other_rows, "the logits of some rows is not the model's own"),
    "other head": (other_head, "the logits is not the model's own"),
    "nothing committed": (nothing_committed, "continuing after a commit: its state"),
}


NAMES = ("llama", "qwen3", "massive")


@pytest.mark.parametrize(  # every fault in two dtypes, and every dtype and model
    ("fault", "name", "dtype"),
    [
        (fault, NAMES[(m + n) % 3], dtype)
        for n, dtype in enumerate(DTYPES)
        for m, fault in enumerate(FAULTS)
        if m % 2 == n % 2
    ],
    ids=str,
)
def test_a_planted_fault_is_found(
    fault: str, name: str, dtype: torch.dtype, monkeypatch: Patch
) -> None:
    plant, told = FAULTS[fault]
    target = sound(name, dtype)
    plant(monkeypatch, target)
    with pytest.raises(ValueError, match=rf"^in memory: [^\n]*{told}[^\n]*$"):
        target.prove()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one(by: int, dtype: torch.dtype, monkeypatch: Patch) -> None:
    window(by)(monkeypatch, target := sound("mistral", dtype))
    with pytest.raises(
        ValueError, match="a plain text: its state at boundary 1 is not the model's own"
    ):
        target.prove()


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="SPECDEC_REAL_TARGET names no directory with a real model")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_real_model(dtype: str) -> None:
    """It proves itself, and each fault is found in it."""
    target = Target.load(str(REAL), dtype=dtype)
    target.prove()
    for plant, told in FAULTS.values():
        with Patch.context() as patch:
            plant(patch, target)
            with pytest.raises(ValueError, match=told):
                target.prove()
    target.prove()


def test_a_message_says_what_was_allowed_and_why(monkeypatch: Patch) -> None:
    nothing_committed(monkeypatch, target := sound("llama", torch.bfloat16))
    told = (
        r"\(median over tokens\), allowed 0\.\d+: 0\.3 at most, or 4 times what the model differs from itself by "
        r"\(with eager attention, padded in a batch, in pieces with its cache\) in bfloat16; specdec cannot use Llama"
    )
    with pytest.raises(ValueError, match=told):
        target.prove()


def test_a_model_of_one_attention_is_measured_by_the_other_ways() -> None:
    why = own_states(Target(make("gemma2"))).why
    assert "eager" not in why and "padded in a batch, in pieces" in why


def test_a_way_that_fails_is_left_out(monkeypatch: Patch) -> None:
    target = Target(make("llama"))
    own = target.model.forward

    def forward(**kwargs: Any) -> Any:
        if kwargs.get("use_cache") or len(kwargs["input_ids"]) > 1:
            raise NotImplementedError("no cache, no batch")
        return own(**kwargs)

    monkeypatch.setattr(target.model, "forward", forward)
    assert "by (with eager attention) in" in own_states(target).why
    monkeypatch.setattr(target.model, "set_attn_implementation", lambda name: own(input_ids=None))
    assert "rounding: it runs in no other way" in own_states(target).why
    assert target.config._attn_implementation == "specdec"


def test_a_model_that_contradicts_itself_allows_no_more_than_the_most(monkeypatch: Patch) -> None:
    """One of its own ways is broken: that must not excuse ours."""
    target = sound("llama", torch.float32)
    own = target.model.forward

    def forward(**kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) > 1:
            kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
        return own(**kwargs)

    monkeypatch.setattr(target.model, "forward", forward)
    assert max(own_states(target).allowed) == 0.01
    leaking(monkeypatch, target)
    with pytest.raises(ValueError, match="packing, the second document"):
        target.prove()


def test_a_wrong_head(monkeypatch: Patch) -> None:
    target = Target(make("granite"))
    weight = target.head_weight()
    monkeypatch.setattr(
        target,
        "logits",
        lambda final, rows=None: final @ (weight if rows is None else weight[rows]).T,
    )
    with pytest.raises(ValueError, match="the logits is not the model's own"):
        target.prove()


def test_a_forgotten_window() -> None:
    target = Target(make("mistral"))
    target._parts = target._parts._replace(sliding=(False,) * 4)
    with pytest.raises(ValueError, match="its state at boundary 1"):
        target.prove()


def test_a_model_that_fails_is_reported_in_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"^in memory: Qwen3MoeForCausalLM fails on a short text: [^\n]+$"
    ):
        Target(make("qwen3_moe").double()).prove()


def test_wide_windows_are_proved_too_and_put_back() -> None:
    model = make("mistral")
    model.config.sliding_window = 4096
    target = Target(model)
    target.prove()
    assert model.config.sliding_window == 4096
    target._parts = target._parts._replace(sliding=(False,) * 4)
    with pytest.raises(ValueError, match="its state at boundary 1"):
        target.prove()
    assert model.config.sliding_window == 4096


@pytest.mark.parametrize(
    ("weight", "dtype", "told"),
    [
        (
            "lm_head.weight",
            torch.float32,
            r"logits, .*lm_head\.weight is not finite in float32; check the checkpoint",
        ),
        (
            "model.layers.1.mlp.down_proj.weight",
            torch.float32,
            r"state at boundary 2, .*layers\.1\.mlp\.down_proj",
        ),
        (
            "model.layers.3.mlp.up_proj.weight",
            torch.float32,
            "state at boundary 4, on a short text",
        ),
        (
            "model.embed_tokens.weight",
            torch.bfloat16,
            r"boundary 0, .*embed_tok.* in bfloat16; load it in float32 \(",
        ),
        (
            "model.norm.weight",
            torch.float16,
            r"model\.norm\.weight .* in float16; load it in bfloat16 or float32",
        ),
    ],
)
def test_weights_that_are_no_numbers_are_to_blame(
    weight: str, dtype: torch.dtype, told: str
) -> None:
    model = make("llama").to(dtype)
    with torch.no_grad():
        model.get_parameter(weight)[3] = float("nan")
    with pytest.raises(ValueError, match=rf"^in memory: nan in its [^\n]*{told}[^\n]*$"):
        Target(model).prove()


@pytest.mark.parametrize(
    ("dtype", "size", "told"),
    [
        (
            torch.float16,
            6e4,
            r": -?inf in its logits, .*: float16 overflows in it; load it in bfloat16 or float32",
        ),
        (torch.float32, 1e38, "float32 overflows in it; check the checkpoint"),
    ],
)
def test_a_dtype_that_overflows_is_to_blame(dtype: torch.dtype, size: float, told: str) -> None:
    model = make("llama").to(dtype)
    with torch.no_grad():
        model.lm_head.weight.fill_(size)
    with pytest.raises(ValueError, match=told):
        Target(model).prove()
