"""What the parts of every axis compute, and a norm of the user's own."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from specdec.drafter import (
    Concat,
    Drafter,
    DrafterConfig,
    DrafterSpec,
    Entry,
    EntryModule,
    Fusion,
    LastLayer,
    Narrow,
    Norm,
    Norms,
    PostNorm,
    PreNorm,
    Recurrence,
    ScalarMix,
    dry_run,
    load_drafter,
    save_drafter,
)
from specdec.export import switches
from specdec.nn.layers import RMSNorm
from specdec.nn.view import View
from specdec.utils.imports import allowing
from tests.published import published
from tests.tiny import HIDDEN, tiny_config


def test_the_last_layer_is_the_feature_as_it_is() -> None:
    aux = torch.randn(2, 3, 1, HIDDEN)
    assert torch.equal(LastLayer().build(tiny_config(DrafterSpec()))(aux), aux[:, :, 0])
    assert LastLayer().default_layers(32) == (32,)
    assert LastLayer.final_norm and not LastLayer.mixes


def test_concat_projects_low_then_middle_then_high() -> None:
    torch.manual_seed(0)
    fusion = Concat().build(tiny_config(DrafterSpec())).double()
    low, middle, high = fusion.fc.weight.split(HIDDEN, dim=1)
    assert fusion.fc.bias is None and fusion.fc.weight.shape == (HIDDEN, 3 * HIDDEN)
    aux = torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64)
    want = aux[:, :, 0] @ low.T + aux[:, :, 1] @ middle.T + aux[:, :, 2] @ high.T
    torch.testing.assert_close(fusion(aux), want, rtol=0, atol=1e-12)
    assert not Concat.final_norm and Concat.mixes


def test_weighted_sum_weighs_by_softmax() -> None:
    """Scores of log 1, log 2 and log 5 are weights of an eighth, two and five eighths, in the states' order."""
    fusion = ScalarMix().build(tiny_config(DrafterSpec())).double()
    with torch.no_grad():
        fusion.scores_N.copy_(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log() + 3)
    aux = torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64)
    want = (aux[:, :, 0] + 2 * aux[:, :, 1] + 5 * aux[:, :, 2]) / 8 @ fusion.fc.weight.T
    torch.testing.assert_close(fusion(aux), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [Concat(), ScalarMix()], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_states_is_projected_to_any_width(spec: Fusion, count: int) -> None:
    config = tiny_config(DrafterSpec(spec, hidden_size=20, aux_layers=list(range(count))))
    assert spec.build(config)(torch.randn(1, 2, count, HIDDEN)).shape == (1, 2, 20)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(32, (2, 16, 29)), (36, (2, 18, 33)), (28, (2, 14, 25)), (61, (2, 30, 58)), (7, (2, 3, 4))],
)
def test_the_published_boundaries(layers: int, expected: tuple[int, ...]) -> None:
    assert Concat().default_layers(layers) == ScalarMix().default_layers(layers) == expected


@pytest.mark.parametrize("base", [Fusion, Entry, Recurrence])
def test_an_unfinished_part_says_so(base: type) -> None:
    with pytest.raises(TypeError, match=f"{base.__name__} must build"):
        base().build(tiny_config(DrafterSpec()))


CONFIG = tiny_config(DrafterSpec(entry=Narrow(), norms=Norms(aux="each", input=True)))
QKV = (4 + 2 * 2) * 12
E, F, H = (torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(3))
PLAIN = Norms().build(CONFIG)


def random(entry: Entry) -> EntryModule:
    torch.manual_seed(0)
    made = entry.build(CONFIG)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.requires_grad_(False)


def test_wide_is_one_matrix_over_embedding_then_feature() -> None:
    """Published drafters have [e; f] before queries, keys and values, 2H channels."""
    drafter = Drafter(tiny_config(DrafterSpec(draft_vocab_size=40)), torch.arange(40)).double()
    w, at = published(drafter), "layers.layers.0.attention"
    matrix = torch.cat([w[f"{at}.{part}_proj.weight"] for part in "qkv"])
    e, f, h = E.double(), F.double(), H.double()
    block, beside, *_ = drafter.entry(drafter.entry.read(e), f, h, drafter.norms)
    got = drafter.layers.layers[0].attention.qkv_proj(block) + beside
    torch.testing.assert_close(got, torch.cat([e, f], dim=-1) @ matrix.T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bias", [True, False])
def test_narrow_is_one_matrix_over_embedding_then_feature(bias: bool) -> None:
    spec = DrafterSpec(entry=Narrow(bias), draft_vocab_size=40)
    drafter = Drafter(tiny_config(spec), torch.arange(40)).double()
    if bias:
        nn.init.normal_(drafter.entry.feature_fc.bias)
    w = published(drafter)
    assert w["entry.fc.weight"].shape == (HIDDEN, 2 * HIDDEN) and ("entry.fc.bias" in w) == bias
    e, f, h = E.double(), F.double(), H.double()
    want = nn.functional.linear(
        torch.cat([e, f], dim=-1), w["entry.fc.weight"], w.get("entry.fc.bias")
    )
    got = drafter.entry(drafter.entry.read(e), f, h, drafter.norms).residual_BTH
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_narrow_can_normalise_the_blocks_input_and_not_the_residual() -> None:
    entry, norms = random(Narrow()), CONFIG.norms.build(CONFIG)
    entered = entry(entry.read(E), F, H, norms)
    assert torch.equal(entered.attn_input_BTH, norms.input(entered.residual_BTH))
    torch.testing.assert_close(
        entered.attn_input_BTH.square().mean(-1), torch.ones(2, 3), rtol=1e-3, atol=0
    )
    assert not torch.allclose(entered.attn_input_BTH, entered.residual_BTH)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def table(norms: Norms) -> nn.Module:
    built = norms.build(tiny_config(DrafterSpec())).double()
    torch.manual_seed(0)
    for parameter in built.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return built.requires_grad_(False)


def test_each_state_has_a_norm_of_its_own() -> None:
    aux = (
        torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64) * torch.tensor([1.0, 50.0, 0.02])[:, None]
    )
    made = table(Norms(aux="each")).aux
    want = torch.stack([normed(aux[:, :, n], made[n].weight) for n in range(3)], dim=2)
    torch.testing.assert_close(made(aux), want, rtol=1e-12, atol=0)
    assert len({tuple(norm.weight.tolist()) for norm in made}) == 3


