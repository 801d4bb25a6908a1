"""The acceptance profile against decoding itself."""

import pytest
import torch

from specdec.decoding import PlainDecoder, Request, SpeculativeDecoder
from specdec.drafter import DrafterSpec
from specdec.evaluation.tuning.profile import AHEAD, Profile, Text, measure_profile
from specdec.evaluation.tuning.shape import Shape, shapes
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import VOCAB, presets

TARGET = markov_target(context=0.6)
PROMPTS = [torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in
           (3, 9, 5, 1, 7, 4, 6, 8, 2)]  # fmt: skip
NEW = 15


def decoded(drafter: object, shape: Shape, end: tuple[int, ...] = ()) -> tuple[int, int]:
    """Committed tokens and passes of real decoding."""
    decoder = SpeculativeDecoder(TARGET, drafter, shape.growth, batch=len(PROMPTS))  # type: ignore[arg-type]
    made = [one for _, one in decoder.generate_all([Request(ids, NEW) for ids in PROMPTS], end)]
    passes = sum(len(one.accepted) for one in made)
    return sum(sum(one.accepted) for one in made) + passes, passes


@pytest.mark.parametrize("end", [(), (11, 12, 13, 14)])
def test_replay_is_decoding(end: tuple[int, ...]) -> None:
    drafter = disturb(perfect_drafter(TARGET, presets()["eagle3_1"]), 0.35)
    profile = measure_profile(TARGET, drafter, PROMPTS, NEW, (1, 2, 4), end=end)
    assert {len(text.ids) == NEW + 7 for text in profile.texts} == ({True} if not end else {True, False})
    lengths = set()
    for shape in (
        Shape(1, 2, 2), Shape(1, 7, 7), Shape(2, 3, 4), Shape(2, 6, 20), Shape(4, 2, 5), Shape(4, 6, 9), Shape(4, 6, 40)
    ):  # fmt: skip
        found = profile.acceptance(shape)
        assert tuple(found) == decoded(drafter, shape, end), shape
        lengths.add(round(found.length, 3))
    assert len(lengths) > 3 and min(lengths) > 1  # so that a wrong count would show


def test_the_texts_are_plain_decoding_s() -> None:
    drafter = disturb(perfect_drafter(TARGET, presets()["eagle3"]), 0.35)
    profile = measure_profile(TARGET, drafter, PROMPTS[:3], NEW, (1,))
    plain = PlainDecoder(TARGET)
    assert [text.ids[:NEW] for text in profile.texts] == [plain.generate(ids, NEW).ids for ids in PROMPTS[:3]]


def test_a_perfect_drafter_is_accepted_whole() -> None:
    target = markov_target()
    done: list[int] = []
    drafter = perfect_drafter(target, DrafterSpec(draft_vocab_size="all"))
    profile = measure_profile(target, drafter, PROMPTS, NEW, (1, 2), on_prompts=done.append)
    assert done == [8, 1]
    for depth in (1, 4, 7):
        found = profile.acceptance(Shape(1, depth, depth))
        assert found.passes == len(PROMPTS) * -(-(NEW - 1) // (depth + 1)) and found.length == depth + 1


def test_the_worst_drafter_is_never_accepted() -> None:
    target = markov_target()
    drafter = perfect_drafter(target, DrafterSpec(draft_vocab_size="all"))
    with torch.no_grad():
        drafter.lm_head.weight.neg_()  # the true successor comes last
    profile = measure_profile(target, drafter, PROMPTS[:2], NEW, (1, 2, 4))
    assert {profile.acceptance(shape).length for shape in shapes((1, 2, 4), 48)} == {1.0}


def test_smaller_trees_are_parts_of_larger_ones() -> None:
    drafter = disturb(perfect_drafter(TARGET, presets()["eagle3_1"]), 0.35)
    profile = measure_profile(TARGET, drafter, PROMPTS[:4], NEW, (1, 4))
    for text in profile.texts:
        for ahead_RDD in text.ahead.values():
            deeper = ahead_RDD.diff(dim=1)
            assert ((deeper > 0) | (ahead_RDD[:, 1:] == AHEAD)).all()  # a child stands behind its parent
            known = ahead_RDD != AHEAD
            assert (ahead_RDD.diff(dim=2)[known[:, :, :-1]] >= 0).all()  # more levels, more in front
    assert [profile.acceptance(Shape(1, d, d)).length for d in range(1, 8)] == sorted(
        profile.acceptance(Shape(1, d, d)).length for d in range(1, 8)
    )


def test_the_last_pass_ends_with_the_text() -> None:
    ahead = torch.zeros(3, 7, 7, dtype=torch.int64)
    ended = Text([5, 6, 7, 8], 3, {1: ahead})
    assert Profile([ended], (1,)).acceptance(Shape(1, 7, 7)) == (3, 1)
    assert Profile([ended], (1,)).acceptance(Shape(1, 1, 1)) == (3, 2)
    assert Profile([Text([5], 0, {1: ahead[:0]})], (1,)).acceptance(Shape(1, 7, 7)).length == 1


def test_a_node_needs_more_nodes_than_stand_ahead_of_it() -> None:
    text = Text([1, 2, 3, 4, 5, 6, 7, 8], 2, {2: torch.full((2, 6, 6), 3)})
    assert Profile([text], (2,)).acceptance(Shape(2, 2, 3)) == (2, 2)
    assert Profile([text], (2,)).acceptance(Shape(2, 2, 4)) == (3, 1)


def test_texts_near_the_last_position_are_judged_as_far_as_they_go() -> None:
    most = TARGET.config.max_position_embeddings
    prompt = (PROMPTS[0] * most)[: most - 12]
    drafter = perfect_drafter(TARGET, presets()["eagle3_1"])
    (text,) = measure_profile(TARGET, drafter, [prompt], 10, (1,)).texts
    assert len(text.ids) == 12
