"""The small chat targets of the engines' tests."""

from tests.engines.conftest import chat_target, chat_targets

__all__ = ["chat_target", "chat_targets"]
