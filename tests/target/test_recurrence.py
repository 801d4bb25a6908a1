"""Targets with recurrent layers: their proof, packed texts, and chains side by side, each going back where refused."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from specdec.decoding import (
    AdaptiveChain,
    Chain,
    DynamicTree,
    PlainDecoder,
    Request,
    Sampling,
    SpeculativeDecoder,
)
from specdec.drafter import Drafter
from specdec.evaluation.lossless import check_sampled
from specdec.nn.view import View
from specdec.target import Target, TargetCache
from specdec.target.recurrence import RecurrentLayer
from tests.parity.reference import generated
from tests.perfect import astray, disturb, make_markov, perfect_drafter
from tests.target.hybrids import FAMILIES
from tests.tiny import VOCAB, presets

PROMPTS = [[5, 6, 7], [9, 1, 30, 31, 2, 8], [44], [60, 1] * 9, [22, 9, 13, 40]]
REQUESTS = [Request(prompt, 9 + 3 * n, n) for n, prompt in enumerate(PROMPTS)]
TAPPED = [1, 2, 4]


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_prove_themselves(family: str, dtype: torch.dtype) -> None:
    target = Target(make(family).to(dtype))
    assert target.recurrent
    target.prove()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts_do_not_see_each_other(family: str) -> None:
    target = Target(make(family))
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(VOCAB, (2, 24), generator=generator)
    documents_BT = torch.tensor([[0] * 7 + [1] * 3 + [2] * 12 + [-1] * 2, [0] * 24])
    out = target.forward(ids_BT, View.packed(documents_BT), [0, 2, 4])
    for row, first, last in [(0, 0, 7), (0, 7, 10), (0, 10, 22), (1, 0, 24)]:
        alone_1T = ids_BT[row : row + 1, first:last]
        own = target.forward(alone_1T, View.packed(torch.zeros_like(alone_1T)), [0, 2, 4])
        torch.testing.assert_close(
            out.aux_BTNH[row, first:last], own.aux_BTNH[0], rtol=2e-4, atol=2e-4
        )
        torch.testing.assert_close(
            out.final_BTH[row, first:last], own.final_BTH[0], rtol=2e-4, atol=2e-4
        )


# how far a family's layers lead its texts astray
CONTEXT = {"granite_4": 2.0, "olmo_hybrid": 0.2, "lfm2": 0.3}


@cache
def pair(family: str) -> tuple[Target, Drafter, tuple[list[int], ...]]:
    """A target that mostly looks at the last token, a drafter that knows it but for some noise, and what
    transformers' own loop and cache write after each prompt, alone."""
    torch.manual_seed(0)
    model = make_markov(FAMILIES[family](), CONTEXT.get(family, 0.6), layers=4).float()
    target = Target(model)
    wanted = [generated(target, request.prompt, request.max_new_tokens) for request in REQUESTS]
    spec = replace(presets()["eagle3_1"], draft_vocab_size="all", aux_layers=TAPPED)
    return target, disturb(perfect_drafter(target, spec), 0.3).float(), tuple(wanted)


def texts_of(decoder: PlainDecoder) -> tuple[list[int], ...]:
    """What it writes after each prompt; rows that are done take the next one."""
    made = dict(decoder.generate_all(REQUESTS, ()))
    return tuple(made[number].ids for number in range(len(REQUESTS)))


