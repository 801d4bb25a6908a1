import pytest
import torch

from specdec.drafter import Concat, DrafterSpec, Fusion, LastLayer
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


def test_concat_changes_the_width() -> None:
    config = tiny_config(DrafterSpec(hidden_size=20, aux_layers=[1, 6]))
    assert Concat().build(config)(torch.randn(1, 2, 2, HIDDEN)).shape == (1, 2, 20)


@pytest.mark.parametrize(
    ("layers", "expected"), [(32, (2, 16, 29)), (36, (2, 18, 33)), (28, (2, 14, 25)), (61, (2, 30, 58)), (7, (2, 3, 4))]
)
def test_the_published_boundaries(layers: int, expected: tuple[int, ...]) -> None:
    assert Concat().default_layers(layers) == expected


def test_one_boundary_is_projected_too() -> None:
    """A single state of the drafter's own width still goes through the projection."""
    fusion = Concat().build(tiny_config(DrafterSpec(aux_layers=[3])))
    aux = torch.randn(1, 2, 1, HIDDEN)
    assert not torch.allclose(fusion(aux), aux[:, :, 0])


def test_an_unfinished_fusion_says_so() -> None:
    with pytest.raises(TypeError, match="Fusion must say which layers"):
        Fusion().default_layers(7)
    with pytest.raises(TypeError, match="Fusion must build"):
        Fusion().build(tiny_config(DrafterSpec()))
