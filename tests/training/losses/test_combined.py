import math

import jsonargparse
import pytest
import yaml

from specdec.drafter import DrafterSpec
from specdec.training.losses import (
    ForwardKL,
    HardCrossEntropy,
    JensenShannon,
    LKAlpha,
    LKLambda,
    Loss,
    NamedTerm,
    ReverseKL,
    SmoothL1,
    SoftCrossEntropy,
    Term,
    TopKCrossEntropy,
    TotalVariation,
    WeightedSum,
    terms,
)
from tests.tiny import presets

EAGLE1 = WeightedSum([Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)])


def parsed(text: str) -> Loss:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=Loss)
    loss = parser.instantiate(parser.parse_object(yaml.safe_load(text))).loss
    dumped = parser.instantiate(parser.parse_string(parser.dump(parser.parse_object(yaml.safe_load(text))))).loss
    assert dumped == loss  # what a run directory writes down is what ran
    return loss


def test_from_yaml() -> None:
    text = """
    loss:
      class_path: WeightedSum
      init_args: {terms: [{loss: SmoothL1, weight: 1.0}, {loss: SoftCrossEntropy, weight: 0.1}]}
    """
    assert parsed(text) == EAGLE1


def test_from_yaml_with_arguments_and_default_weights() -> None:
    text = """
    loss:
      class_path: WeightedSum
      init_args:
        terms:
          - {loss: {class_path: LKLambda, init_args: {decay: 1}}}
          - {loss: {class_path: specdec.training.losses.JensenShannon, init_args: {beta: 0.1}}, weight: 2}
    """
    assert parsed(text) == WeightedSum([Term(LKLambda(decay=1.0), 1.0), Term(JensenShannon(0.1), 2.0)])
    assert parsed("loss: {class_path: TopKCrossEntropy, init_args: {k: 5}}") == TopKCrossEntropy(5)
    assert parsed("loss: TotalVariation") == TotalVariation()


def test_mistakes_in_yaml_reach_the_reader() -> None:
    with pytest.raises(ValueError, match="the weight of SmoothL1 must be at least 0"):
        parsed("loss: {class_path: WeightedSum, init_args: {terms: [{loss: SmoothL1, weight: -1}]}}")
    with pytest.raises(jsonargparse.ArgumentError, match="Smoth"):
        parsed("loss: {class_path: WeightedSum, init_args: {terms: [{loss: Smoth}]}}")
    with pytest.raises(jsonargparse.ArgumentError, match="wieght"):
        parsed("loss: {class_path: WeightedSum, init_args: {terms: [{loss: SmoothL1, wieght: 1}]}}")


def test_a_plain_loss_is_one_term() -> None:
    assert terms(TotalVariation()) == [NamedTerm("total_variation", 1.0, TotalVariation())]


def test_terms_keep_order_and_weight() -> None:
    assert terms(EAGLE1) == [
        NamedTerm("smooth_l1", 1.0, SmoothL1()),
        NamedTerm("soft_cross_entropy", 0.1, SoftCrossEntropy()),
    ]


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (SoftCrossEntropy(), "soft_cross_entropy"),
        (HardCrossEntropy(), "hard_cross_entropy"),
        (TopKCrossEntropy(), "top_k_cross_entropy"),
        (ForwardKL(), "forward_kl"),
        (ReverseKL(), "reverse_kl"),
        (JensenShannon(), "jensen_shannon"),
        (LKAlpha(), "lk_alpha"),
        (LKLambda(), "lk_lambda"),
        (SmoothL1(), "smooth_l1"),
    ],
    ids=str,
)
def test_names(loss: Loss, name: str) -> None:
    assert terms(loss)[0].name == name


def test_equal_classes_are_numbered() -> None:
    sum_ = WeightedSum(
        [Term(TopKCrossEntropy(1)), Term(LKAlpha()), Term(TopKCrossEntropy(5)), Term(TopKCrossEntropy(9))]
    )
    names = [term.name for term in terms(sum_)]
    assert names == ["top_k_cross_entropy", "lk_alpha", "top_k_cross_entropy_2", "top_k_cross_entropy_3"]


def test_a_sum_asks_every_term_about_the_design() -> None:
    EAGLE1.check(presets()["eagle1"])
    SoftCrossEntropy().check(DrafterSpec())
    with pytest.raises(ValueError, match="loss SmoothL1 compares"):
        WeightedSum([Term(SoftCrossEntropy()), Term(SmoothL1())]).check(DrafterSpec())


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf, -math.inf])
def test_weights_are_finite_and_not_negative(weight: float) -> None:
    with pytest.raises(ValueError, match="the weight of LKAlpha must be at least 0 and finite"):
        Term(LKAlpha(), weight)


def test_sums_without_meaning() -> None:
    with pytest.raises(ValueError, match="no terms"):
        WeightedSum([])
    with pytest.raises(ValueError, match="every weight is 0"):
        WeightedSum([Term(LKAlpha(), 0.0), Term(SmoothL1(), 0.0)])
    with pytest.raises(ValueError, match="cannot hold another"):
        Term(EAGLE1)
    with pytest.raises(ValueError, match="needs a loss, not 'SmoothL1'"):
        Term("SmoothL1")  # type: ignore[arg-type]


def test_a_weight_of_zero_beside_others_is_a_term_all_the_same() -> None:
    assert [term.weight for term in terms(WeightedSum([Term(LKAlpha(), 0.0), Term(SmoothL1())]))] == [0.0, 1.0]