@pytest.mark.parametrize(
    ("family", "batch"), [("qwen3_5", 1), *((family, 3) for family in FAMILIES)]
)
def test_chains_side_by_side_are_what_the_model_generates(family: str, batch: int) -> None:
    """Also where texts accept different numbers of drafts in a pass, and begin in a row that had another text."""
    target, drafter, wanted = pair(family)
    made = dict(
        SpeculativeDecoder(target, drafter, Chain(3), batch=batch).generate_all(REQUESTS, ())
    )
    assert tuple(made[number].ids for number in range(len(REQUESTS))) == wanted
    # the first three begin together
    passes = list(zip(*(made[number].accepted for number in range(3)), strict=False))
    assert len(set(sum(passes, ()))) > 2
    assert sum(len(set(accepted)) > 1 for accepted in passes) > 1
    texts = [[prompt[-1], *ids] for prompt, ids in zip(PROMPTS, wanted, strict=True)]
    assert sum(map(astray, texts)) > 0.1 * sum(map(len, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_texts_side_by_side_are_what_the_model_generates(family: str) -> None:
    target, _, wanted = pair(family)
    assert texts_of(PlainDecoder(target, batch=4)) == wanted


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_drawn_tokens_side_by_side_are_plain_decodings(family: str) -> None:
    target, drafter, _ = pair(family)
    drawn = Sampling(temperature=1.0)
    expected = texts_of(PlainDecoder(target, drawn))
    # the second has passes without a draft
    for shape in (Chain(3), AdaptiveChain(3, 0.0, 0.5)):
        decoder = SpeculativeDecoder(target, drafter, shape, drawn, batch=3)
        assert texts_of(decoder) == expected


def test_drawn_drafts_do_not_hang_on_the_company() -> None:
    target, drafter, _ = pair("falcon_h1")
    drawn = Sampling(temperature=1.0, rule="without_replacement")
    alone, together = (
        {
            number: (made.ids, made.accepted)
            for number, made in SpeculativeDecoder(
                target, drafter, Chain(3), drawn, batch=batch
            ).generate_all(REQUESTS, ())
        }
        for batch in (1, 3)
    )
    assert together == alone
    assert len({n for _, accepted in alone.values() for n in accepted}) > 1


@pytest.mark.slow
def test_texts_drawn_side_by_side_have_the_targets_distribution() -> None:
    target, drafter, _ = pair("qwen3_5")
    drawn = Sampling(temperature=8.0, top_k=3, rule="without_replacement")
    decoder = SpeculativeDecoder(target, drafter, Chain(2), drawn, batch=8)
    check = check_sampled(decoder, [5, 6, 7], 400)
    assert check["fault"] is None and check["degrees"] > 20, check


def one_more(patch: pytest.MonkeyPatch) -> None:
    """Where a draft was refused, the state is the one after that draft."""
    own = RecurrentLayer.rewind

    def rewind(layer: RecurrentLayer, count_B: Tensor) -> None:
        tokens = len(layer._after_TB[0]) if layer._after_TB else 1
        own(layer, (count_B + 1).clamp_max(tokens))

    patch.setattr(RecurrentLayer, "rewind", rewind)


def of_the_next_row(patch: pytest.MonkeyPatch) -> None:
    own = RecurrentLayer.rewind

    def rewind(layer: RecurrentLayer, count_B: Tensor) -> None:
        own(layer, count_B)
        for state in layer.states:
            state.copy_(state.roll(1, 0))

    patch.setattr(RecurrentLayer, "rewind", rewind)


def as_many_as_the_next_row(patch: pytest.MonkeyPatch) -> None:
    own = RecurrentLayer.rewind
    patch.setattr(RecurrentLayer, "rewind", lambda layer, count_B: own(layer, count_B.roll(1)))


def never_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentLayer, "rewind", lambda layer, count_B: layer.forget())


def padding_read(patch: pytest.MonkeyPatch) -> None:
    """Recurrent layers read a token after the prompt; the next token's key is written over its key."""
    own = TargetCache.begin

    @contextlib.contextmanager
    def begin(cache: TargetCache, b: int) -> Iterator[TargetCache]:
        with own(cache, b) as text:
            yield text
            layers = [layer for layer in text.layers if isinstance(layer, RecurrentLayer)]
            for state in (state for layer in layers for state in layer.conv_states.values()):
                if state is not None:
                    # as a convolution over the text reads a token of nothing
                    state.copy_(torch.nn.functional.pad(state, (0, 1))[..., 1:])

    patch.setattr(TargetCache, "begin", begin)


def earlier_text_kept(patch: pytest.MonkeyPatch) -> None:
    """A row that has had a text keeps its state when the next one begins."""
    own = RecurrentLayer.begin
    begun = set[tuple[RecurrentLayer, int]]()

    def begin(layer: RecurrentLayer, b: int, batch: int, text: LinearAttentionLayer) -> None:
        if (layer, b) not in begun:
            own(layer, b, batch, text)
        begun.add((layer, b))

    patch.setattr(RecurrentLayer, "begin", begin)


def begins_in_every_row(patch: pytest.MonkeyPatch) -> None:
    own = RecurrentLayer.begin

    def begin(layer: RecurrentLayer, b: int, batch: int, text: LinearAttentionLayer) -> None:
        for row in range(batch):
            own(layer, row, batch, text)

    patch.setattr(RecurrentLayer, "begin", begin)


CONTINUING = "continuing after refused drafts, text . of 2: its state at boundary"
VERIFYING = "verifying a chain, text . of 2: its state at boundary"
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "one token too many": (one_more, CONTINUING),
    "a neighbor's state": (of_the_next_row, CONTINUING),
    "a neighbor's count": (as_many_as_the_next_row, CONTINUING),
    "never taken back": (never_back, CONTINUING),
    "padding read": (padding_read, VERIFYING),
    "the earlier text's state": (earlier_text_kept, VERIFYING),
    "a prompt in every row": (begins_in_every_row, VERIFYING),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_the_proof_and_in_the_texts(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, told = FAULTS[fault]
    target, drafter, wanted = pair("lfm2")
    proved = Target(make("nemotron_h"))
    plant(monkeypatch)
    with pytest.raises(ValueError, match=told):
        proved.prove()
    assert texts_of(SpeculativeDecoder(target, drafter, Chain(3), batch=3)) != wanted


def test_a_layer_without_a_convolution_is_refused() -> None:
    model = make("lfm2")
    model.model.layers[0].conv.conv = torch.nn.Identity()
    with pytest.raises(ValueError, match="a recurrent layer has 0 modules with a convolution"):
        Target(model)


def test_a_recurrent_state_does_not_branch() -> None:
    target, drafter, _ = pair("lfm2")
    with pytest.raises(
        ValueError, match="whose state cannot branch: draft a chain, not tree of 12"
    ):
        SpeculativeDecoder(target, drafter, DynamicTree())


@pytest.mark.slow
@pytest.mark.usefixtures("no_graphs")
def test_compiled_chains_side_by_side_are_what_the_model_generates() -> None:
    target, drafter, wanted = pair("qwen3_5")
    decoder = SpeculativeDecoder(target, drafter, Chain(2), batch=2, compiled=True)
    assert texts_of(decoder) == wanted
