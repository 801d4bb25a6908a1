"""UltraChat as first published."""

from specdec.data.layouts.layout import Layout, Message, Values

SPEAKERS = ("user", "assistant")


class UltraChat(Layout):
    """``data``: what user and assistant say in turn (https://arxiv.org/abs/2305.14233)."""

    name = "ultrachat"
    columns = "data"

    def has_columns(self, row: Values) -> bool:
        """By the list."""
        return "data" in row

    def messages(self, row: Values, place: str) -> list[Message]:
        """The user begins."""
        said = row["data"]
        if not isinstance(said, list) or not said or not all(isinstance(one, str) for one in said):
            raise ValueError(f"{place}: 'data' must be a list of at least one string, user and assistant in turn")
        return [{"role": SPEAKERS[number % 2], "content": one} for number, one in enumerate(said)]
