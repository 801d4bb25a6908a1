"""Targets with recurrent layers: their proof, packed texts, and chains that are taken back where they are refused."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM, PreTrainedModel

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
from specdec.nn.view import View
from specdec.target import Target, TargetCache
from tests.perfect import disturb, make_markov, perfect_drafter, worst_drafter
from tests.target.hybrids import DELTA, FAMILIES, SIZES
from tests.tiny import VOCAB, presets

PROMPTS, TAPPED = [[5, 6, 7], [9, 1, 30, 31, 2, 8], [44]], [1, 2, 4]


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


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.24"), reason="transformers 5.24 has mended it"
)
def test_a_family_whose_cache_cannot_go_on_is_refused() -> None:
    """OLMo hybrid of transformers 5.19 forgets its state where several tokens follow."""
    torch.manual_seed(0)
    model = OlmoHybridForCausalLM(OlmoHybridConfig(**SIZES, **{**DELTA, "linear_num_key_heads": 4}))
    with pytest.raises(
        ValueError, match="verifying a chain: its state at boundary 1 is not the model's own"
    ):
        Target(model).prove()


def test_a_state_that_is_not_put_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetCache, "restore", staticmethod(lambda kept: None))
    with pytest.raises(
        ValueError, match="again without what was refused: its state at boundary 1 is not"
    ):
        Target(make("qwen3_5")).prove()


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


@pytest.fixture(scope="module", params=["qwen3_5", "falcon_h1", "lfm2"])
def pair(request: pytest.FixtureRequest) -> tuple[Target, PreTrainedModel]:
    """A target that mostly looks at the last token, and an untouched copy of its model."""
    torch.manual_seed(0)
    model = make_markov(FAMILIES[request.param](), 0.6, layers=4).float()
    alone = copy.deepcopy(model)
    return Target(model), alone


def near(target: Target, noise: float) -> Drafter:
    """A drafter that knows the target, but for some noise."""
    spec = replace(presets()["eagle3_1"], draft_vocab_size="all", aux_layers=TAPPED)
    return disturb(perfect_drafter(target, spec), noise).float()


@pytest.mark.parametrize("noise", [0.3])
def test_a_chain_is_what_the_model_generates(
    pair: tuple[Target, PreTrainedModel], noise: float | None
) -> None:
    target, alone = pair
    drafter = worst_drafter(target, aux_layers=TAPPED) if noise is None else near(target, noise)
    decoder, plain = SpeculativeDecoder(target, drafter.float(), Chain(4)), PlainDecoder(target)
    accepted: list[int] = []
    for number, made in decoder.generate_all([Request(prompt, 18) for prompt in PROMPTS], ()):
        ids = torch.tensor([PROMPTS[number]])
        own = alone.generate(
            ids, max_new_tokens=18, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert (
            made.ids
            == own[0, ids.shape[1] :].tolist()
            == plain.generate(PROMPTS[number], 18, ()).ids
        )
        accepted += made.accepted
    assert set(accepted) >= ({0} if noise is None else {0, 1, 2})


def test_drawn_tokens_are_plain_decodings(pair: tuple[Target, PreTrainedModel]) -> None:
    target, _ = pair
    drafter, drawn = near(target, 0.3), Sampling(temperature=1.0)
    plain = PlainDecoder(target, drawn)
    expected = [plain.generate(ids, 14, ()).ids for ids in PROMPTS]
    for shape in (Chain(3), AdaptiveChain(3, 0.0, 0.5)):  # the second has passes without a draft
        decoder = SpeculativeDecoder(target, drafter, shape, drawn)
        assert [decoder.generate(ids, 14, ()).ids for ids in PROMPTS] == expected


def test_what_a_recurrent_state_does_not_allow() -> None:
    target = Target(make("qwen3_5"))
    drafter = worst_drafter(target, aux_layers=TAPPED).float()
    with pytest.raises(
        ValueError, match="whose state cannot branch: draft a chain, not tree of 12"
    ):
        SpeculativeDecoder(target, drafter, DynamicTree())
    for how in ({"batch": 2}, {"compiled": True}):
        with pytest.raises(
            ValueError, match=r"recurrent layers.*use --compile off and --batch_size 1"
        ):
            PlainDecoder(target, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use batch 1"):
        target.new_cache(8, 2)
