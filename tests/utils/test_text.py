"""Messages: numbers with their nouns, times, and tensors by name."""

import pytest

from specdec.utils.text import (
    byte_text,
    duration,
    how_many,
    printable,
    seconds_text,
    tensor_fault,
    three_digits,
)


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, "row", "1 row"),
        (0, "row", "0 rows"),
        (12345, "pass", "12,345 passes"),
        (2, "target boundary", "2 target boundaries"),
        (3, "key", "3 keys"),
        (1, "draft vocabulary", "1 draft vocabulary"),
    ],
)
def test_how_many(number: int, noun: str, said: str) -> None:
    assert how_many(number, noun) == said


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        ("two lines\n\tand ünïcödé 語 👍🏽", "two lines\n\tand ünïcödé 語 👍🏽"),
        ("\x1b[31mred\x1b[0m \x1b[2J\x1b[1;1Hhome", "red home"),
        ("\x1b]0;a title\x07\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mone \x1bPq#1\x1b\\byte", "31mone byte"),
        ("a\rb\x08c\x00d\x7fe\x85f", "abcdef"),
        ("a\u202eb\u2066c\ud800d", "abcd"),
        ("\x1b", ""),
        ("\x1b]0;never ended", ""),
    ],
)
def test_no_terminal_obeys_what_is_printable(foreign: str, shown: str) -> None:
    assert printable(foreign) == shown == printable(shown)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (99.4, "99 s"), (125, "2 min"), (99 * 60, "99 min"), (7500, "2 h 5 min")],
)
def test_duration(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"fc.weight": (2, 4), "head": (8, 2), "norm": (2,)}, None),
        ({"fc.weight": (2, 4), "head": (8, 2)}, "it lacks norm [2]"),
        ({"fc.weight": (2, 4)}, "it lacks head [8, 2] and 1 more tensor: norm"),
        (
            {"fc.weights": (2, 4), "head": (8, 2), "norm": (2,)},
            "it lacks fc.weight [2, 4] (is it fc.weights?); it has weights without a place: fc.weights",
        ),
        (
            {"fc.weight": (4, 2), "head": (8, 2), "norm": (2,)},
            "fc.weight is [4, 2], the config says [2, 4]",
        ),
    ],
)
def test_a_tensor_is_named_with_what_was_expected(
    found: dict[str, tuple[int, ...]], said: str | None
) -> None:
    assert tensor_fault(found, {"fc.weight": (2, 4), "head": (8, 2), "norm": (2,)}) == said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (three_digits(0), "0"),
        (three_digits(9_999), "9,999"),
        (three_digits(45_678), "45,700"),
        (three_digits(8_030_261_248), "8.03 billion"),
        (three_digits(0.01234), "0.0123"),
        (byte_text(512), "512 bytes"),
        (byte_text(1_500), "1.50 kB"),
        (byte_text(16_060_000_000), "16.1 GB"),
        (seconds_text(0.0012), "1.20 ms"),
        (seconds_text(210), "3.50 min"),
        (seconds_text(7_500), "2.08 h"),
    ],
)
def test_numbers_have_three_digits_and_a_fitting_unit(text: str, expected: str) -> None:
    assert text == expected
