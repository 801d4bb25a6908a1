"""Alpaca."""

from specdec.data.layouts.layout import ID_COLUMNS, SYSTEM, Layout, Message, Values, text, with_system


class Alpaca(Layout):
    """``instruction`` and, after a blank line, its ``input`` if it has one; ``output`` answers."""

    name = "alpaca"
    columns = "instruction, output"

    def has_columns(self, row: Values) -> bool:
        """By both."""
        return "instruction" in row and "output" in row

    def unread(self, row: Values) -> list[str]:
        """``text`` repeats the rest in Alpaca's own words."""
        return sorted(row.keys() - {"instruction", "input", "output", "text", "category", *SYSTEM, *ID_COLUMNS})

    def messages(self, row: Values, place: str) -> list[Message]:
        """One question, one answer."""
        asked = text(row, "instruction", place)
        if row.get("input", "") != "":
            asked += "\n\n" + text(row, "input", place)
        answer = text(row, "output", place)
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return with_system(row, said, place)
