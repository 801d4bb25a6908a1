"""The confidence head's loss: its value, its gradient, what it needs, and that it learns the chance of acceptance.

The whole step with this loss is compared with its definition in tests/parity/test_dense_reference.py.

Legend: K steps, S slots, R rows, D draft vocabulary.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specdec.drafter import MarkovBlock
from specdec.training.confidence import (
    AcceptanceChances,
    ConfidenceLoss,
    check_confidence_is_trained,
)
from specdec.training.losses import SoftCrossEntropy, Term, WeightedSum, terms
from specdec.training.module import DrafterModule
from specdec.training.step import ObjectiveConfig, TrainStep
from specdec.training.target_head import TargetProbs
from tests.tiny import presets, variants
from tests.training.test_step import learner, make_batch, make_teacher

CONF = Path(__file__).parents[2] / "conf"
BOTH = WeightedSum([Term(SoftCrossEntropy()), Term(ConfidenceLoss())])
SPEC = dataclasses.replace(variants()["dspark"], recurrence=MarkovBlock(masks=3, rank=6))


def test_the_loss_is_least_at_the_chance_itself() -> None:
    chance_R = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    logit_R = chance_R.logit().requires_grad_()
    loss_R = ConfidenceLoss()(logit_R, chance_R)
    entropy_R = torch.special.entr(chance_R) + torch.special.entr(1 - chance_R)
    torch.testing.assert_close(loss_R.detach(), entropy_R)
    (slope_R,) = torch.autograd.grad(loss_R.sum(), logit_R)
    assert slope_R.abs().max() < 1e-12


def test_the_chance_is_what_of_both_distributions_overlaps() -> None:
    """With p over the target's whole vocabulary: the draft vocabulary has 0.8 of it here."""
    p_RD = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    q_RD = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64)
    mass_R = torch.tensor([0.8], dtype=torch.float64)
    keeper = AcceptanceChances(torch.ones(2, 4, dtype=torch.bool), torch.float64)
    token_R = torch.tensor([0])
    probs = TargetProbs(p_RD, p_RD.log(), mass_R.log(), token_R, token_R == 0)
    keeper(1, torch.tensor([2]), q_RD.log(), probs)
    wanted = min(0.4, 0.1) + min(0.24, 0.6) + min(0.16, 0.3)
    assert float(keeper.chance_KS[1, 2]) == pytest.approx(wanted)
    assert float(keeper.chance_KS.sum()) == pytest.approx(wanted)


def test_a_head_that_no_loss_trains_is_refused_and_a_loss_without_a_head() -> None:
    with pytest.raises(ValueError, match="confidence head that no loss trains: use --config"):
        DrafterModule(drafter=SPEC, ttt_steps=4)
    with pytest.raises(ValueError, match="trains the confidence head alone, and no drafts"):
        DrafterModule(drafter=SPEC, ttt_steps=4, loss=ConfidenceLoss())
    silent = WeightedSum([Term(SoftCrossEntropy()), Term(ConfidenceLoss(), 0.0)])
    with pytest.raises(ValueError, match="no loss trains"):
        check_confidence_is_trained(SPEC, terms(silent))
    without = dataclasses.replace(SPEC, recurrence=MarkovBlock(masks=3, rank=6, confidence=False))
    check_confidence_is_trained(without, terms(SoftCrossEntropy()))
    for spec in (without, presets()["eagle3_1"]):
        with pytest.raises(ValueError, match="this design has none"):
            BOTH.check(spec)
    DrafterModule(drafter=SPEC, ttt_steps=4, loss=BOTH)


def test_a_batch_without_a_covered_slot_has_a_finite_loss() -> None:
    """No slot's most likely token is in the draft vocabulary: other losses have no row there."""
    spec = dataclasses.replace(SPEC, head="own", draft_vocab_size=20)
    drafter, batch = learner(spec), make_batch()
    teacher = make_teacher(drafter, batch)

    def uncovered(final_CH: torch.Tensor) -> TargetProbs:
        probs = teacher.probs(final_CH)
        return probs._replace(covered_C=torch.zeros_like(probs.covered_C))

    output = TrainStep(drafter, ObjectiveConfig(BOTH))(batch, teacher._replace(probs=uncovered))
    output.loss.backward()
    assert float(output.loss.detach()) == 0 == float(output.weight)
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())


def test_the_head_learns_how_likely_acceptance_is() -> None:
    """Everything but the head is frozen, so that the chances stay: its estimates come near them."""
    drafter, batch = learner(SPEC), make_batch()
    recipe = ObjectiveConfig(BOTH)
    teacher = make_teacher(drafter, batch)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name.startswith("recurrence.confidence"))
    head = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(head, lr=0.05)
    losses = []
    for _ in range(60):
        output = TrainStep(drafter, recipe)(batch, teacher)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        assert output.counts is not None
        rows = output.counts.rows_K.sum()
        losses.append(float(output.counts.loss_KN[:, 1].sum() / rows))
    assert losses[-1] < 0.9 * losses[0] and losses[-1] == min(losses)


def test_the_recipe_in_python_is_that_of_the_config() -> None:
    """As docs/python.md has it."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    (block,) = (
        block
        for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL)
        if "ConfidenceLoss" in block
    )
    names: dict[str, Any] = {"DrafterModule": lambda **arguments: arguments}
    exec(compile(block, "docs/python.md", "exec"), names)
    recipe = names["module"]
    DrafterModule(**recipe | {"target": "embedded"})
    config = yaml.safe_load((CONF / "train" / "dspark.yaml").read_text())["model"]
    written = config["loss"]["init_args"]["terms"]
    assert [(term["loss"], term["weight"]) for term in written] == [
        (type(term.loss).__name__, term.weight) for term in recipe["loss"].terms
    ]
    assert recipe["ttt_steps"] == config["ttt_steps"]
    assert recipe["step_weights"].base == config["step_weights"]["init_args"]["base"]
