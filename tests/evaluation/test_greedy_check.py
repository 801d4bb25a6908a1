"""Greedy tokens compared with plain decoding's: none of the real decoders' is wrong, all of broken ones' are found."""

import dataclasses

import pytest
import torch

from specdec.decoding import Chain, DynamicTree, Growth, Request, SpeculativeDecoder, StaticTree
from specdec.evaluation.greedy_check import check_greedy, plain_tokens
from tests.evaluation.made import alter
from tests.tiny import presets, tiny_drafter, tiny_target

PROMPTS = [[3, 4, 5], [9], list(range(20))]
GROWTHS: list[Growth] = [Chain(3), StaticTree(), DynamicTree(depth=3, top_k=3, nodes=9)]
TARGET, DRAFTER = tiny_target(), tiny_drafter(presets()["eagle3_1"])


@pytest.mark.parametrize("growth", GROWTHS, ids=lambda growth: growth.name)
def test_greedy_decoding_says_what_the_target_says(growth: Growth) -> None:
    found = check_greedy(TARGET, DRAFTER, growth, PROMPTS, plain_tokens(TARGET, PROMPTS, 20))
    assert found.fault is None and found.near_ties == found.wrong == ()
    assert found.tokens == 60 and found.growth == growth.name


def test_every_wrong_token_is_found_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that says another token at two places of a text."""

    def wrong(_: SpeculativeDecoder, asked: Request, ids: list[int]) -> list[int]:
        at = [place - len(asked.prompt) for place in (7, 12)]
        return [token ^ 1 if i in at else token for i, token in enumerate(ids)]

    alter(monkeypatch, wrong)
    found = check_greedy(TARGET, DRAFTER, Chain(2), PROMPTS[:1], plain_tokens(TARGET, PROMPTS[:1], 20))
    assert [(d.prompt, d.position) for d in found.wrong] == [(0, 4), (0, 9)]
    assert found.fault == "2 of 20 tokens are wrong"
    for difference in found.wrong:
        assert difference.token == difference.plain_token ^ 1
        assert difference.gap > difference.allowed > 0


@pytest.mark.parametrize(("other", "fault"), [(1, False), (2, True)], ids=["of the tie", "a third"])
def test_a_near_tie_is_no_fault_and_a_third_token_is_one(other: int, fault: bool) -> None:
    """Two tokens with one head row are equally likely: whichever of them is said, it is rounding's choice."""
    target = tiny_target()
    with torch.no_grad():
        rows = target.model.get_output_embeddings().weight
        rows[1:60:2] = rows[:60:2]
        rows[60:] = 0
    with pytest.MonkeyPatch.context() as patch:
        alter(patch, lambda decoder, asked, ids: [ids[0] ^ other, *ids[1:]])
        found = check_greedy(target, DRAFTER, Chain(2), PROMPTS[1:2], plain_tokens(target, PROMPTS[1:2], 6))
    told, untold = (found.wrong, found.near_ties) if fault else (found.near_ties, found.wrong)
    assert len(told) == 6 and not untold and found.fault is not None
    few = dataclasses.replace(found, near_ties=found.near_ties[:1], wrong=found.wrong[:1])
    assert (few.fault is not None) == fault
    assert told[0].gap > told[0].allowed if fault else told[0].gap == 0
