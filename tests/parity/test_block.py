"""A block drafter's training, in one call for all anchors, is its decoding, pass by pass.

Legend: B sequences, M newly committed tokens, K drafts.
"""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from specdec.decoding import Chain, DynamicTree, Proposer
from specdec.diagnostics.parity_compare import decoding_outputs, training_outputs
from specdec.drafter import Drafter, MaskBlock, PostNorm
from specdec.nn.view import View
from specdec.training.building import FromTarget, check
from tests.tiny import VOCAB, tiny_drafter, tiny_target, variants

K, MASKS, DEPTH = 3, 5, {"one": 1, "three": 3}  # fewer drafts are taken than there are masks
TARGET = tiny_target()


def drafter_of(layers: str) -> Drafter:
    spec = dataclasses.replace(
        variants()["dflash"], num_layers=DEPTH[layers], recurrence=MaskBlock(masks=MASKS)
    )
    return tiny_drafter(spec)


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist() for length in (20, 13)
    ]


@pytest.mark.parametrize("layers", DEPTH)
def test_blocks_behind_many_anchors_of_a_cached_text(layers: str) -> None:
    """Packed behind another text in training, and alone in the cache."""
    drafter, (one, two) = drafter_of(layers), texts()
    slots = [3, 7, 15]
    unrolled = training_outputs(TARGET, drafter, [one, two], [*slots, 24, 28], K)
    cached = [
        decoding_outputs(TARGET, drafter, one, slots, K),
        decoding_outputs(TARGET, drafter, two, [4, 8], K),
    ]
    for name in ("features_AKH", "log_probs_AKV"):
        ours = torch.cat([getattr(each, name) for each in cached])
        torch.testing.assert_close(ours, getattr(unrolled, name), rtol=0, atol=1e-12)
    assert unrolled.log_probs_AKV.exp().amax(-1).std() > 1e-3  # no draft is like another


@pytest.mark.parametrize("layers", DEPTH)
def test_passes_that_commit_some_of_what_they_hold(layers: str) -> None:
    """Two sequences side by side, of other lengths, whose passes commit one to K + 1 tokens; the rest is padding."""
    drafter, both = drafter_of(layers), texts()
    states, logits = [], []
    for ids in both:
        ids_1T, documents_1T = torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.int64)
        states.append(
            TARGET.forward(ids_1T, View.packed(documents_1T), drafter.config.aux_layers).aux_BTNH
        )
        steps = drafter.unroll(ids_1T, states[-1], documents_1T, K)
        logits.append(torch.stack([drafter.logits(step.normed_BTH[0]) for step in steps], 1))
    proposer = Proposer(drafter, Chain(K), 20, batch=2)
    for b, prompt in enumerate((4, 2)):  # all but the prompt's last feature
        proposer.prefill(b, torch.tensor([both[b][1:prompt]]), states[b][:, : prompt - 1])
    length_B, seen = torch.tensor([3, 1]), 0
    for counts in ((1, 1), (K + 1, 2), (2, 1), (3, K + 1), (K + 1, 1)):
        count_B = torch.tensor(counts)
        rows = [
            slice(int(length), int(length) + count)
            for length, count in zip(length_B, counts, strict=True)
        ]
        pad = [(0, K + 1 - count) for count in counts]
        ids_BM = torch.stack(
            [F.pad(torch.tensor(both[b][1:][rows[b]]), pad[b], value=5) for b in range(2)]
        )
        aux_BM = torch.cat(
            [F.pad(states[b][:, rows[b]], (0, 0, 0, 0, *pad[b]), value=9.0) for b in range(2)]
        )
        levels = proposer.extend(length_B, ids_BM, aux_BM, count_B)
        length_B = length_B + count_B
        for b in range(2):
            torch.testing.assert_close(
                levels.logits_BKD[b], logits[b][length_B[b] - 1], rtol=0, atol=1e-12
            )
            seen += 1
    assert seen == 10


def test_a_tree_is_made_of_one_distribution_for_each_level() -> None:
    drafter, ids = drafter_of("three"), texts()[0]
    ids_1T = torch.tensor([ids])
    aux_1TNH = TARGET.forward(
        ids_1T, View.packed(torch.zeros_like(ids_1T)), drafter.config.aux_layers
    ).aux_BTNH
    shape = DynamicTree(depth=2, top_k=2, nodes=6)
    proposer = Proposer(drafter, shape, len(ids))
    proposer.prefill(0, ids_1T[:, 1:-1], aux_1TNH[:, :-2])
    length_1 = torch.tensor([len(ids) - 2])
    start = proposer.extend(length_1, ids_1T[:, -1:], aux_1TNH[:, -2:-1], torch.ones_like(length_1))
    tree = proposer.propose(length_1 + 1, ids_1T[:, -1], start, None)  # type: ignore[arg-type]  # nothing is drawn
    best = [set(logits_D.topk(2).indices.tolist()) for logits_D in start.logits_BKD[0]]
    assert set(tree.tokens_BN[0, 1:3].tolist()) == best[0]
    assert [set(pair) for pair in tree.tokens_BN[0, 3:].view(2, 2).tolist()] == [best[1]] * 2


def test_a_block_of_masks_and_injected_context_need_each_other() -> None:
    spec = variants()["dflash"]
    with pytest.raises(ValueError, match="PostNorm hands on: it needs recurrence MaskBlock"):
        dataclasses.replace(spec, recurrence=PostNorm())
    with pytest.raises(ValueError, match="needs entry KVInjection"):
        dataclasses.replace(variants()["qwen3"], recurrence=MaskBlock())
    with pytest.raises(ValueError, match="no window: set attention_window=full"):
        dataclasses.replace(spec, attention_window=16)


def test_a_pass_has_as_many_drafts_as_masks() -> None:
    drafter, ids_1T = drafter_of("one"), torch.tensor([texts()[0]])
    aux_1TNH = torch.zeros(
        *ids_1T.shape, len(drafter.config.aux_layers), drafter.config.target_hidden_size
    ).double()
    asked = "6 drafts are asked of a block that makes 5"
    with pytest.raises(ValueError, match=asked):
        Proposer(drafter, Chain(MASKS + 1), 20)
    with pytest.raises(ValueError, match=asked):
        next(drafter.unroll(ids_1T, aux_1TNH, torch.zeros_like(ids_1T), MASKS + 1))
    with pytest.raises(ValueError, match=r"makes 5 drafts and model\.ttt_steps is 4"):
        check(drafter.config, 64, 64, FromTarget(), False, True, 4)
