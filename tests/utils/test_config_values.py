"""Plain values, compared and told."""

import functools
from pathlib import Path
from typing import Any

import pytest

from specdec.utils.config import differences, hyperparameters, normalize_config, to_text

LONG = {"class_path": "specdec.drafter.entry.Narrow", "init_args": {"bias": False}}


def test_one_class_has_one_name() -> None:
    import specdec.drafter  # noqa: F401  only what is loaded has a name

    for name in ("specdec.drafter.fusion.Concat", "specdec.drafter.Concat"):
        assert normalize_config([{"class_path": name}]) == [
            {"class_path": "Concat", "init_args": {}},
        ]
    assert normalize_config({"class_path": "no.Such", "init_args": None}) == {
        "class_path": "no.Such",
        "init_args": {},
    }
    assert normalize_config({"a": (1, (2,))}) == {"a": [1, [2]]}


@pytest.mark.parametrize(
    ("one", "two", "wanted"),
    [
        (1, 1, []),
        (1, 2, [("", 1, 2)]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, [("a.c", 2, 3)]),
        ({"a": 1}, {"b": 1}, [("a", 1, None), ("b", None, 1)]),
        ({"a": LONG}, {"a": {**LONG, "init_args": {"bias": True}}}, [("a.bias", False, True)]),
        (
            {"a": LONG},
            {"a": {**LONG, "class_path": "x.Y"}},
            [("a", LONG, {**LONG, "class_path": "x.Y"})],
        ),
        ({"a": LONG}, {"a": {"bias": 1}}, [("a", LONG, {"bias": 1})]),
    ],
)
def test_pairs_go_as_deep_as_both_do(one: Any, two: Any, wanted: list) -> None:
    assert list(differences(one, two)) == wanted


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, "none"),
        (True, "yes"),
        (0, "0"),
        (1e-5, "1e-05"),
        ([1, {"a": False}], "[1, {a no}]"),
        ("ab" * 32, "abababababab"),
        (LONG, "Narrow(bias=no)"),
        ({**LONG, "init_args": {"bias": True}}, "Narrow"),
        ({"class_path": "a.B", "init_args": {"c": 1}}, "B(c=1)"),
    ],
)
def test_words(value: Any, wanted: str) -> None:
    import specdec.drafter  # noqa: F401

    assert to_text(value) == wanted


def test_hyperparameters_are_plain_and_hold_no_secret() -> None:
    config = {
        "model": {"loss": {"class_path": "LKLambda", "init_args": {"decay": 3.0}}, "ttt_steps": 4},
        "trainer": {
            "logger": [
                {
                    "class_path": "Comet",
                    "init_args": {"api_key": "abc", "prompt_tokens": 5, "hub_token": "def"},
                },
                {
                    "class_path": "MLFlowLogger",
                    "init_args": {"tracking_uri": "https://me:pass@host/x", "token": None},
                },
            ]
        },
        "data": {"train": ["a.jsonl"]},
    }
    found = hyperparameters(config)
    assert found["model"] == {"loss": {"class_path": "LKLambda", "decay": 3.0}, "ttt_steps": 4}
    assert found["trainer"]["logger"] == [
        {"class_path": "Comet", "api_key": "***", "prompt_tokens": 5, "hub_token": "***"},
        {"class_path": "MLFlowLogger", "tracking_uri": "https://***@host/x", "token": None},
    ]
    assert found["data"] == config["data"]
    assert hyperparameters({"f": functools.partial(int, base=2), "p": Path("a"), "t": int}) == {
        "f": {"class_path": "builtins.int", "base": 2}, "p": "a", "t": "builtins.int",
    }  # fmt: skip
