"""What training measures along a text is what decoding earns on it: positions, masks and features are the same.

Legend: B batch, T tokens, N aux layers, H hidden, K unroll steps, V vocabulary.
"""

import dataclasses
from functools import cache

import pytest
import torch

from specdec.data import Batch
from specdec.decoding import Chain, PlainDecoder, SpeculativeDecoder
from specdec.drafter import Drafter
from specdec.target import Target
from specdec.training.losses import SoftCrossEntropy
from specdec.training.objective import objective, teach
from specdec.training.ttt import ttt_unroll
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets, tiny_drafter

STEPS, NEW = 4, 72
PROMPTS = [[11], [3, 4, 5], [7, 50, 2, 31, 19, 4, 44], [60, 1] * 9]
SPECS = {name: dataclasses.replace(spec, draft_vocab_size="all") for name, spec in presets().items()}
SPECS["eagle3_1_reduced"] = dataclasses.replace(presets()["eagle3_1"], draft_vocab_size=50)
SPECS["two_layers"] = dataclasses.replace(SPECS["eagle3_1"], num_layers=2)


@cache
def target_of(family: str) -> Target:
    return markov_target(family, {"llama": 0.45, "mistral": 0.42}[family])


@cache
def text_of(family: str, number: int) -> list[int]:
    """Prompt and greedy answer, long enough for the last pass of NEW tokens to draft its fill."""
    return PROMPTS[number] + PlainDecoder(target_of(family)).generate(PROMPTS[number], NEW + STEPS + 1).ids


def batch_of(texts: list[list[int]], prompts: list[list[int]]) -> Batch:
    """The texts packed into one row, answers supervised."""
    ids = torch.tensor([[token for text in texts for token in text]])
    mask = torch.tensor([[i >= len(p) for text, p in zip(texts, prompts, strict=True) for i in range(len(text))]])
    documents = torch.tensor([[number for number, text in enumerate(texts) for _ in text]])
    return Batch(ids, mask, documents)


@torch.no_grad()
def hits_KT(target: Target, drafter: Drafter, batch: Batch) -> torch.Tensor:  # noqa: N802
    """Whether the unroll's step k at anchor t names token t + 2 + k of its document."""
    aux_BTNH = teach(target, drafter, batch).aux_BTNH
    rows = []
    for k, step in enumerate(ttt_unroll(drafter, batch.ids_BT, aux_BTNH, batch.documents_BT, STEPS)):
        said_T = drafter.vocab.to_target(drafter.logits(step.normed_BTH)[0].argmax(-1))
        right_T = torch.zeros_like(said_T, dtype=torch.bool)
        ahead = 2 + k
        same_T = batch.documents_BT[0, ahead:] == batch.documents_BT[0, :-ahead]
        right_T[:-ahead] = (said_T[:-ahead] == batch.ids_BT[0, ahead:]) & same_T
        rows.append(right_T)
    return torch.stack(rows)


def predicted(hits: list[list[bool]], prompt: int) -> tuple[int, ...]:
    """Replay decoding on the hits: each pass starts at the anchor before its root and goes on behind its bonus token."""
    out, committed = [], 1
    while committed < NEW:
        anchor = prompt + committed - 2  # the root stands one behind it
        run = [step[anchor] for step in hits]
        out.append(run.index(False) if False in run else STEPS)
        committed += out[-1] + 1
    return tuple(out)


def assert_decoding_earns_what_training_measures(family: str, drafter: Drafter, least: float) -> None:
    target, numbers = target_of(family), range(len(PROMPTS))
    texts = [text_of(family, number) for number in numbers]
    packed_KT = hits_KT(target, drafter, batch_of(texts, PROMPTS))
    decoder, start, passes = SpeculativeDecoder(target, drafter, Chain(STEPS)), 0, []
    for number in numbers:
        text, prompt = texts[number], PROMPTS[number]
        made = decoder.generate(prompt, NEW)
        assert made.ids == text[len(prompt) :][:NEW]
        hits = packed_KT[:, start : start + len(text)].tolist()
        assert made.accepted == predicted(hits, len(prompt))
        start += len(text)
        passes += made.accepted
    shares = [sum(count >= k for count in passes) / len(passes) for k in range(1, STEPS + 1)]
    assert shares[0] > least and shares[0] < 0.97 and shares[1] > 0, shares  # neither never nor always


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("level", [0.3, 0.7])
def test_disturbed_drafters(family: str, name: str, level: float) -> None:
    """Noise on every matrix: the draft hangs on feature, context and depth, and is right only now and then."""
    drafter = disturb(perfect_drafter(target_of(family), SPECS[name], sharpness=2.0), level)
    assert_decoding_earns_what_training_measures(family, drafter, 0.05)
