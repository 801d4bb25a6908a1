"""Costs of a round, fitted and measured."""

import pytest

from specdec.decoding import PlainDecoder
from specdec.evaluation.tuning.costs import (
    TIMED_TOKENS,
    Costs,
    Timing,
    fit_costs,
    ladder,
    measure_costs,
    timed_requests,
)
from specdec.evaluation.tuning.shape import WIDTHS, Shape, shapes
from tests.tiny import presets, tiny_drafter, tiny_target


@pytest.mark.parametrize("compiled", [False, True])
def test_the_fit_finds_steps_and_rest(compiled: bool) -> None:
    steps, rest, plain_ms = {1: 0.1, 2: 0.15, 3: 0.17, 4: 0.2, 8: 0.5}, 0.3, 4.0
    timings = [
        Timing(
            shape,
            plain_ms * (rest + steps[1] + (shape.depth - 1) * steps[shape.top_k]),
            plain_ms * (1 + 0.02 * shape.nodes),
        )
        for shape in ladder(compiled, 1000)
    ]
    costs = fit_costs(4, plain_ms, timings)
    assert costs.rest == pytest.approx(rest) and costs.misfit == pytest.approx(0, abs=1e-9)
    assert costs.step == pytest.approx({k: steps[k] for k in costs.step})
    for shape in shapes(tuple(costs.step), costs.most_nodes):
        assert costs.v(shape.nodes + 1) == pytest.approx(1 + 0.02 * shape.nodes)
        assert costs.drafting(shape) == pytest.approx(steps[1] + (shape.depth - 1) * steps[shape.top_k])


def test_a_misfit_and_repeated_sizes_are_told() -> None:
    timings = [
        Timing(Shape(1, 1, 1), 1.0, 2.0), Timing(Shape(1, 2, 2), 2.0, 3.0), Timing(Shape(1, 3, 3), 3.0, 4.0),
        Timing(Shape(2, 2, 3), 2.5, 5.0), Timing(Shape(2, 3, 7), 5.0, 6.0),
    ]  # fmt: skip
    costs = fit_costs(1, 2.0, timings)
    assert costs.verify == {1: 1.0, 2: 1.0, 3: 1.5, 4: 2.25, 8: 3.0}
    assert 0.05 < costs.misfit < 0.5


def test_steps_never_have_a_negative_cost() -> None:
    falling = [Timing(Shape(1, depth, depth), 5.0 - depth, 1.0) for depth in (1, 2, 3)]
    assert fit_costs(1, 1.0, falling).step == {1: 0.0}


def test_costs_lie_on_lines_between_what_was_measured_and_not_beyond() -> None:
    costs = Costs(1, 1.0, {1: 1.0, 4: 1.3, 8: 2.3}, {1: 0.1, 4: 0.4}, 0.0, 0.0)
    assert [costs.v(nodes) for nodes in (1, 2, 4, 6)] == pytest.approx([1.0, 1.1, 1.3, 1.8])
    assert costs.c(3) == pytest.approx(0.3) and costs.most_nodes == 7
    with pytest.raises(ValueError, match="9 lies outside what was measured, 1 to 8"):
        costs.v(9)


def test_the_ladder_covers_the_candidates() -> None:
    for compiled, widest, most in ((False, 8, 48), (True, 4, 31)):
        found = ladder(compiled, 1000)
        assert max(shape.top_k for shape in found) == widest and max(shape.nodes for shape in found) == most
        for top_k in {shape.top_k for shape in found}:
            assert len({shape.depth for shape in found if shape.top_k == top_k}) > 1
        assert all(shape.growth.nodes_drafted == shape.nodes for shape in found)
    assert {shape.top_k for shape in ladder(False, 3)} == {1, 2, 3}
    assert set(WIDTHS) == {shape.top_k for shape in ladder(False, 1000)}


def test_texts_to_time_on_are_in_the_middle_of_their_answers() -> None:
    prompts, answers = [[0] * 9, [1] * 3, [2] * 6], [[5] * 107] * 3
    (one,) = timed_requests(prompts, answers, 1, 100)
    assert one.prompt == [2] * 6 + [5] * ((100 - TIMED_TOKENS) // 2) and one.max_new_tokens == TIMED_TOKENS
    found = timed_requests(prompts, answers, 6, 100)
    assert [request.prompt[0] for request in found] == [1, 1, 2, 2, 0, 0]
    given = (100 - TIMED_TOKENS) // 2 + TIMED_TOKENS
    assert {len(request.prompt) + request.max_new_tokens for request in found} == {3 + given, 6 + given, 9 + given}
    (short,) = timed_requests(prompts, answers, 1, 4)
    assert short.prompt == [2] * 6 and short.max_new_tokens == 4


def test_every_shape_is_timed() -> None:
    target, drafter = tiny_target(), tiny_drafter(presets()["eagle3_1"])
    requests = timed_requests([[1, 2, 3], [4, 5]], [[], []], 2, 4)
    calls: list[None] = []
    costs = measure_costs(target, drafter, requests, PlainDecoder(target, batch=2), 1, lambda: calls.append(None))
    order = ladder(False, 40)
    assert len(calls) == 2 * (1 + len(order))
    assert costs.batch == 2 and costs.plain_ms > 0
    assert set(costs.verify) == {1, *(shape.nodes + 1 for shape in order)} and set(costs.step) == set(WIDTHS)
    assert all(value > 0 for value in costs.verify.values())
