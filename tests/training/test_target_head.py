"""The target's distribution, streamed over blocks of its head, against its full logits.

Legend: C positions, D draft vocabulary, V vocabulary, H hidden.
"""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from specdec.drafter import DraftVocab
from specdec.training import target_head as module
from specdec.training.target_head import TargetHead, TargetProbs

HEAD_V, HEAD_H = 61, 8


class Matrix:
    """A target that is its head; it remembers which rows were asked for."""

    def __init__(self, head_VH: Tensor, bias_V: Tensor | float = 0.0) -> None:
        self.head_VH, self.bias_V, self.vocab_size = head_VH, bias_V, len(head_VH)
        self.asked: list[int] = []

    def logits(self, final_BTH: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        logits = final_BTH @ self.head_VH.T + self.bias_V
        out = logits if rows is None else logits[..., rows]
        self.asked.append(out.shape[-1])
        return out


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def vocabulary(size: int, seed: int = 0) -> DraftVocab:
    ids = torch.randperm(HEAD_V, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    return DraftVocab(ids, HEAD_V)


@pytest.fixture(params=[7, 20, 61, 8192])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "BLOCK", request.param)
    return request.param


ALL = frozenset({"log_p_RD", "log_mass_R", "token_R"})
SOME = [ALL, *(ALL - {name} for name in sorted(ALL)), frozenset()]


def head_of(
    target: Matrix, vocab: DraftVocab, reads: Collection[str] = ALL, known: bool = True
) -> TargetHead:
    return TargetHead(target, vocab, reads, known)  # type: ignore[arg-type]


def check_probs(
    found: TargetProbs, full_CV: Tensor, vocab: DraftVocab, reads: Collection[str], known: bool
) -> None:
    ids = vocab.target_ids_D
    p_CV = full_CV.softmax(-1)
    inside_C = p_CV[:, ids].sum(-1)
    torch.testing.assert_close(found.p_CD, p_CV[:, ids] / inside_C[:, None], rtol=1e-12, atol=0)
    if "log_p_RD" in reads:
        torch.testing.assert_close(found.log_p_CD, found.p_CD.log(), rtol=0, atol=1e-12)
    if "token_R" in reads:
        assert found.token_C.tolist() == full_CV[:, ids].argmax(-1).tolist()
    if "log_mass_R" in reads:
        torch.testing.assert_close(found.log_mass_C, inside_C.log(), rtol=0, atol=1e-12)
        assert bool((found.log_mass_C <= 0).all())
    for name, x in zip(("log_p_RD", "log_mass_R"), (found.log_p_CD, found.log_mass_C), strict=True):
        assert bool(x.isnan().all()) is (name not in reads)  # nobody mistakes it for a number
    assert bool((found.token_C == -1).all()) is ("token_R" not in reads)
    assert (
        found.log_p_CD.shape == found.p_CD.shape
        and found.log_mass_C.shape == found.token_C.shape == inside_C.shape
    )
    if known:
        assert found.covered_C.tolist() == [
            best in ids.tolist() for best in full_CV.argmax(-1).tolist()
        ]


@pytest.mark.parametrize("reads", SOME, ids=lambda reads: "+".join(sorted(reads)) or "p")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [1, 5, 40, 61])
def test_it_is_the_full_logits_law(
    block: int, size: int, known: bool, reads: frozenset[str]
) -> None:
    target, vocab, final = (
        Matrix(2 * drawn(HEAD_V, HEAD_H, seed=1)),
        vocabulary(size),
        drawn(400, HEAD_H, seed=2),
    )
    found = head_of(target, vocab, reads, known)(final)
    check_probs(found, final @ target.head_VH.T, vocab, reads, known)
    streamed = known or "log_mass_R" in reads
    assert len({*found.covered_C.tolist()}) == (2 if streamed and size < HEAD_V else 1)


@pytest.mark.parametrize("numbers", [1, 300, 2**17])
def test_it_is_so_in_tiles_of_any_size(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_NUMBERS", numbers)
    target = Matrix(2 * drawn(HEAD_V, HEAD_H, seed=1))
    vocab = vocabulary(40)
    final = drawn(7, HEAD_H, seed=2)
    check_probs(head_of(target, vocab)(final), final @ target.head_VH.T, vocab, ALL, known=True)
