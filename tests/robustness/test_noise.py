"""Noise on a drafter's input: its law, its keys, and where it goes in."""

import dataclasses

import pytest
import torch

from specdec.decoding import Chain, SpeculativeDecoder
from specdec.drafter import Drafter, Narrow
from specdec.nn.view import View
from specdec.robustness.noise import EMBEDDING, HIDDEN, Noisy, NoisyEmbedding, NoisyHidden, blurred, gaussian
from tests.robustness.made import Pair
from tests.tiny import HIDDEN as WIDTH
from tests.tiny import presets, tiny_drafter, tiny_target

IDS = torch.tensor([[3, 5, 3, 9], [5, 5, 7, 9]])
PLACES = torch.arange(4).repeat(2, 1)


def inputs(drafter: Drafter) -> tuple[torch.Tensor, torch.Tensor, View]:
    h_BTH = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return IDS, h_BTH, View.packed(torch.zeros_like(IDS))


def test_the_noise_is_standard_normal() -> None:
    z = gaussian(0, torch.arange(40)[:, None].expand(40, 50), torch.arange(50).repeat(40, 1), HIDDEN, 100)
    flat = z.flatten()
    assert abs(flat.mean()) < 0.01 and abs(flat.std() - 1) < 0.01
    assert abs((flat**3).mean()) < 0.03 and abs((flat**4).mean() - 3) < 0.06
    assert abs((z[..., :-1] * z[..., 1:]).mean()) < 0.01  # channels
    assert abs((z[:, :-1] * z[:, 1:]).mean()) < 0.01 and abs((z[:-1] * z[1:]).mean()) < 0.01  # places, tokens


def test_it_depends_on_seed_stream_token_and_place_alone() -> None:
    z = gaussian(1, IDS, PLACES, HIDDEN, 8)
    assert torch.equal(gaussian(1, IDS.flip(0), PLACES, HIDDEN, 8), z.flip(0))  # the order of the batch
    assert torch.equal(gaussian(1, IDS[:1, 2:], PLACES[:1, 2:], HIDDEN, 8), z[:1, 2:])  # the pass
    assert torch.equal(z[0, 1], z[1, 1]) and torch.equal(z[0, 3], z[1, 3])
    assert not torch.equal(z[0, 0], z[0, 2]) and not torch.equal(z[0, 0], z[1, 0])
    assert not torch.equal(z, gaussian(2, IDS, PLACES, HIDDEN, 8))
    assert not torch.equal(z, gaussian(1, IDS, PLACES, EMBEDDING, 8))


def test_its_size_is_a_share_of_each_tokens_own() -> None:
    x = torch.randn(1, 2, 4000, dtype=torch.float64) * torch.tensor([1.0, 300.0])[:, None]
    ids, places = torch.tensor([[1, 2]]), torch.tensor([[0, 1]])
    added = blurred(x, 0.5, gaussian(0, ids, places, HIDDEN, 4000)) - x
    rms = [part.square().mean(-1).sqrt() for part in (added, x)]
    torch.testing.assert_close(rms[0] / rms[1], torch.full((1, 2), 0.5, dtype=torch.float64), rtol=0.05, atol=0)
    half = x.bfloat16()
    assert blurred(half, 0.5, gaussian(0, ids, places, HIDDEN, 4000)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [NoisyHidden, NoisyEmbedding])
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3_1"])
def test_no_noise_is_the_drafter_itself_and_some_is_not(kind: type[Noisy], name: str) -> None:
    drafter = tiny_drafter(presets()[name])
    ids, h, view = inputs(drafter)
    clean = drafter.step(ids, h, view)
    for own, other in zip(clean, kind(drafter, 0.0, 0).step(ids, h, view), strict=True):
        assert torch.equal(own, other)
    assert not torch.allclose(kind(drafter, 0.5, 0).step(ids, h, view).normed_BTH, clean.normed_BTH)
    assert torch.equal(drafter.step(ids, h, view).h_BTH, clean.h_BTH)  # which stays as it was


def test_hidden_noise_is_that_much_on_the_feature() -> None:
    drafter = tiny_drafter(presets()["eagle3"])
    ids, h, view = inputs(drafter)
    noisy = NoisyHidden(drafter, 0.5, 3)
    by_hand = drafter.step(ids, blurred(h, 0.5, gaussian(3, ids, view.positions_BT, HIDDEN, WIDTH)), view)
    assert torch.equal(noisy.step(ids, h, view).h_BTH, by_hand.h_BTH)
    assert torch.equal(
        noisy.fuse(torch.ones(1, 2, 3, WIDTH).double()), drafter.fuse(torch.ones(1, 2, 3, WIDTH).double())
    )


def test_embedding_noise_is_that_much_on_the_embedding() -> None:
    drafter = tiny_drafter(presets()["eagle3"])
    ids, h, view = inputs(drafter)
    e = drafter.embed_tokens(ids)
    read = drafter.entry.read(
        drafter.norms.embed(blurred(e, 0.5, gaussian(3, ids, view.positions_BT, EMBEDDING, WIDTH)))
    )
    assert torch.equal(NoisyEmbedding(drafter, 0.5, 3).step(ids, h, view).h_BTH, drafter.advance(read, h, view).h_BTH)
    assert not drafter.embed_tokens._forward_hooks


@pytest.mark.parametrize(("kind", "half"), [(NoisyHidden, "feature_fc"), (NoisyEmbedding, "token_fc")])
def test_what_a_drafter_does_not_read_cannot_hurt_it(kind: type[Noisy], half: str) -> None:
    drafter = tiny_drafter(dataclasses.replace(presets()["eagle3"], entry=Narrow(bias=False)))
    with torch.no_grad():
        getattr(drafter.entry, half).weight.zero_()
    ids, h, view = inputs(drafter)
    clean = drafter.step(ids, h, view).normed_BTH
    assert torch.equal(kind(drafter, 1.0, 0).step(ids, h, view).normed_BTH, clean)
    other = NoisyEmbedding if kind is NoisyHidden else NoisyHidden
    assert not torch.allclose(other(drafter, 1.0, 0).step(ids, h, view).normed_BTH, clean)


def test_drafts_change_and_the_output_does_not(chat: Pair) -> None:
    target, drafter = tiny_target(), tiny_drafter(presets()["eagle3_1"])
    prompt = list(range(3, 12))
    made = {
        name: SpeculativeDecoder(target, one, Chain(3)).generate(prompt, 24).ids
        for name, one in {"clean": drafter, "noisy": NoisyHidden(drafter, 1.0, 0)}.items()
    }
    assert made["clean"] == made["noisy"]
