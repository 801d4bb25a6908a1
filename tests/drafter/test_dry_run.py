"""Parts that do not fit are told by name, with what they returned and what was wanted."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.drafter import (
    Drafter,
    DrafterConfig,
    DrafterSpec,
    Entered,
    Entry,
    EntryModule,
    Fusion,
    Norms,
    Recurrence,
    dry_run,
)
from tests.tiny import HIDDEN, VOCAB, all_specs, presets, tiny_config, tiny_drafter

QKV = (4 + 2 * 2) * 12  # queries, keys and values of all heads


class Does(nn.Module):
    """A module that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@dataclass(frozen=True)
class MyFusion(Fusion):
    function: Callable[[Tensor], Any] = lambda aux: aux.mean(2)

    def default_layers(self, num_target_layers: int) -> tuple[int, ...]:
        return (1, 2)

    def build(self, config: DrafterConfig) -> nn.Module:
        return Does(self.function)


class Enters(EntryModule):
    """An entry that is two functions."""

    def __init__(self, read: Callable[[Tensor], Any], function: Callable[..., Any]) -> None:
        super().__init__()
        self.read, self.function = read, function  # type: ignore[method-assign]

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@dataclass(frozen=True)
class MyEntry(Entry):
    function: Callable[..., Any] = lambda read, f, h, norms: Entered(read + f, None, h)
    read: Callable[[Tensor], Any] = lambda e: e

    def build(self, config: DrafterConfig) -> EntryModule:
        return Enters(self.read, self.function)


@dataclass(frozen=True)
class MyRecurrence(Recurrence):
    function: Callable[[Tensor, Tensor], Any] = lambda out, normed: (out + normed) / 2

    def build(self, config: DrafterConfig) -> nn.Module:
        return Does(self.function)


def build(**parts: Any) -> Drafter:
    spec = DrafterSpec(draft_vocab_size=40, norms=Norms(), **parts)
    return Drafter(tiny_config(spec), torch.arange(40))


def test_every_part_of_ours_fits() -> None:
    for spec in itertools.islice(all_specs(), 0, None, 9):
        dry_run(tiny_drafter(spec))
    dry_run(
        Drafter(tiny_config(DrafterSpec(hidden_size=20, aux_layers=[1, 6])), torch.arange(VOCAB))
    )
    dry_run(tiny_drafter(presets()["eagle3_1"], dtype=torch.bfloat16))


def test_parts_of_ones_own_fit() -> None:
    dry_run(build(fusion=MyFusion(), entry=MyEntry(), recurrence=MyRecurrence()))
    beside = MyEntry(
        lambda read, f, h, norms: Entered(f, read, h),
        lambda e: e.mean(-1, True).expand(-1, -1, QKV),
    )
    dry_run(build(entry=beside))


