"""The two ways of numbering the target's states."""

import dataclasses

import pytest

from specdec.export.layers import IDS, boundaries, nested
from tests.tiny import presets, tiny_config

L = 36


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({}, (2, 18, 33)),  # EAGLE-3's
        ({IDS: [2, 18, 33]}, (2, 18, 33)),
        ({IDS: [33, 2, 18]}, (2, 18, 33)),  # engines concatenate ascending
        ({IDS: [0, 36]}, (0, 36)),
        ({IDS: None, "eagle_config": None}, (2, 18, 33)),
        ({"eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33)),
        ({"eagle_config": {IDS: [24, 30, 36]}}, (24, 30, 36)),  # NVIDIA's: the last can be no layer's output
        ({"eagle_config": {"layer_ids": [2, 18, 33]}}, (2, 18, 33)),
        ({IDS: [2, 18, 33], "eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33)),
    ],
)
def test_what_a_config_names(raw: dict[str, object], found: tuple[int, ...]) -> None:
    assert boundaries(raw, L) == found


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({IDS: [2, 18, 33], "eagle_config": {IDS: [2, 18, 33]}}, "should be one less everywhere"),
        ({IDS: [2, 2, 33]}, "named once"),
        ({IDS: [2, 37]}, r"in 0\.\.36"),
        ({IDS: [-1, 2]}, r"in 0\.\.36"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "not supported"),
    ],
)
def test_what_it_may_not_say(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boundaries(raw, L)


def test_the_list_of_outputs_is_one_less_and_has_no_embeddings() -> None:
    config = tiny_config(presets()["eagle3"])
    assert nested(config) == {"use_aux_hidden_state": True, IDS: [1, 2, 3]}
    low = dataclasses.replace(config, aux_layers=(0, 2))
    assert nested(low) == {"use_aux_hidden_state": True}
