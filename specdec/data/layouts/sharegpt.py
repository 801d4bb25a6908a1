"""ShareGPT."""

from specdec.data.layouts.layout import Layout, Message, Values
from specdec.data.layouts.turns import read_turns


class ShareGPT(Layout):
    """``conversations``: a list of turns."""

    name = "sharegpt"
    columns = "conversations"

    def has_columns(self, row: Values) -> bool:
        """By the list."""
        return "conversations" in row

    def messages(self, row: Values, place: str) -> list[Message]:
        """The turns, each speaker under the template's name."""
        return read_turns(row, "conversations", place)
