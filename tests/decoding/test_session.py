"""Compiled sessions: the same tokens as eager ones, and no graph more than two, whatever text comes."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specdec.decoding import (
    AdaptiveChain,
    Chain,
    DraftShape,
    DynamicTree,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
    StaticTree,
)  # fmt: skip
from specdec.decoding.round import PlainRound
from specdec.decoding.session import Compilation, DecodeSession, slots_for
from specdec.drafter import Drafter
from specdec.target import Target
from tests.perfect import SHALLOW, TAPPED, astray, disturb, markov_target, perfect_drafter
from tests.tiny import presets

PROMPTS = [[3, 4, 5], [17], list(range(40)), [9, 9, 2], [30, 1]]
REQUESTS = [Request(prompt, (1, 30, 60)[seed % 3], seed) for seed, prompt in enumerate(PROMPTS)]
TREE = DynamicTree(depth=3, top_k=2, nodes=6)
STATIC = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
slow = pytest.mark.slow


def pair(family: str = "llama", dtype: torch.dtype = torch.float64) -> tuple[Target, Drafter]:
    """Their tokens depend on the keys, and drafts are taken now and then, also off a tree's first branch."""
    target = markov_target(family, {"llama": 0.65, "mistral": 0.55}[family], **SHALLOW)
    spec = replace(presets()["eagle3_1"], **TAPPED)
    drafter = disturb(perfect_drafter(target, spec, sharpness=2.0), 0.8)
    return Target(target.model.to(dtype)), drafter.to(dtype)


@slow
@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize(
    ("family", "dtype", "shape", "sampling", "batch"),
    [
        ("llama", torch.float64, TREE, Sampling(temperature=0.8, top_p=0.9), 2),
        ("mistral", torch.float64, STATIC, Sampling(), 2),
        ("llama", torch.float64, AdaptiveChain(2, 0.3), Sampling(), 2),
    ],
)
def test_compiled_tokens_are_plain_ones(
    family: str, dtype: torch.dtype, shape: DraftShape, sampling: Sampling, batch: int
) -> None:
    """Graphs carry no guards: what a graph wrongly went on serving would show in the tokens."""
    from torch._dynamo.utils import counters

    target, drafter = pair(family, dtype)
    decoder = SpeculativeDecoder(target, drafter, shape, sampling, batch=batch, compiled=True)
    decoder.prepare(100)
    # each call of the drafter and each size, where the shape reads from the device how long it grows
    graphs = 2 if len(shape.sizes) == 1 else shape.depth + len(shape.sizes)
    assert counters["stats"]["unique_graphs"] == graphs
    plain = PlainDecoder(target, sampling)
    wanted = [plain.generate(prompt, most, {7}, seed).ids for prompt, most, seed in REQUESTS]
    left = decoder.generate_all(REQUESTS[1:], {7})
    next(left)
    left.close()  # in the middle of others
    made = dict(decoder.generate_all(REQUESTS, {7}))
    assert [made[number].ids for number in range(len(REQUESTS))] == wanted
    texts = [[prompt[-1], *ids] for (prompt, _, _), ids in zip(REQUESTS, wanted, strict=True)]
    assert sum(map(astray, texts)) > 0.1 * sum(map(len, wanted))
    assert {0, 1} < {taken for one in made.values() for taken in one.accepted}
    assert counters["stats"]["unique_graphs"] == graphs


@slow
@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("rule", ["without_replacement"])
def test_compiled_draws_are_those_of_eager_decoding(rule: Any) -> None:
    target, drafter = pair()
    sampling = Sampling(temperature=0.9, top_k=20, rule=rule)
    eager, compiled = (
        dict(
            SpeculativeDecoder(
                target, drafter, STATIC, sampling, batch=2, compiled=how
            ).generate_all(REQUESTS)
        )
        for how in (False, True)
    )
    assert {number: (one.ids, one.accepted) for number, one in compiled.items()} == {
        number: (one.ids, one.accepted) for number, one in eager.items()
    }


@slow
@pytest.mark.usefixtures("no_graphs")
def test_bfloat16_compiles_and_agrees_for_long() -> None:
    target, drafter = pair(dtype=torch.bfloat16)
    wanted = PlainDecoder(target).generate([3, 4, 5], 40).ids
    made = SpeculativeDecoder(target, drafter, Chain(3), compiled=True).generate([3, 4, 5], 40).ids
    part = next(
        (n for n, (one, two) in enumerate(zip(made, wanted, strict=True)) if one != two), 40
    )
    if part < 40:  # at a near-tie alone, as bfloat16 rounds
        assert part > 4
        logits_V = target.model(torch.tensor([[3, 4, 5, *wanted[:part]]])).logits[0, -1].float()
        assert logits_V[wanted[part]] - logits_V[made[part]] < 0.05 * logits_V.abs().max()


