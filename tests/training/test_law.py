"""The streamed law against the full logits.

Legend: C positions, H hidden, D draft vocabulary, V vocabulary.
"""

import math
from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from specdec.drafter import DraftVocab
from specdec.training import law as module
from specdec.training.law import Law, TargetLaw

V, H = 61, 8


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


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vocabulary(size: int, seed: int = 0) -> DraftVocab:
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    return DraftVocab(ids, V)


@pytest.fixture(params=[7, 20, 61, 8192])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "BLOCK", request.param)
    return request.param


ALL = frozenset({"log_p_RD", "log_mass_R", "token_R"})
SOME = [ALL, *(ALL - {name} for name in sorted(ALL)), frozenset()]


def law_of(target: Matrix, vocab: DraftVocab, reads: Collection[str] = ALL, known: bool = True) -> TargetLaw:
    return TargetLaw(target, vocab, reads, known)  # type: ignore[arg-type]


def check(found: Law, full_CV: Tensor, vocab: DraftVocab, reads: Collection[str], known: bool) -> None:
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
    assert found.log_p_CD.shape == found.p_CD.shape and found.log_mass_C.shape == found.token_C.shape == inside_C.shape
    if known:
        assert found.known_C.tolist() == [best in ids.tolist() for best in full_CV.argmax(-1).tolist()]


@pytest.mark.parametrize("reads", SOME, ids=lambda reads: "+".join(sorted(reads)) or "p")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [1, 5, 40, 61])
def test_it_is_the_full_logits_law(block: int, size: int, known: bool, reads: frozenset[str]) -> None:
    target, vocab, final = Matrix(2 * random(V, H, seed=1)), vocabulary(size), random(400, H, seed=2)
    found = law_of(target, vocab, reads, known)(final)
    check(found, final @ target.head_VH.T, vocab, reads, known)
    streamed = known or "log_mass_R" in reads
    assert len({*found.known_C.tolist()}) == (2 if streamed and size < V else 1)


@pytest.mark.parametrize("size", [1, 5, 61])
def test_only_the_rows_that_are_needed_are_multiplied(block: int, size: int) -> None:
    target, vocab, final = Matrix(random(V, H, seed=1)), vocabulary(size), random(3, H, seed=2)
    for reads in ({"log_p_RD", "token_R"}, {"token_R"}, set()):
        target.asked.clear()
        law_of(target, vocab, reads, known=False)(final)
        assert target.asked == [size]
    for reads, known in (({"log_mass_R"}, False), (set(), True), (ALL, True)):
        target.asked.clear()
        law_of(target, vocab, reads, known)(final)
        assert sum(target.asked) == V and (vocab.complete or max(target.asked) <= block)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_tie_counts_as_known(block: int, dtype: torch.dtype) -> None:
    """As argmax may give either: a draft token as likely as the best of all is right."""
    head = torch.zeros(V, H, dtype=dtype)
    head[3], head[50] = 1, 1  # 3 is in the draft vocabulary, 50 is not
    vocab = DraftVocab(torch.tensor([1, 3, 20]), V)
    final = torch.ones(2, H, dtype=dtype)
    found = law_of(Matrix(head), vocab)(final)
    assert found.known_C.tolist() == [True, True] and found.token_C.tolist() == [1, 1]
    head[50] = 1.125
    assert law_of(Matrix(head), vocab)(final).known_C.tolist() == [False, False]


def test_mass_is_what_the_whole_law_has_there(block: int) -> None:
    """By definition, from almost nothing to all of it."""
    vocab = DraftVocab(torch.tensor([0, 30, 60]), V)
    for outside in (-200.0, 0.0, 200.0):
        bias = torch.full((V,), outside, dtype=torch.float64)
        bias[vocab.target_ids_D] = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
        target = Matrix(torch.zeros(V, H, dtype=torch.float64), bias)
        found = law_of(target, vocab)(torch.ones(1, H, dtype=torch.float64))
        draft = math.log(1 + math.e + math.e**2)
        wanted = draft - max(draft, outside) - math.log1p(0)  # the one or the other is all, but for outside = 0
        if outside == 0:
            wanted = draft - math.log(58 + 1 + math.e + math.e**2)
        elif outside > 0:
            wanted = draft - (outside + math.log(58))
        assert math.isclose(float(found.log_mass_C), wanted, rel_tol=1e-12, abs_tol=1e-12)
        assert found.log_mass_C <= 0 and math.isclose(float(found.p_CD.sum()), 1, rel_tol=1e-12)
        assert found.known_C.tolist() == [outside < 2]


def test_a_narrow_target_is_read_in_float32() -> None:
    """Its logits are bfloat16, and what is made of them is not."""
    vocab, target = vocabulary(40), Matrix(random(V, H, seed=1, dtype=torch.bfloat16))
    final = random(9, H, seed=2, dtype=torch.bfloat16)
    for reads, known in ((ALL, True), ({"log_p_RD"}, False)):
        found = law_of(target, vocab, reads, known)(final)
        assert found.p_CD.dtype == found.log_p_CD.dtype == found.log_mass_C.dtype == torch.float32
        full = target.logits(final).float()[:, vocab.target_ids_D]
        torch.testing.assert_close(found.log_p_CD, full.log_softmax(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("at", [slice(1, 3), torch.tensor([4, 0, 4])])
def test_some_positions_of_it(at: slice | Tensor) -> None:
    target, vocab, final = Matrix(random(V, H, seed=1)), vocabulary(5), random(6, H, seed=2)
    law = law_of(target, vocab)
    for some, directly in zip(law(final).at(at), law(final[at]), strict=True):
        torch.testing.assert_close(some, directly, rtol=0, atol=1e-14)
