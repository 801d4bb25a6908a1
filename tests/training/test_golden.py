"""Optimizer steps of each shipped design, and of the ways to train one, to the last digits: twenty are committed, of
which the first eight are made again.

A change that should not alter numbers leaves these losses alone; one that should comes with new ones and the reason:
``python -m tests.training.test_golden`` writes them.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from torch import Tensor

from specdec.data import Batch
from specdec.drafter import Drafter, DrafterSpec, MarkovBlock, MaskBlock
from specdec.nn.blocked import Blocked
from specdec.nn.rope import Rope
from specdec.nn.unroll import Dense, UnrollKernel
from specdec.training.divergences import TopKCrossEntropy
from specdec.training.losses import Loss, SmoothL1, SoftCrossEntropy, Term, WeightedSum
from specdec.training.noise import FeatureNoise, NoNoise
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from specdec.training.step_weights import Decay, StepWeights
from tests.published import fill, published
from tests.tiny import VOCAB, biased, deeper, presets, tiny_config, tiny_target, variants

GOLDEN = Path(__file__).with_name("golden.json")
CONF = Path(__file__).parents[2] / "conf"


class Case(NamedTuple):
    spec: DrafterSpec
    loss: Loss = SoftCrossEntropy()
    steps: int = 4
    weights: StepWeights = Decay()
    in_vocab: bool = True
    train_head: bool = True
    noise: FeatureNoise = NoNoise()


def trained(name: str, spec: DrafterSpec) -> Case:
    """A design as ``conf/train`` trains it."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=Loss)
    parser.add_argument("--noise", type=FeatureNoise, default=NoNoise())
    model = yaml.safe_load((CONF / "train" / f"{name}.yaml").read_text())["model"]
    parser.add_argument("--step_weights", type=StepWeights, default=Decay())
    chosen = {key: model[key] for key in ("loss", "noise", "step_weights") if key in model}
    parts = parser.instantiate(parser.parse_object(chosen))
    names = {"ttt_steps": "steps", "in_vocab": "in_vocab", "train_head": "train_head"}
    assert set(model) - set(names) - set(chosen) <= {"drafter"}
    numbers = {names[key]: value for key, value in model.items() if key in names}
    return Case(spec, parts.loss, weights=parts.step_weights, noise=parts.noise, **numbers)


EAGLE1 = presets()["eagle1"]
OWN = [Term(SmoothL1()), Term(SoftCrossEntropy(), 0.1)]  # EAGLE-1's loss, to which HASS adds one
CASES = {name: Case(spec) for name, spec in (presets() | variants()).items() if name != "mtp"} | {
    **{name: Case(spec, steps=2) for name, spec in deeper().items()},
    "dflash": Case(dataclasses.replace(variants()["dflash"], recurrence=MaskBlock(masks=4))),
    "dspark": Case(
        dataclasses.replace(variants()["dspark"], recurrence=MarkovBlock(masks=3, rank=6))
    ),
    "conf/train/dspark": trained("dspark", variants()["dspark"]),
    "eagle1": Case(EAGLE1, steps=1),
    "eagle1 with a bias": Case(biased(), steps=1),
    "eagle1 with its own loss": Case(EAGLE1, WeightedSum(OWN), 1),
    "hass": Case(EAGLE1, WeightedSum([*OWN, Term(TopKCrossEntropy(10))]), 3),
    "conf/train/hass": trained("hass", EAGLE1),
    "conf/train/lk": trained("lk", presets()["eagle3_1"]),
    "conf/train/speculators": trained("speculators", variants()["speculators"]),
}


def batch() -> Batch:
    T = 24
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCAB, (3, T), generator=generator)
    mask = torch.ones(3, T, dtype=torch.bool)
    mask[:, :4] = mask[:, 12:15] = False
    documents = torch.tensor([[0] * T, [0] * 12 + [1] * 12, [0] * 9 + [1] * 11 + [-1] * 4])
    return Batch(ids, mask & (documents >= 0), documents)


