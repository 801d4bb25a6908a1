import dataclasses
import re

import pytest
import torch
from torch import nn

from specdec.drafter import DrafterSpec, Narrow, Norms, PreNorm
from specdec.drafter.layers import Layers
from specdec.nn.norm import RMSNorm
from tests.tiny import HIDDEN, tiny_config


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def table(norms: Norms) -> nn.Module:
    built = norms.build(tiny_config(DrafterSpec())).double()
    torch.manual_seed(0)
    for parameter in built.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return built.requires_grad_(False)


def test_each_state_has_a_norm_of_its_own() -> None:
    aux = torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64) * torch.tensor([1.0, 50.0, 0.02])[:, None]
    made = table(Norms(aux="each")).aux
    want = torch.stack([normed(aux[:, :, n], made[n].weight) for n in range(3)], dim=2)
    torch.testing.assert_close(made(aux), want, rtol=1e-12, atol=0)
    assert len({tuple(norm.weight.tolist()) for norm in made}) == 3


def test_concat_has_one_norm_over_all() -> None:
    aux = torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64) * torch.tensor([1.0, 50.0, 0.02])[:, None]
    made = table(Norms(aux="concat")).aux
    assert made.weight.shape == (3 * HIDDEN,)
    torch.testing.assert_close(made(aux).flatten(2), normed(aux.flatten(2), made.weight), rtol=1e-12, atol=0)


def test_an_unused_site_is_the_identity() -> None:
    made = table(Norms(embed=False, hidden=False, output=False))
    assert [type(getattr(made, site)) for site in ("aux", "embed", "hidden", "input", "output")] == [nn.Identity] * 5
    assert not list(made.parameters())


@pytest.mark.parametrize("site", ["embed", "hidden", "input", "output"])
def test_a_used_site_is_an_rmsnorm_with_the_targets_epsilon(site: str) -> None:
    off = Norms(embed=False, hidden=False, output=False)
    spec = DrafterSpec(entry=Narrow(), norms=dataclasses.replace(off, **{site: True}), recurrence=PreNorm())
    config = dataclasses.replace(tiny_config(spec), rms_norm_eps=0.25)
    made = config.norms.build(config)
    norm = getattr(made, site)
    assert isinstance(norm, RMSNorm) and norm.eps == 0.25 and norm.weight.shape == (HIDDEN,)
    assert len(list(made.parameters())) == 1


def test_aux_norms_are_as_wide_as_the_target() -> None:
    config = tiny_config(DrafterSpec(norms=Norms(aux="each"), hidden_size=20))
    made = config.norms.build(config)
    assert [norm.weight.numel() for norm in made.aux] == [HIDDEN] * 3 and made.output.weight.numel() == 20


def test_the_residual_starts_at_the_feature_raw_or_normed() -> None:
    raw, smooth = torch.ones(1), torch.zeros(1)
    assert table(Norms()).residual(raw, smooth) is raw
    assert table(Norms(residual="normed")).residual(raw, smooth) is smooth


def test_query_and_key_norms_are_as_wide_as_a_head_in_every_layer() -> None:
    spec = DrafterSpec(norms=Norms(query_key=True), num_layers=2)
    config = dataclasses.replace(tiny_config(spec), rms_norm_eps=0.25)
    tables = [layer.attention.norm for layer in Layers(config).layers]
    norms = [norm for table in tables for norm in (table.q_norm, table.k_norm)]
    assert len({id(norm) for norm in norms}) == 4
    assert all(isinstance(norm, RMSNorm) and norm.eps == 0.25 and norm.weight.shape == (12,) for norm in norms)
    plain = Layers(tiny_config(DrafterSpec(num_layers=2))).layers
    assert all(isinstance(layer.attention.norm, nn.Identity) for layer in plain)


@pytest.mark.parametrize(
    ("site", "value", "choices"),
    [
        ("aux", "both", "none, each or concat"),
        ("aux", "each+concat", "none, each or concat"),
        ("residual", "none", "raw or normed"),
    ],
)
def test_an_unknown_choice_is_named(site: str, value: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"^norms.{site} must be {choices}, not '{re.escape(value)}'$"):
        Norms(**{site: value})
