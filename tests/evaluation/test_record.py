from specdec.evaluation.record import Answer


def test_an_answer_is_a_plain_tuple_of_what_was_measured() -> None:
    answer = Answer("7", "math", 5, (2, 1), (3, 3), 0.5, 1.0, 5, True)
    assert answer._fields == (
        "prompt_id",
        "category",
        "tokens",
        "accepted",
        "drafted",
        "seconds",
        "plain_seconds",
        "plain_tokens",
        "identical",
    )
    assert answer == Answer(
        prompt_id="7",
        category="math",
        tokens=5,
        accepted=(2, 1),
        drafted=(3, 3),
        seconds=0.5,
        plain_seconds=1.0,
        plain_tokens=5,
        identical=True,
    )
    assert hash(answer) == hash(answer._replace())  # nothing in it can be changed
