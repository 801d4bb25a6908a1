"""A prompt in parts."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.prompt import Part, parts

CPU = torch.device("cpu")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 16))
def test_parts_hold_every_token_with_the_one_after_it(length: int, width: int) -> None:
    """Each stands where it stood, and the last part says where the prompt ends."""
    prompt = [100 + i for i in range(length)]
    found: dict[int, tuple[int, int]] = {}
    seen = 0
    for part, end in parts(prompt, width, CPU):
        first, last = int(part.first_1), int(part.last_11)
        assert part.ids_1T.shape == part.after_1M.shape == (1, width) and part.ids_1T.is_contiguous()
        assert first <= seen < end == first + width <= max(length, width)  # nothing is left out, no slot is beyond
        seen = end
        found |= {
            first + i: pair
            for i, pair in enumerate(zip(part.ids_1T[0].tolist(), part.after_1M[0].tolist(), strict=True))
        }
    assert seen >= length and first + last == length - 1
    assert [found[i] for i in range(length - 1)] == list(itertools.pairwise(prompt))
    assert found[length - 1][0] == prompt[-1]


def test_the_whole_has_no_token_after_its_last() -> None:
    part = Part.whole([5, 6, 7], CPU)
    assert part.ids_1T.tolist() == [[5, 6, 7]] and part.after_1M.tolist() == [[6, 7]]
    assert part.first_1.tolist() == [0] and part.last_11.tolist() == [[2]]