WRONG = {
    "fusion keeps the states": (
        {"fusion": MyFusion(lambda aux: aux)},
        "fusion MyFusion returned shape (2, 3, 2, 32) of torch.float32, wanted (2, 3, 32) of torch.float32",
    ),
    "fusion of another width": (
        {"fusion": MyFusion(lambda aux: aux.flatten(2))},
        "fusion MyFusion returned shape (2, 3, 64) of torch.float32, wanted (2, 3, 32) of torch.float32: mend the mod",
    ),
    "fusion over the wrong axis": (
        {"fusion": MyFusion(lambda aux: aux.mean(1))},
        "fusion MyFusion returned shape (2, 2, 32)",
    ),
    "fusion of another dtype": (
        {"fusion": MyFusion(lambda aux: aux.mean(2).double())},
        "fusion MyFusion returned shape (2, 3, 32) of torch.float64, wanted (2, 3, 32) of torch.float32",
    ),
    "fusion that fails": (
        {"fusion": MyFusion(lambda aux: aux @ torch.zeros(7, 32))},
        "fusion MyFusion cannot take tensors of shape (2, 3, 2, 32): ",
    ),
    "fusion that takes something else": (
        {"fusion": MyFusion(lambda aux, mask: aux)},  # type: ignore[arg-type, misc]
        "fusion MyFusion cannot take tensors of shape (2, 3, 2, 32): ",
    ),
    "fusion that returns several": (
        {"fusion": MyFusion(lambda aux: aux.unbind(2))},
        "fusion MyFusion returned a tuple, wanted a tensor of shape (2, 3, 32)",
    ),
    "entry that cannot read": (
        {"entry": MyEntry(read=lambda e: e @ torch.zeros(7, 32))},
        "entry MyEntry cannot take tensors of shape (2, 3, 32): ",
    ),
    "entry that reads several": (
        {"entry": MyEntry(read=lambda e: (e, e))},
        "entry MyEntry read tokens into a tuple, wanted a tensor of shape (2, 3, ...)",
    ),
    "entry that reads over the wrong axis": (
        {"entry": MyEntry(read=lambda e: e.mean(1))},
        "entry MyEntry read tokens into shape (2, 32), wanted a tensor of shape (2, 3, ...)",
    ),
    "entry without a residual": (
        {"entry": MyEntry(lambda read, f, h, norms: read + f)},
        "entry MyEntry returned a Tensor, wanted Entered(attn_input, qkv_bias, residual)",
    ),
    "entry with a wide block": (
        {"entry": MyEntry(lambda read, f, h, norms: Entered(torch.cat([read, f], -1), None, h))},
        "entry MyEntry returned shape (2, 3, 64) of torch.float32 as attn_input_BTH, "
        "wanted (2, 3, 32) of torch.float32",
    ),
    "entry with something else beside the block": (
        {"entry": MyEntry(lambda read, f, h, norms: Entered(f, read, h))},
        "entry MyEntry returned shape (2, 3, 32) of torch.float32 as qkv_bias_BTW, wanted (2, 3, 96) of torch.float32",
    ),
    "entry without a block": (
        {"entry": MyEntry(lambda read, f, h, norms: Entered(None, read, h))},  # type: ignore[arg-type]
        "entry MyEntry returned a NoneType as attn_input_BTH, wanted a tensor of shape (2, 3, 32)",
    ),
    "entry with a wide residual": (
        {
            "entry": MyEntry(
                lambda read, f, h, norms: Entered(read + f, None, torch.cat([h, h], -1))
            )
        },
        "entry MyEntry returned shape (2, 3, 64) of torch.float32 as residual_BTH, wanted (2, 3, 32) of torch.float32",
    ),
    "entry that fails": (
        {
            "entry": MyEntry(
                lambda read, f, h, norms: Entered(read[5], None, h), lambda e: e[..., :5]
            )
        },
        "entry MyEntry cannot take tensors of shape (2, 3, 5), (2, 3, 32), (2, 3, 32): ",
    ),
    "recurrence that pools": (
        {"recurrence": MyRecurrence(lambda out, normed: out.mean(1))},
        "recurrence MyRecurrence returned shape (2, 32) of torch.float32, wanted (2, 3, 32) of torch.float32",
    ),
    "recurrence that returns nothing": (
        {"recurrence": MyRecurrence(lambda out, normed: None)},
        "recurrence MyRecurrence returned a NoneType, wanted a tensor of shape (2, 3, 32)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_that_does_not_fit(name: str) -> None:
    parts, message = WRONG[name]
    drafter = build(**parts)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is checked below
        dry_run(drafter)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_it_runs_on_the_meta_device() -> None:
    config = tiny_config(DrafterSpec(draft_vocab_size=40))
    ids_D = torch.arange(40)
    with torch.device("meta"):
        dry_run(Drafter(config, ids_D))
        wrong = Drafter(
            dataclasses.replace(config, recurrence=MyRecurrence(lambda out, normed: out.mean(1))),
            ids_D,
        )
    with pytest.raises(ValueError, match=r"^recurrence MyRecurrence returned shape"):
        dry_run(wrong)


def test_it_leaves_no_trace() -> None:
    """Neither in the modules' modes and figures, nor in the random numbers that follow; nor when a part fails."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dropout = nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5)

        def forward(self, aux: Tensor) -> Tensor:
            return self.dropout(self.norm(aux.mean(2).mT).mT)

    for recurrence in (MyRecurrence(), MyRecurrence(lambda out, normed: out[0])):
        drafter = build(fusion=MyFusion(), recurrence=recurrence)
        drafter.fusion = Counting()
        drafter.fusion.dropout.eval()
        before = {name: value.clone() for name, value in drafter.state_dict().items()}
        modes = [module.training for module in drafter.modules()]
        torch.manual_seed(0)
        fits = recurrence == MyRecurrence()
        with (
            contextlib.nullcontext()
            if fits
            else pytest.raises(ValueError, match=r"^recurrence MyRecurrence")
        ):
            dry_run(drafter)
        drawn = torch.rand(1)
        torch.manual_seed(0)
        assert torch.equal(drawn, torch.rand(1))
        assert (
            modes == [module.training for module in drafter.modules()]
            and False in modes
            and True in modes
        )
        assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
        assert all(parameter.grad is None for parameter in drafter.parameters())
