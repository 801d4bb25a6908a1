"""What training measures along a text is what decoding earns on it: positions, masks and features are the same.

Legend: B batch, T tokens, N aux layers, H hidden, K unroll steps, V vocabulary.
"""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.data import Batch
from specdec.decoding import Chain, DraftShape, DynamicTree, PlainDecoder, SpeculativeDecoder
from specdec.decoding import round as round_module
from specdec.decoding.proposal import Proposer
from specdec.drafter import Drafter
from specdec.drafting.mode import Frontier
from specdec.target import Target
from specdec.training.step import ObjectiveConfig, TrainStep, target_outputs
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import BLOCKS, presets, tiny_drafter, variants

STEPS, NEW, UPDATES = 4, 72, 12
# no hand makes one that is right: of its own drafts it reads nothing; block drafters are in test_block.py
PARALLEL = ("peagle", "peagle_3_1", *BLOCKS)
TRAINED = ("mla", "mtp", *PARALLEL)
RECIPE = ObjectiveConfig(steps=STEPS)
PROMPTS = [[11], [3, 4, 5], [7, 50, 2, 31, 19, 4, 44], [60, 1] * 9]
SPECS = {
    name: dataclasses.replace(spec, draft_vocab_size="all") for name, spec in presets().items()
}
SPECS["eagle3_1_reduced"] = dataclasses.replace(presets()["eagle3_1"], draft_vocab_size=58)
SPECS |= {
    name: dataclasses.replace(spec, draft_vocab_size="all") for name, spec in variants().items()
}


@cache
def target_of(family: str) -> Target:
    return markov_target(family, {"llama": 0.45, "mistral": 0.42}[family])


@cache
def text_of(family: str, number: int) -> list[int]:
    """Prompt and greedy answer, long enough for the last pass of NEW tokens to draft its fill."""
    return (
        PROMPTS[number]
        + PlainDecoder(target_of(family)).generate(PROMPTS[number], NEW + STEPS + 1).ids
    )


def batch_of(texts: list[list[int]], prompts: list[list[int]]) -> Batch:
    """The texts packed into one row, answers supervised."""
    ids = torch.tensor([[token for text in texts for token in text]])
    mask = torch.tensor(
        [[i >= len(p) for text, p in zip(texts, prompts, strict=True) for i in range(len(text))]]
    )
    documents = torch.tensor([[number for number, text in enumerate(texts) for _ in text]])
    return Batch(ids, mask, documents)


@torch.no_grad()
def hits_KT(target: Target, drafter: Drafter, batch: Batch) -> Tensor:  # noqa: N802
    """Whether the unroll's step k at anchor t names token t + 2 + k of its document."""
    aux_BTNH = target_outputs(target, drafter, batch, RECIPE).aux_BTNH
    rows = []
    for k, step in enumerate(drafter.unroll(batch.ids_BT, aux_BTNH, batch.documents_BT, STEPS)):
        said_T = drafter.vocab.to_target(drafter.logits(step.normed_BTH)[0].argmax(-1))
        right_T = torch.zeros_like(said_T, dtype=torch.bool)
        ahead = 2 + k
        same_T = batch.documents_BT[0, ahead:] == batch.documents_BT[0, :-ahead]
        right_T[:-ahead] = (said_T[:-ahead] == batch.ids_BT[0, ahead:]) & same_T
        rows.append(right_T)
    return torch.stack(rows)


def predicted(hits: list[list[bool]], prompt: int) -> tuple[int, ...]:
    """Replay decoding on the hits: a pass starts at the anchor before its root, the next behind its bonus token."""
    out, committed = [], 1
    while committed < NEW:
        anchor = prompt + committed - 2  # the root stands one behind it
        run = [step[anchor] for step in hits]
        out.append(run.index(False) if False in run else STEPS)
        committed += out[-1] + 1
    return tuple(out)


def assert_decoding_earns_what_training_measures(family: str, drafter: Drafter) -> None:
    """Every pass of every answer; packed as in training on one side, one prompt after another on the other."""
    target = target_of(family)
    texts = [text_of(family, number) for number in range(len(PROMPTS))]
    hits = hits_KT(target, drafter, batch_of(texts, PROMPTS))
    decoder, start, passes = SpeculativeDecoder(target, drafter, Chain(STEPS)), 0, []
    for text, prompt in zip(texts, PROMPTS, strict=True):
        made = decoder.generate(prompt, NEW)
        assert made.ids == text[len(prompt) :][:NEW]
        assert made.accepted == predicted(hits[:, start : start + len(text)].tolist(), len(prompt))
        start += len(text)
        passes += made.accepted
    refused, deep = sum(count == 0 for count in passes), sum(count > 1 for count in passes)
    assert min(refused, deep) >= 5, passes  # neither always nor never, or the equality says nothing


