"""Drafters that look up what they read of a token."""

import pytest
import torch

from specdec.drafter import tabled
from specdec.drafter.well_read import WellRead
from specdec.nn.view import View
from specdec.robustness.noise import NoisyEmbedding
from tests.tiny import HIDDEN, VOCAB, biased, presets, tiny_drafter, variants

IDS = torch.arange(VOCAB)[None]
SPECS = {**presets(), "biased": biased(), "two_layer": variants()["two_layer"]}


@pytest.mark.parametrize("name", SPECS)
@torch.inference_mode()
def test_it_steps_as_the_drafter_does(name: str) -> None:
    drafter = tiny_drafter(SPECS[name])
    known = tabled(drafter)
    assert isinstance(known, WellRead) and known.config is drafter.config
    h = torch.randn(1, VOCAB, HIDDEN, dtype=torch.float64)
    view = View.packed(torch.zeros(1, VOCAB, dtype=torch.int64))
    wanted = drafter.step(IDS, h, view)
    for got, want in zip(known.step(IDS, h, view), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    drafter.embed_tokens.weight.zero_()  # where it does not look again
    assert torch.equal(known.read(IDS, h.dtype)[0], known.read_V)
    assert not torch.allclose(drafter.step(IDS, h, view).h_BTH, wanted.h_BTH)
    torch.testing.assert_close(known.step(IDS, h, view).h_BTH, wanted.h_BTH, rtol=0, atol=1e-12)


def test_an_entry_may_read_of_any_shape() -> None:
    drafter = tiny_drafter(presets()["eagle3_1"])
    plain = drafter.entry.read
    drafter.entry.read = lambda e: plain(e).unflatten(-1, (2, -1))  # type: ignore[method-assign]
    known = tabled(drafter)
    assert isinstance(known, WellRead) and known.read_V.dim() == 3
    assert torch.equal(known.read(IDS, torch.float64), drafter.read(IDS, torch.float64))


def test_a_table_serves_all_until_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny_drafter(presets()["eagle3_1"])
    monkeypatch.setattr("specdec.drafter.well_read.PIECE", 7)
    known = tabled(drafter)
    assert tabled(drafter) is known
    with torch.no_grad():
        drafter.embed_tokens.weight.neg_()
    other = tabled(drafter)
    assert isinstance(known, WellRead) and isinstance(other, WellRead) and other is not known
    torch.testing.assert_close(other.read(IDS, torch.float64), drafter.read(IDS, torch.float64), rtol=0, atol=1e-12)
    assert not torch.allclose(other.read_V, known.read_V)


def test_the_drafter_stays_as_it_is() -> None:
    drafter = tiny_drafter(presets()["eagle3_1"])
    before = {name: (x.data_ptr(), x.clone()) for name, x in drafter.state_dict().items()}
    buffers = [name for name, _ in drafter.named_buffers()]
    known = tabled(drafter)
    assert [name for name, _ in drafter.named_buffers()] == buffers and "read_V" in dict(known.named_buffers())
    assert set(known.state_dict()) == set(before)
    assert all(x.data_ptr() == before[name][0] for name, x in known.state_dict().items())
    assert all(torch.equal(x, before[name][1]) for name, x in drafter.state_dict().items())


def test_large_tables_and_drafters_that_read_more_than_tokens_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny_drafter(presets()["eagle3_1"])
    noisy = NoisyEmbedding(drafter, 0.5, 0)
    assert tabled(noisy) is noisy
    known = tabled(drafter)
    assert isinstance(known, WellRead)
    monkeypatch.setattr("specdec.drafter.well_read.MOST", known.read_V.nbytes)
    assert isinstance(tabled(drafter), WellRead)
    monkeypatch.setattr("specdec.drafter.well_read.MOST", known.read_V.nbytes - 1)
    assert tabled(drafter) is drafter
    monkeypatch.undo()
    monkeypatch.setattr("specdec.drafter.well_read.multiplies_bfloat16", lambda: False)
    assert isinstance(tabled(drafter), WellRead) and tabled(half := drafter.bfloat16()) is half
