import pytest
import torch

from specdec.drafter import Concat, DrafterSpec, Fusion, LastLayer, WeightedSum
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


def test_weighted_sum_starts_as_the_mean() -> None:
    torch.manual_seed(0)
    fusion = WeightedSum().build(tiny_config(DrafterSpec())).double()
    assert fusion.fc.bias is None and fusion.fc.weight.shape == (HIDDEN, HIDDEN) and fusion.scores_N.shape == (3,)
    aux = torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(fusion(aux), aux.mean(2) @ fusion.fc.weight.T, rtol=0, atol=1e-12)
    assert not WeightedSum.final_norm and WeightedSum.mixes


def test_weighted_sum_weighs_by_softmax() -> None:
    """Scores of log 1, log 2 and log 5 are weights of an eighth, two and five eighths, in the states' order."""
    fusion = WeightedSum().build(tiny_config(DrafterSpec())).double()
    with torch.no_grad():
        fusion.scores_N.copy_(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log() + 3)
    aux = torch.randn(2, 3, 3, HIDDEN, dtype=torch.float64)
    want = (aux[:, :, 0] + 2 * aux[:, :, 1] + 5 * aux[:, :, 2]) / 8 @ fusion.fc.weight.T
    torch.testing.assert_close(fusion(aux), want, rtol=0, atol=1e-12)


def test_weighted_sum_learns_its_weights_and_keeps_the_dtype() -> None:
    fusion = WeightedSum().build(tiny_config(DrafterSpec())).to(torch.bfloat16)
    out = fusion(torch.randn(1, 2, 3, HIDDEN, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert bool((fusion.scores_N.grad != 0).all())


@pytest.mark.parametrize("spec", [Concat(), WeightedSum()], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_states_is_projected_to_any_width(spec: Fusion, count: int) -> None:
    config = tiny_config(DrafterSpec(spec, hidden_size=20, aux_layers=list(range(count))))
    assert spec.build(config)(torch.randn(1, 2, count, HIDDEN)).shape == (1, 2, 20)


@pytest.mark.parametrize(
    ("layers", "expected"), [(32, (2, 16, 29)), (36, (2, 18, 33)), (28, (2, 14, 25)), (61, (2, 30, 58)), (7, (2, 3, 4))]
)
def test_the_published_boundaries(layers: int, expected: tuple[int, ...]) -> None:
    assert Concat().default_layers(layers) == WeightedSum().default_layers(layers) == expected


@pytest.mark.parametrize("spec", [Concat(), WeightedSum()], ids=str)
def test_one_boundary_is_projected_too(spec: Fusion) -> None:
    """A single state of the drafter's own width still goes through the projection, which a width test would skip."""
    fusion = spec.build(tiny_config(DrafterSpec(aux_layers=[3]))).double()
    aux = torch.randn(1, 2, 1, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(fusion(aux), aux[:, :, 0] @ fusion.fc.weight.T, rtol=0, atol=1e-12)


def test_an_unfinished_fusion_says_so() -> None:
    with pytest.raises(TypeError, match="Fusion must say which layers"):
        Fusion().default_layers(7)
    with pytest.raises(TypeError, match="Fusion must build"):
        Fusion().build(tiny_config(DrafterSpec()))