@pytest.mark.parametrize(
    ("family", "name", "level"),
    [
        ("llama", "eagle1", 0.7),
        ("mistral", "eagle3_1", 0.4),
        ("llama", "eagle3_1_reduced", 0.2),
    ],
)
def test_disturbed_drafters(family: str, name: str, level: float) -> None:
    """Noise on every matrix: what is drafted hangs on feature, context and depth, and is right now and then."""
    drafter = disturb(perfect_drafter(target_of(family), SPECS[name], sharpness=1.0), level)
    assert_decoding_earns_what_training_measures(family, drafter)


@pytest.mark.parametrize("name", sorted(set(variants()) - {"two_layer", *TRAINED}))
def test_disturbed_variants(name: str) -> None:
    """Texts of eighty tokens and more, which a window of 16 cuts."""
    level = 0.6 if name == "narrow_fusion" else 0.2
    drafter = disturb(perfect_drafter(target_of("llama"), SPECS[name], sharpness=1.0), level)
    for part, parameter in drafter.named_parameters():
        if part.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.fill_(2)  # as sharp as without these norms
    assert_decoding_earns_what_training_measures("llama", drafter)


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1", "peagle_3_1"])
def test_drafters_trained_by_the_real_objective(name: str) -> None:
    """They overfit these very texts, which a train and serve mismatch would undo."""
    target = target_of("llama")
    drafter = tiny_drafter(SPECS[name]).requires_grad_(True)
    drafter.warm_start(target.embedding_weight(), target.head_weight())
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(False)
    batch = batch_of([text_of("llama", number) for number in range(len(PROMPTS))], PROMPTS)
    teacher = target_outputs(target, drafter, batch, RECIPE)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(UPDATES * (3 if name in TRAINED and name != "mtp" else 1)):
        loss = TrainStep(drafter, RECIPE)(batch, teacher).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert_decoding_earns_what_training_measures("llama", drafter.requires_grad_(False))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", Chain(4)),
        ("mistral", DynamicTree(depth=4, top_k=3, nodes=16)),
        ("llama", DynamicTree(depth=2, top_k=8, nodes=30)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", presets())
def test_the_drafter_is_handed_the_features_of_training(
    family: str, shape: DraftShape, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a path that leaves a tree's first branch; losslessness would not show it."""
    target, prompt = target_of(family), PROMPTS[2]
    drafter = disturb(perfect_drafter(target, SPECS[name], sharpness=2.0), 0.8)
    handed: list[tuple[Tensor, Tensor]] = []
    paths: list[list[int]] = []
    original_prefill, original_extend, original_order = (
        Proposer.prefill,
        Proposer.extend,
        round_module.nodes_in_order,
    )

    def prefill(self: Proposer, b: int, ids_1M: Tensor, aux_1MNH: Tensor, *rest: Any) -> None:
        assert b == 0 and not handed
        handed.append((ids_1M[0], aux_1MNH))
        original_prefill(self, b, ids_1M, aux_1MNH, *rest)

    def extend(
        self: Proposer,
        length_B: Tensor,
        ids_BM: Tensor,
        aux_BMNH: Tensor,
        count_B: Tensor,
        *rest: None,
    ) -> Frontier:
        assert length_B.tolist() == [sum(len(ids) for ids, _ in handed)]
        handed.append((ids_BM[0, : int(count_B)].clone(), aux_BMNH[:, : int(count_B)].clone()))
        return original_extend(self, length_B, ids_BM, aux_BMNH, count_B, *rest)

    def in_order(path_BN: Tensor, most: int) -> Tensor:
        nodes_BP = original_order(path_BN, most)
        paths.append(nodes_BP[0].tolist())
        return nodes_BP

    monkeypatch.setattr(Proposer, "prefill", prefill)
    monkeypatch.setattr(Proposer, "extend", extend)
    monkeypatch.setattr(round_module, "nodes_in_order", in_order)
    made = SpeculativeDecoder(target, drafter, shape).generate(prompt, 40)
    for path, count in zip(paths, made.accepted, strict=True):
        # behind its end: the nodes' numbers
        assert path[count + 1 :] == list(range(count + 1, shape.depth + 1))
        del path[count + 1 :]
    strayed = sum(path != list(range(len(path))) for path in paths)
    assert strayed == 0 if isinstance(shape, Chain) else strayed >= 2

    ids_T, aux_1TNH = (
        torch.cat([ids for ids, _ in handed]),
        torch.cat([aux for _, aux in handed], dim=1),
    )
    text = [*prompt, *PlainDecoder(target).generate(prompt, len(ids_T)).ids]
    # each feature stands beside the token that follows it
    assert ids_T.tolist() == text[1 : len(ids_T) + 1]
    wanted_1TNH = target_outputs(target, drafter, batch_of([text], [prompt]), RECIPE).aux_BTNH[
        :, : len(ids_T)
    ]
    torch.testing.assert_close(aux_1TNH, wanted_1TNH, rtol=1e-9, atol=1e-9)