def test_concat_has_one_norm_over_all() -> None:
    aux = (
        torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64) * torch.tensor([1.0, 50.0, 0.02])[:, None]
    )
    made = table(Norms(aux="concat")).aux
    assert made.weight.shape == (3 * HIDDEN,)
    torch.testing.assert_close(
        made(aux).flatten(2), normed(aux.flatten(2), made.weight), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("site", ["embed", "hidden", "input", "output"])
def test_a_used_site_is_an_rmsnorm_with_the_targets_epsilon(site: str) -> None:
    off = Norms(embed=False, hidden=False, output=False)
    spec = DrafterSpec(
        entry=Narrow(), norms=dataclasses.replace(off, **{site: True}), recurrence=PreNorm()
    )
    config = dataclasses.replace(tiny_config(spec), rms_norm_eps=0.25)
    made = config.norms.build(config)
    norm = getattr(made, site)
    assert isinstance(norm, RMSNorm) and norm.eps == 0.25 and norm.weight.shape == (HIDDEN,)
    assert len(list(made.parameters())) == 1


@pytest.mark.parametrize(
    ("site", "value", "choices"),
    [
        ("aux", "both", "none, each, concat or a Norm"),
        ("aux", "each+concat", "none, each, concat or a Norm"),
        ("residual", "none", "raw or normed"),
    ],
)
def test_an_unknown_choice_is_named(site: str, value: str, choices: str) -> None:
    with pytest.raises(
        ValueError, match=f"^norms.{site} must be {choices}, not '{re.escape(value)}'$"
    ):
        Norms(**{site: value})


@dataclass(frozen=True)
class Centred(Norm):
    """A norm that a user wrote."""

    bias: bool = True

    def build(self, config: DrafterConfig, width: int) -> nn.Module:
        return nn.LayerNorm(width, config.rms_norm_eps, bias=self.bias)


@dataclass(frozen=True)
class Halving(Norm):
    def build(self, config: DrafterConfig, width: int) -> nn.Module:
        return nn.AvgPool1d(2)


SITES = ("aux", "embed", "hidden", "input", "output", "query_key")


@pytest.mark.parametrize("site", SITES)
def test_a_norm_of_ones_own_stands_at_any_site(site: str, tmp_path: Path) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--drafter", type=DrafterSpec)
    own = {"class_path": "Centred", "init_args": {"bias": False}}
    given = {"entry": "Narrow", "norms": {site: own, "residual": "raw"}, "draft_vocab_size": 40}
    with allowing([__name__]):
        spec = parser.instantiate(parser.parse_object({"drafter": given})).drafter
    config = tiny_config(spec)
    assert getattr(config.norms, site) == Centred(bias=False)
    drafter = Drafter(config, torch.arange(40)).eval()
    dry_run(drafter)
    widths = {"aux": [HIDDEN] * 3, "query_key": [12] * 2}.get(site, [HIDDEN])
    found = [m for m in drafter.modules() if isinstance(m, nn.LayerNorm)]
    assert [m.normalized_shape[0] for m in found] == widths
    save_drafter(drafter, tmp_path / "drafter")
    back = load_drafter(tmp_path / "drafter")
    assert back.config == config
    ids, view = torch.arange(4)[None], View.packed(torch.zeros(1, 4, dtype=torch.int64))
    feature = drafter.fuse(torch.randn(1, 4, 3, HIDDEN))
    assert torch.equal(back.step(ids, feature, view).h_BTH, drafter.step(ids, feature, view).h_BTH)
    subject = switches.Subject(config, own_embedding=False, own_head=True, entry_bias=False)
    assert "custom components" in [
        switch.name for switch, _ in switches.lint(subject, switches.VLLM)
    ]


@pytest.mark.parametrize("site", SITES)
def test_a_norm_that_does_not_fit_is_told_by_its_site(site: str) -> None:
    spec = DrafterSpec(entry=Narrow(), norms=Norms(**{site: Halving()}), draft_vocab_size=40)
    with pytest.raises(ValueError, match=rf"^norms\.{site} (returned shape|cannot take)"):
        dry_run(Drafter(tiny_config(spec), torch.arange(40)))


def test_what_returns() -> None:
    out, normed = torch.ones(1), torch.zeros(1)
    assert PreNorm().build(CONFIG)(out, normed) is out
    assert PostNorm().build(CONFIG)(out, normed) is normed
