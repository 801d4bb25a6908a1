"""The benchmark of losslessness: right decoders pass it small, what differs is measured, planted faults are found."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import lossless
from benchmarks.lossless import (
    FAMILIES,
    FAULTS,
    LENGTH,
    PROMPTS,
    SETTINGS,
    SHAPES,
    SMALL,
    TOLERANCE,
    differences,
    exact,
    plan,
    planted,
    report,
    small_pair,
    work,
    wrong,
)
from specdec.decoding import Sampling, accept

pytestmark = pytest.mark.usefixtures("threads")


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads, which a worker changes, is given back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("family", "shape"), list(zip(FAMILIES, itertools.cycle(SHAPES), strict=False))
)
def test_every_family_says_what_transformers_says(family: str, shape: str) -> None:
    job: dict[str, Any] = {"family": family, "shape": shape, "batch": 4, "compiled": False}
    found = work({"fault": None, "greedy": job | {"texts": 4, "new": 16, "seed": 0}})
    assert found["tokens"] == 64 and not wrong(found)
    assert found["refusing"] > 0 and found["accepted"] > 0  # drafts were refused and accepted
    assert (
        found["different_tokens"] > 8
        and found["different_4_grams"] > 0.3
        and found["astray"] > 0.05
    )


def test_a_token_that_differs_is_measured_and_the_rest_of_its_text_too() -> None:
    torch.manual_seed(0)
    model = small_pair()[0]
    with torch.no_grad():
        ids = model.generate(torch.tensor([[1, 2]]), max_new_tokens=8, do_sample=False)[0].tolist()
        wanted = ids[2:]
        assert differences(model, ids[:2], wanted, wanted) == []
        other = (wanted[3] + 1) % SMALL
        gaps = differences(model, ids[:2], [*wanted[:3], other, *wanted[4:]], wanted)
        logits = model(torch.tensor([ids[:5]])).logits[0, -1]
        ulp = 2.0 ** (math.floor(math.log2(logits.abs().max())) - 23)
        assert (
            gaps[0] == pytest.approx(float(logits.max() - logits[other]) / ulp)
            and gaps[0] > TOLERANCE
        )
        assert differences(model, ids[:2], wanted[:-2], wanted) == [math.inf, math.inf]
        # two tokens of one row but for rounding: whichever is said, it is a near-tie
        row = model.get_output_embeddings().weight
        row[other] = row[wanted[3]] * (1 - 1e-6)
        gap = differences(model, ids[:2], [*wanted[:3], other], wanted[:4])
        assert len(gap) == 1 and 0 < gap[0] < TOLERANCE


def test_the_exact_distribution_is_the_models() -> None:
    model = small_pair()[0]
    joint, memory = exact(model, Sampling(0.7), PROMPTS[0])
    assert (
        float(joint.sum()) == pytest.approx(1, abs=1e-6)
        and len(joint) == SMALL**LENGTH
        and memory > 0.05
    )
    path = [2, 0, 4, 1]
    with torch.no_grad():
        probs = (model(torch.tensor([[*PROMPTS[0], *path]])).logits[0].double() / 0.7).softmax(-1)
    alone = math.prod(float(probs[len(PROMPTS[0]) - 1 + n, token]) for n, token in enumerate(path))
    assert float(joint[int("2041", SMALL)]) == pytest.approx(alone, rel=1e-5)
    assert int((exact(model, Sampling(1.0, top_k=3), PROMPTS[1])[0] > 0).sum()) == 3**LENGTH


@pytest.mark.parametrize("setting", [4])
def test_right_rules_draw_the_targets_texts(setting: int) -> None:
    found = work({"fault": None, "sampled": {"setting": setting, "draws": 400, "seed": 3}})
    assert not wrong(found) and found["impossible"] == 0 and found["df"] > 5
    assert found["memory"] > 0.05 and found["accepted"] > 0


@pytest.mark.slow
def test_planted_faults_are_found() -> None:
    rules = dict(accept.RULES)
    jobs = [job for job in plan(4, 16, 0, 600) if job["fault"]][:2]
    found = [work(job) for job in jobs]
    assert [wrong(one) for one in found] == [True, True] and found[1]["p_value"] < 1e-6
    assert rules == accept.RULES  # only inside
    text = "\n".join(report(found))
    assert text.count("| yes |") == 2


def test_the_plan_covers_all_and_no_two_share_a_seed() -> None:
    jobs = plan(24, 96, 14500, 3000)
    greedy = [job["greedy"] for job in jobs if "greedy" in job and not job["fault"]]
    assert sum(one["texts"] * one["new"] for one in greedy) >= 100_000
    hybrids = set(itertools.product(lossless.HYBRIDS, ["chain"], lossless.HYBRID_BATCHES))
    assert {
        (one["family"], one["shape"], one["batch"]) for one in greedy if not one["compiled"]
    } == hybrids | set(itertools.product(FAMILIES, SHAPES, lossless.BATCHES))
    assert (
        sum(one["texts"] * one["new"] for one in greedy if one["family"] in lossless.HYBRIDS)
        >= 20_000
    )
    assert sum(one["compiled"] for one in greedy) >= 3 and len(
        {one["seed"] for one in greedy}
    ) == len(greedy)
    drawn = [job["sampled"] for job in jobs if "sampled" in job and not job["fault"]]
    assert len(drawn) == len(SETTINGS) and sum(one["draws"] for one in drawn) >= 100_000
    assert {job["fault"] for job in jobs if job["fault"]} == set(FAULTS)
    with pytest.raises(KeyError), planted("nothing of the kind"):
        pass
