"""Confidence beside acceptance: the definitions, beside torchmetrics', and beside what the same chains add up to."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from specdec.diagnostics.anchors import AnchoredText
from specdec.diagnostics.calibration import (
    ALL_KINDS,
    BINS,
    CONFIDENCES,
    FINE_BINS,
    Binned,
    binned,
    calibration,
    confidences,
)
from specdec.diagnostics.drift_measure import SERIES, drafted
from tests.diagnostics.made import SPECS, drafter, places, target, texts
from tests.tiny import tiny_drafter

A, K, D = 400, 4, 7
KIND = {name: row for row, name in enumerate(CONFIDENCES)}


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    """Distributions of chains, and whether each draft is right: more often where it is likely."""
    generator = torch.Generator().manual_seed(seed)
    log_probs_AKD = (3 * torch.randn(A, K, D, generator=generator)).log_softmax(-1)
    right_AK = torch.rand(A, K, generator=generator) < log_probs_AKD.exp().amax(-1) ** 2
    return log_probs_AKD, right_AK


def as_binned(bins_KR3: Tensor) -> Binned:
    return Binned(bins_KR3.sum(0).flatten()[None].numpy())


def test_every_kind_of_confidence_is_what_it_says() -> None:
    probs_AKD = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    of_chain = confidences(probs_AKD.log())[0].T.tolist()
    assert of_chain[KIND["top"]] == pytest.approx([0.7, 0.5, 1.0])
    assert of_chain[KIND["margin"]] == pytest.approx([0.5, 0.0, 1.0])
    entropy = -(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1))
    wanted = [1 - entropy / math.log(3), 1 - math.log(2) / math.log(3), 1.0]
    assert of_chain[KIND["entropy"]] == pytest.approx(wanted)
    assert of_chain[KIND["product"]] == pytest.approx([0.7, 0.35, 0.35])


def test_a_confidence_heads_estimates_are_two_more_kinds() -> None:
    """As they are, and multiplied along the chain, where they are compared with the whole chain so far."""
    log_probs_AKD, right_AK = drawn(2)
    head_AK = log_probs_AKD.exp().amax(-1) ** 2
    confidence_AKC = confidences(log_probs_AKD, head_AK)
    assert confidence_AKC.shape[-1] == len(ALL_KINDS) == len(CONFIDENCES) + 2
    kinds = dict(zip(ALL_KINDS, confidence_AKC.unbind(-1), strict=True))
    torch.testing.assert_close(kinds["head"].float(), head_AK)
    torch.testing.assert_close(kinds["head_product"].float(), head_AK.cumprod(1))
    measured = calibration([binned(confidence_AKC, right_AK)])
    assert measured.keys() == ALL_KINDS.keys()
    # drafts were drawn with these chances: the head is calibrated, the top probability is too sure
    assert measured["head"]["all_steps"]["calibration_error"]["mean"] < 0.06
    assert measured["top"]["all_steps"]["calibration_error"]["mean"] > 0.1
    whole_chains = measured["head_product"]["all_steps"]["drafts"]
    assert whole_chains == A * K > measured["head"]["all_steps"]["drafts"]


def test_the_error_is_that_of_torchmetrics() -> None:
    log_probs_AKD, right_AK = drawn(0)
    confidence_AKC = confidences(log_probs_AKD)
    bins_CKR3 = binned(confidence_AKC, right_AK)
    so_far_AK = right_AK.cumprod(1).bool()
    before_AK = torch.cat([torch.ones(A, 1, dtype=torch.bool), so_far_AK[:, :-1]], 1)
    for kind in CONFIDENCES:
        counts_AK = torch.ones_like(before_AK) if kind == "product" else before_AK
        confidence_N = confidence_AKC[..., KIND[kind]][counts_AK]
        accepted_N = so_far_AK[counts_AK].long()
        measured = as_binned(bins_CKR3[KIND[kind]])
        error = measured.error()
        assert error is not None
        wanted = binary_calibration_error(confidence_N, accepted_N, n_bins=BINS, norm="l1")
        assert error.mean == pytest.approx(float(wanted), abs=1e-6)
        order = measured.ranking()
        assert order is not None
        # drafts of one thousandth are a tie here
        assert order.mean == pytest.approx(float(binary_auroc(confidence_N, accepted_N)), abs=2e-3)


def test_unlikely_drafts_are_ranked_too() -> None:
    """All of them lie in the first tenth."""
    confidence_A1 = torch.linspace(0, 0.09, A, dtype=torch.float64)[:, None]
    right_A1 = torch.arange(A)[:, None] % 400 >= 200
    bins_CKR3 = binned(confidence_A1[..., None].expand(-1, -1, len(CONFIDENCES)), right_A1)
    order = as_binned(bins_CKR3[KIND["top"]]).ranking()
    assert order is not None and order.mean > 0.99


def test_a_draft_behind_a_rejected_one_counts_in_no_bin_but_the_chains() -> None:
    right_AK = torch.tensor([[True, False, True, True]])
    confidence_AKC = torch.full((1, K, len(CONFIDENCES)), 0.55, dtype=torch.float64)
    bins_CKR3 = binned(confidence_AKC, right_AK)
    assert bins_CKR3[KIND["top"], :, 550, 0].tolist() == [1, 1, 0, 0]
    assert bins_CKR3[KIND["top"], :, 550, 2].tolist() == [1, 0, 0, 0]
    assert bins_CKR3[KIND["product"], :, 550, 0].tolist() == [1, 1, 1, 1]
    assert bins_CKR3[KIND["product"], :, 550, 2].tolist() == [1, 0, 0, 0]
    assert bins_CKR3[:, :, [*range(550), *range(551, FINE_BINS)]].sum() == 0


def test_full_confidence_lies_in_the_last_bin() -> None:
    bins_CKR3 = binned(torch.ones(2, 1, len(CONFIDENCES)), torch.ones(2, 1, dtype=torch.bool))
    assert bins_CKR3[:, 0, FINE_BINS - 1].tolist() == [[2, 2, 2]] * len(CONFIDENCES)


@pytest.mark.parametrize(("over", "least", "most"), [(0.0, 0.0, 0.03), (0.2, 0.15, 0.25)])
def test_an_overconfident_drafter_is_told_from_a_calibrated_one(
    over: float, least: float, most: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = []
    for _ in range(20):
        chance_A1 = 0.25 + 0.5 * torch.rand(A, 1, generator=generator, dtype=torch.float64)
        right_A1 = torch.rand(A, 1, generator=generator) < chance_A1
        confidence_A1C = (chance_A1 + over)[..., None].expand(-1, -1, len(CONFIDENCES))
        prompts.append(binned(confidence_A1C, right_A1))
    top = calibration(prompts)["top"]
    error = top["all_steps"]["calibration_error"]
    assert least <= error["mean"] <= most
    assert error["low"] <= error["mean"] <= error["high"]
    assert top["steps"][0] == top["all_steps"]
    assert sum(row["drafts"] for row in top["all_steps"]["bins"]) == 20 * A
    assert all(row["low"] <= row["mean"] <= row["high"] for row in top["all_steps"]["bins"])


def test_without_a_draft_there_is_no_figure() -> None:
    empty = torch.zeros(len(CONFIDENCES), 1, FINE_BINS, 3, dtype=torch.float64)
    (step,) = calibration([empty, empty])["top"]["steps"]
    nothing = {"calibration_error": None, "error_if_calibrated": None, "ranking": None, "bins": []}
    assert step == {"drafts": 0, **nothing}


@pytest.mark.parametrize("drafts", [50, 300, 3000])
def test_the_error_of_a_calibrated_drafter_is_known_beforehand(drafts: int) -> None:
    generator = torch.Generator().manual_seed(2)
    errors = []
    for _ in range(200):
        chance_A1 = torch.rand(drafts, 1, generator=generator, dtype=torch.float64)
        right_A1 = torch.rand(drafts, 1, generator=generator) < chance_A1
        bins_CKR3 = binned(chance_A1[..., None].expand(-1, -1, len(CONFIDENCES)), right_A1)
        measured = as_binned(bins_CKR3[KIND["top"]])
        error = measured.error()
        assert error is not None
        errors.append(error.mean)
    assert measured.error_if_calibrated() == pytest.approx(np.mean(errors), rel=0.08)


def test_where_all_are_accepted_nothing_is_ranked() -> None:
    bins_CKR3 = binned(torch.rand(9, 1, len(CONFIDENCES)), torch.ones(9, 1, dtype=torch.bool))
    assert calibration([bins_CKR3] * 2)["top"]["all_steps"]["ranking"] is None


@pytest.mark.parametrize("name", ["eagle3", "eagle3_1", "dflash"])
def test_the_bins_add_up_to_the_acceptance_of_the_same_chains(name: str) -> None:
    depth = 3
    text = texts()[1]
    anchors = places(text, depth)
    of_name = tiny_drafter(SPECS[name]) if name == "dflash" else drafter(name)
    anchored = AnchoredText(target(), of_name, text.ids, depth, len(anchors))
    (group,) = anchored.groups(anchors)
    part = drafted(anchored, group, text.prompt, anchors.stop)
    sums = dict(zip(SERIES, part.sums_FK2, strict=False))
    for kind, series in (("top", "conditional_acceptance"), ("product", "joint_acceptance")):
        of_kind_KR3 = part.bins_CKR3[KIND[kind]]
        assert of_kind_KR3[..., 2].sum(-1).tolist() == sums[series][:, 0].tolist()
        assert of_kind_KR3[..., 0].sum(-1).tolist() == sums[series][:, 1].tolist()
    of_top_KR3 = part.bins_CKR3[KIND["top"]].sum(1)
    overconfidence_K2 = sums["overconfidence"]
    torch.testing.assert_close(overconfidence_K2[:, 0], of_top_KR3[:, 1] - of_top_KR3[:, 2])
    assert overconfidence_K2[:, 1].tolist() == of_top_KR3[:, 0].tolist()
    probabilities = part.chains.log_probs_AKD.double().exp().amax(-1)
    wanted = float(probabilities[:, 0].sum())
    assert float(part.bins_CKR3[KIND["top"], 0, :, 1].sum()) == pytest.approx(wanted)
    assert np.isfinite(part.bins_CKR3.numpy()).all()
