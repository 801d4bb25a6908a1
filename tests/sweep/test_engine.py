"""What engines share."""

from specdec.sweep.engine import last_line


def test_an_error_that_says_nothing_is_told_by_its_kind() -> None:
    assert last_line(OSError("one\ntwo\n")) == "two" and last_line(TimeoutError()) == "TimeoutError"
