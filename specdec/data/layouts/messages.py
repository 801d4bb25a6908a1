"""OpenAI's ``messages``, which UltraChat 200k has as well, beside a ``prompt`` that repeats the first of them."""

from specdec.data.layouts.layout import Layout, Message, Values
from specdec.data.layouts.turns import read_turns


class Messages(Layout):
    """``messages``: a list of turns."""

    name = "messages"
    columns = "messages"

    def has_columns(self, row: Values) -> bool:
        """By the list."""
        return "messages" in row

    def messages(self, row: Values, place: str) -> list[Message]:
        """The turns as they are."""
        return read_turns(row, "messages", place)
