"""What the tests share: one chat target with its drafter, and one without a template."""

import pytest

from tests.robustness.made import Pair, pair


@pytest.fixture(scope="session")
def chat() -> Pair:
    """Its tokenizer begins texts and conversations with ``<s>``; the template reads ``enable_thinking``."""
    return pair()


@pytest.fixture(scope="session")
def base() -> Pair:
    """Without a chat template."""
    return pair(template=None)