@slow
@pytest.mark.usefixtures("no_graphs")
def test_longer_texts_get_graphs_of_their_own_and_new_weights_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr("specdec.decoding.session.STEP", 8)
    target, _ = pair()
    decoder, plain = PlainDecoder(target, compiled=True), PlainDecoder(target)
    for most, count in ((9, 1), (20, 2), (9, 2)):
        assert decoder.generate([3, 4], most).ids == plain.generate([3, 4], most).ids
        assert counters["stats"]["unique_graphs"] == count
    with torch.no_grad():
        # graphs read weights where they lie
        target.head_weight().copy_(target.head_weight().roll(1, 0))
    assert decoder.generate([3, 4], 9).ids == plain.generate([3, 4], 9).ids != [0] * 9


def test_each_graph_is_told_with_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="specdec")
    clock = iter([0, 8, 8, 20, 20, 30])
    monkeypatch.setattr(
        "specdec.decoding.session.time", SimpleNamespace(perf_counter=clock.__next__)
    )
    target, drafter = pair()
    decoders = [
        SpeculativeDecoder(target, drafter, Chain(2), compiled=True),
        PlainDecoder(target, compiled=True),
    ]
    assert [decoder.graphs_for(50) for decoder in decoders] == [2, 1]
    compilation = Compilation(3)
    for what in ("drafting, chain", "verification, chain", "plain decoding"):
        assert compilation.run(what, lambda: "made") == "made"
    assert [record.getMessage() for record in caplog.records] == [
        "compiling graph 1 of 3, drafting, chain, which may take a minute",
        "compiling graph 2 of 3, verification, chain, about 16 s left",
        "compiling graph 3 of 3, plain decoding, about 10 s left",
        "compiled 3 graphs in 30 s",
    ]


@torch.inference_mode()
def test_what_cannot_be_compiled_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(self: PlainRound, tree: Any) -> Any:
        return tree.tokens_BN * 2 if bool(tree.tokens_BN.sum() > 0) else tree.tokens_BN

    monkeypatch.setattr(PlainRound, "verify", verify)
    with pytest.raises(
        ValueError, match=r"decoding of 1 x 21 tokens cannot be compiled: .*; use --compile off"
    ):
        DecodeSession(PlainRound(pair()[0], Sampling(), 20), compiled=True)


@pytest.mark.usefixtures("no_graphs")
@torch.inference_mode()
def test_what_a_graph_writes_to_stays_where_it_is() -> None:
    """Torch knows it, so that CUDA graphs, which copy no inputs of that kind, can be taken."""
    target, drafter = pair()
    made: list[list[bool]] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        made.append(
            [hasattr(x, "_dynamo_static_input_type") for x in inputs if isinstance(x, torch.Tensor)]
        )
        return graph

    decoder = SpeculativeDecoder(target, drafter, TREE)
    round_ = decoder._new_round(40)
    round_.prefill(0, [3, 4, 5], 0)
    tree = round_.draft()
    torch.compile(round_.verify, fullgraph=True, backend=backend)(tree)
    assert made[0].count(False) == 2  # the tree's tokens and parents


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # of torch itself
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.usefixtures("no_graphs")
def test_a_gpu_runs_cuda_graphs() -> None:
    from torch._dynamo.utils import counters

    target, drafter = pair()
    drafter.cuda()
    target.to("cuda")
    wanted = PlainDecoder(target).generate([3, 4, 5], 60).ids
    for shape in (Chain(3), TREE):
        assert (
            SpeculativeDecoder(target, drafter, shape, compiled=True).generate([3, 4, 5], 60).ids
            == wanted
        )
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize(
    ("needed", "before", "most", "slots"),
    [
        (1, 0, None, 256),
        (256, 0, None, 256),
        (257, 0, None, 512),
        (300, 512, None, 1024),
        (257, 0, 300, 300),
    ],
)
def test_slots_are_made_in_steps_and_at_least_doubled(
    needed: int, before: int, most: int | None, slots: int
) -> None:
    assert slots_for(cast(Target, SimpleNamespace(most_slots=most)), needed, before) == slots