def whole_numbers(shapes: Iterable[Tensor], scale: float) -> list[Tensor]:
    """Weights that every machine draws alike: normal_ differs in the last bit between processors, randint does not."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(-64, 65, x.shape, generator=generator) * scale for x in shapes]


@torch.no_grad()
def draw(parameters: Iterable[Tensor], scale: float) -> None:
    """Give matrices such weights."""
    matrices = [p for p in parameters if p.ndim > 1]
    for parameter, value in zip(matrices, whole_numbers(matrices, scale), strict=True):
        parameter.copy_(value)


def float64_tables(rope: Rope, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary tables without float32, whose cosines differ in the last bit between processors."""
    width = 2 * len(rope.inverse)
    inverse = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.cat([positions_BT[:, None, :, None] * inverse] * 2, dim=-1)
    return angles.cos(), angles.sin()


def pupil(spec: DrafterSpec) -> Drafter:
    """Weights drawn as papers and checkpoints name them, so that they do not depend on how the package keeps them."""
    config = tiny_config(spec)
    drafter = Drafter(config, torch.arange(VOCAB)[: config.draft_vocab_size]).double()
    named = dict(sorted(published(drafter).items()))
    matrices = {name: weight for name, weight in named.items() if weight.ndim > 1}
    fill(
        drafter,
        named | dict(zip(matrices, whole_numbers(matrices.values(), 1 / 2048), strict=True)),
    )
    return drafter


def losses(
    case: Case, kernel: UnrollKernel, recompute: bool = False, steps: int = 20
) -> list[float]:
    """As the module trains: warm start, frozen embedding, AdamW with the default betas."""
    target = tiny_target()
    draw(target.model.parameters(), 1 / 1024)
    draw([target.head_weight()], 1 / 128)
    drafter = pupil(case.spec)
    drafter.warm_start(target.embedding_weight(), target.head_weight())
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(case.spec.head == "own" and case.train_head)
    optimizer = torch.optim.AdamW(
        [p for p in drafter.parameters() if p.requires_grad],
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    data = batch()
    recipe = ObjectiveConfig(case.loss, case.steps, case.weights, case.in_vocab, kernel, recompute)
    said = target_outputs(target, drafter, data, recipe)
    aux, final = (x.mul(16).round().div(16) for x in said[:2])  # its own float32 parts end here
    teacher = said._replace(aux_BTNH=aux, final_BTH=final)
    out, step = [], TrainStep(drafter, recipe)
    for index in range(steps):
        noisy = case.noise(aux, data.documents_BT, torch.Generator().manual_seed(index))
        loss = step(data, teacher._replace(aux_BTNH=noisy)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(float(loss.detach()))
    return out


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_committed_ones_and_fall(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rope, "tables", float64_tables)
    committed = json.loads(GOLDEN.read_text())[name]
    assert losses(CASES[name], Blocked(8), steps=8) == pytest.approx(
        committed[:8], rel=1e-10, abs=0
    )
    assert committed[-1] < 0.85 * committed[0] and committed == sorted(committed, reverse=True)


@pytest.mark.parametrize("name", ["eagle3_1", "sliding_window", "hass"])
def test_the_dense_kernel_with_recompute_has_the_same_losses(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rope, "tables", float64_tables)
    got = losses(CASES[name], Dense(), recompute=True, steps=8)
    assert got == pytest.approx(json.loads(GOLDEN.read_text())[name][:8], rel=1e-10, abs=0)


def test_every_shipped_design_has_its_losses() -> None:
    assert set(json.loads(GOLDEN.read_text())) == set(CASES)
    designs = {path.stem for path in (CONF / "drafter").glob("*.yaml")}
    # EAGLE-1's, and trained alike; and a layer of transformers, whose norms are float32 and so the processor's
    assert designs - set(CASES) == {"eagle2", "mtp"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Rope.tables = float64_tables  # type: ignore[method-assign]
    GOLDEN.write_text(
        json.dumps({name: losses(case, Blocked(8)) for name, case in CASES.items()}, indent=1)
        + "\n"
    )
