"""DSpark: drafts know the token before them, in training as in decoding, and the confidence head judges them.

Legend: B sequences, K levels or nodes, A anchors, H hidden, R rank, D draft vocabulary.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.decoding import AdaptiveChain, Chain, DynamicTree, PlainDecoder, SpeculativeDecoder
from specdec.diagnostics.anchors import AnchoredText, answered_texts
from specdec.diagnostics.loud import loud_drafter, loud_spec
from specdec.diagnostics.parity_compare import compare_drafting
from specdec.drafter import Drafter, MarkovBlock, MaskBlock
from specdec.drafting import MarkovHead
from specdec.evaluation.adaptive import Recorder
from specdec.export import export_drafter
from specdec.nn.unroll import DENSE
from specdec.target import Target
from specdec.training.building import FromTarget, check
from tests.parity.unrolled import worst_gap
from tests.tiny import VOCAB, tiny_config, tiny_target, variants

MASKS, RANK = 4, 6
DRAFTS = MASKS + 1
SPEC = dataclasses.replace(variants()["dspark"], recurrence=MarkovBlock(masks=MASKS, rank=RANK))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    """One whose drafts depend on everything."""
    spec = dataclasses.replace(
        loud_spec(target, "dspark"),
        num_layers=2,
        recurrence=MarkovBlock(masks=MASKS, rank=RANK),
    )
    return loud_drafter(target, spec)


def text(length: int = 24) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()


def head_of(drafter: Drafter) -> MarkovHead:
    assert isinstance(drafter.recurrence, MarkovHead)
    return drafter.recurrence


@pytest.mark.parametrize("root_drafts", [True, False])
@pytest.mark.parametrize("documents", [[0] * 9, [0] * 5 + [1] * 6], ids=["one", "packed"])
def test_training_is_decoding_pass_by_pass(root_drafts: bool, documents: list[int]) -> None:
    recurrence = MarkovBlock(masks=MASKS, rank=RANK, root_drafts=root_drafts)
    assert worst_gap(dataclasses.replace(SPEC, recurrence=recurrence), documents) < 1e-12


def test_a_chain_is_the_most_likely_token_behind_the_one_before(
    target: Target, drafter: Drafter
) -> None:
    """By hand, from the block's states: head, Markov head and confidence head."""
    anchored = AnchoredText(target, drafter, text(), DRAFTS)
    anchors = [5, 11, 17]
    chains = anchored.draft(anchors)
    head = head_of(drafter)
    assert head.confidence is not None and chains.confidence_AK is not None
    for a, anchor in enumerate(anchors):
        previous = text()[anchor]
        for k in range(DRAFTS):
            state_H = chains.features_AJH[a, 1 + k]
            embedded_R = head.previous.weight[previous]
            logits_D = drafter.lm_head.weight @ state_H + head.transition.weight @ embedded_R
            torch.testing.assert_close(chains.log_probs_AKD[a, k], logits_D.log_softmax(-1))
            read = torch.cat([state_H, embedded_R])
            estimate = (head.confidence.weight[0] @ read + head.confidence.bias[0]).sigmoid()
            torch.testing.assert_close(chains.confidence_AK[a, k], estimate)
            previous = int(chains.tokens_AK[a, k])
            assert previous == int(drafter.vocab.target_ids_D[logits_D.argmax()])


def test_the_token_before_decides_what_is_drafted(target: Target, drafter: Drafter) -> None:
    anchored = AnchoredText(target, drafter, text(), DRAFTS)
    own = anchored.draft([5, 11, 17])
    other = anchored.draft([5, 11, 17], (own.tokens_AK + 1) % VOCAB)
    assert torch.equal(own.log_probs_AKD[:, 0], other.log_probs_AKD[:, 0])
    moved_AK = (own.log_probs_AKD - other.log_probs_AKD).abs().amax(-1)
    assert (moved_AK[:, 1:] > 0.1).all()


