import numpy as np
import pytest

from specdec.evaluation.table import Passes, Turns, per_prompt, tabulate
from tests.evaluation.made import answer


def test_columns_of_answers() -> None:
    timed = answer("b", (1,), category="x", context=(9,), draft_ms=(0.25,), verify_ms=(1.5,), tokens=7, seconds=0.125)
    found = [answer("a", (3, 0), category="y"), timed, answer("a", ())]
    passes, turns = tabulate(found, ["x", "y"])
    assert passes.dtype == turns.dtype == np.int64
    by_pass, by_turn = Passes(*passes.T), Turns(*turns.T)
    assert by_pass.prompt[0] == by_pass.prompt[1] == by_turn.prompt[2] != by_pass.prompt[2]
    assert [column.tolist() for column in by_pass[1:]] == [
        [1, 1, 0], [-1, -1, 9], [3, 3, 3], [3, 0, 1], [-1, -1, 250_000], [-1, -1, 1_500_000],
    ]  # fmt: skip
    assert [column.tolist() for column in by_turn[1:]] == [
        [1, 0, -1], [5, 7, 0], [10**9, 125_000_000, 10**9], [5, 2, 0], [2 * 10**9] * 3,
    ]  # fmt: skip
    assert [len(rows) for rows in tabulate([])] == [0, 0]


def test_categories_are_all_known_or_none() -> None:
    assert Turns(*tabulate([answer("a", (1,), category="z")])[1].T).category.tolist() == [-1]
    with pytest.raises(ValueError, match="prompt a: category 'z' is none of x, y"):
        tabulate([answer("a", (1,), category="z")], ["x", "y"])


def test_sums_per_prompt_do_not_depend_on_the_order() -> None:
    prompt, value = np.array([5, -3, 5, 7]), np.array([1, 2, 3, 4])
    wanted = [[2.0, 1.0], [4.0, 2.0], [4.0, 1.0]]
    assert per_prompt(prompt, value, 1).tolist() == wanted
    assert per_prompt(prompt[::-1], value[::-1], 1).tolist() == wanted
    assert per_prompt(prompt[:0], value[:0], 1).shape == (0, 2)


def test_a_broken_record_is_caught() -> None:
    with pytest.raises(AssertionError, match="a: a pass accepted more"):
        tabulate([answer("a", (4,), depth=3)])
