"""What the tests of regeneration share."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.target import Target
from tests.data.tiny import write_jsonl
from tests.regeneration.fake_openai import FakeOpenAI
from tests.regeneration.made import LEARNT, asked, make_target
from tests.serving.conftest import fake

__all__ = ["fake"]


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("chat_target"))


@pytest.fixture
def target(chat_target: Path) -> Target:
    return Target.load(chat_target)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """What the target has learnt, with other answers, and every row with an id."""
    rows = [{"id": f"row-{n}", "messages": asked(said)} for n, said in enumerate(LEARNT)]
    return write_jsonl(tmp_path / "chats.jsonl", rows)


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    """A server that may be told to fail."""
    made = FakeOpenAI()
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()