def test_without_its_heads_it_is_dflash(drafter: Drafter) -> None:
    """The same weights, and masks that draft for their own places."""
    spec = dataclasses.replace(
        SPEC, recurrence=MarkovBlock(masks=MASKS, rank=RANK, root_drafts=False)
    )
    markov = Drafter(tiny_config(spec), torch.arange(VOCAB)).double()
    head_of(markov).transition.weight.data.zero_()
    plain = Drafter(
        tiny_config(dataclasses.replace(spec, recurrence=MaskBlock(masks=MASKS))),
        torch.arange(VOCAB),
    ).double()
    plain.load_state_dict(
        {k: v for k, v in markov.state_dict().items() if not k.startswith("recurrence.")}
    )
    ids_1T = torch.tensor([text(12)])
    generator = torch.Generator().manual_seed(1)
    config = markov.config
    shape = (1, 12, len(config.aux_layers), config.target_hidden_size)
    aux_1TNH = torch.randn(shape, generator=generator, dtype=torch.float64)
    documents = torch.zeros_like(ids_1T)

    def logits(made: Drafter) -> list[Tensor]:
        unroll = made.unroll(ids_1T, aux_1TNH, documents, MASKS, DENSE)
        return [made.logits(step.normed_BTH) for step in unroll]

    for ours, theirs in zip(logits(markov), logits(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "shape",
    [
        Chain(DRAFTS),
        Chain(2),
        DynamicTree(depth=3, top_k=2, nodes=8),
        AdaptiveChain(DRAFTS, 0.2),
        AdaptiveChain(DRAFTS, 0.0, 0.5),
    ],
    ids=str,
)
def test_decoding_says_what_the_target_says(
    target: Target, drafter: Drafter, shape: object
) -> None:
    prompt = text(9)
    plain = PlainDecoder(target).generate(prompt, 20, ())
    made = SpeculativeDecoder(target, drafter, shape).generate(prompt, 20, ())  # type: ignore[arg-type]
    assert made.ids == plain.ids


@pytest.mark.parametrize("least", [0.0, 0.3, 0.6, 1.0])
def test_a_chain_ends_where_the_confidence_head_is_unsure(
    target: Target, drafter: Drafter, least: float
) -> None:
    """The first draft whose estimate is lower is left out, whatever its probability."""
    prompt = text(9)
    made = SpeculativeDecoder(target, drafter, AdaptiveChain(DRAFTS, 0.0, least)).generate(
        prompt, 12, ()
    )
    whole = [*prompt, *made.ids]
    anchored = AnchoredText(target, drafter, whole, DRAFTS)
    place = len(prompt)  # of the last token, once the prompt's pass has made the first
    for drafted, accepted in zip(made.drafted, made.accepted, strict=True):
        estimates = anchored.draft([place]).confidence_AK
        assert estimates is not None
        sure = (estimates[0] >= least).long().cumprod(0)
        assert drafted == int(sure.sum())
        place += accepted + 1


def test_what_tune_records_is_what_ends_a_chain(target: Target, drafter: Drafter) -> None:
    """The confidence head's estimates, not the drafts' probabilities."""
    recorder = Recorder(DRAFTS)
    prompt = text(9)
    made = SpeculativeDecoder(target, drafter, recorder).generate(prompt, 6, ())
    anchored = AnchoredText(target, drafter, [*prompt, *made.ids], DRAFTS)
    for number, place in enumerate(recorder.places):
        chains = anchored.draft([len(prompt) + number])
        assert chains.confidence_AK is not None
        assert place.drafts == chains.tokens_AK[0].tolist()
        assert place.confidences == pytest.approx(chains.confidence_AK[0].tolist())
    assert len(recorder.places) == 5


@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_an_export_whose_confidence_head_is_another_is_found(
    target: Target, drafter: Drafter, format: str, tmp_path: Path
) -> None:
    export_drafter(drafter, target, tmp_path / "x", format)
    texts = answered_texts(target, [("a", text(9)), ("b", text(6))], 20)
    compared = compare_drafting(target, drafter, texts, DRAFTS - 1, tmp_path / "x", "dspark")
    assert compared.equal and compared.not_compared is None
    path = tmp_path / "x" / "model.safetensors"
    weights = load_file(path)
    weights["confidence_head.proj.weight"] += 0.05
    save_file(weights, path, metadata={"format": "pt"})
    (tmp_path / "x" / "SHA256SUMS").unlink()
    spoiled = compare_drafting(target, drafter, texts, DRAFTS - 1, tmp_path / "x", "dspark")
    verdicts = {row.verdict for row in spoiled.rows}
    assert verdicts == {"equal", "DIFFERENT: the confidence head"}


def test_levels_of_a_tree_know_their_parents(target: Target, drafter: Drafter) -> None:
    """Two nodes of one level have one state, and two distributions: each knows its own parent."""
    anchored = AnchoredText(target, drafter, text(), DRAFTS)
    memory = anchored._proposer.memory
    drafting = drafter.config.drafting
    ids_1T = anchored.ids_1T
    h_1MH = drafter.fuse(anchored.out.aux_BTNH[:, -2:-1])
    length_1 = torch.tensor([anchored.rows - 1])
    start = drafting.start(memory, length_1, ids_1T[:, -1:], h_1MH, torch.tensor([1]))
    expand = drafting.expand(memory, start, length_1 + 1)
    parents_12 = torch.tensor([[7, 8]])
    seen_12Q = torch.eye(2, dtype=torch.bool)[None]
    level = expand(parents_12, start.h_BKH[:, :1].expand(-1, 2, -1), seen_12Q, torch.tensor([0, 0]))
    assert torch.equal(level.h_BKH[0, 0], level.h_BKH[0, 1])
    head = head_of(drafter)
    wanted = head.transition.weight @ (head.previous.weight[7] - head.previous.weight[8])
    torch.testing.assert_close(level.logits_BKD[0, 0] - level.logits_BKD[0, 1], wanted)
    assert wanted.abs().max() > 0.1


def test_what_cannot_be_trained_or_built_is_refused() -> None:
    config = tiny_config(SPEC)
    with pytest.raises(
        ValueError,
        match=r"makes 5 drafts and model\.ttt_steps is 4: set model\.ttt_steps to 5.*to 3$",
    ):
        check(config, 64, 64, FromTarget(), False, True, 4)
    with pytest.raises(ValueError, match=r"logit_scale is 2\.0.*set model\.drafter\.head=own"):
        dataclasses.replace(config, logit_scale=2.0)
    with pytest.raises(ValueError, match="MarkovBlock drafts at nodes without a feature"):
        dataclasses.replace(variants()["qwen3"], recurrence=MarkovBlock())
    for settings, message in (
        ({"rank": 0}, "rank must be at least 1"),
        ({"masks": 65}, "masks must be at most 64"),
        ({"masks": -3}, "masks must be at least 1"),
        ({"masks": 2.5}, "masks must be a whole number"),
        ({"confidence": 1}, r"MarkovBlock\.confidence is 1, wanted a bool"),
        ({"root_drafts": "no"}, r"MarkovBlock\.root_drafts is 'no', wanted a bool"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SPEC, recurrence=MarkovBlock(**settings))  # type: ignore[arg-type]
